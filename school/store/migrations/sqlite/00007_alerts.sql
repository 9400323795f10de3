-- +goose Up

-- What operators are told. An alert waits here until a webhook has taken it, so
-- that a webhook that is down, or a process that dies, delays it and loses none.
CREATE TABLE alerts (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    kind        TEXT    NOT NULL,
    body        TEXT    NOT NULL, -- JSON
    since       INTEGER NOT NULL, -- when what it tells of began
    seen        INTEGER NOT NULL, -- how often it was seen since the alert before it
    job_status  TEXT    NOT NULL DEFAULT 'PENDING', -- PENDING, SENT, FAILED
    attempts    INTEGER NOT NULL DEFAULT 0,
    retry_after INTEGER, -- from when it may be claimed; NULL: SENT or FAILED
    error_code  TEXT,
    created_at  INTEGER NOT NULL,
    sent_at     INTEGER
) STRICT;
CREATE INDEX alerts_due ON alerts (retry_after) WHERE retry_after IS NOT NULL;

-- What holds now, so that it is told once.
CREATE TABLE alert_states (
    key     TEXT    PRIMARY KEY,
    active  INTEGER NOT NULL CHECK (active IN (0, 1)),
    since   INTEGER NOT NULL,
    told_at INTEGER NOT NULL,
    seen_at INTEGER NOT NULL,
    seen    INTEGER NOT NULL -- since it was told
) STRICT, WITHOUT ROWID;

-- +goose Down
DELETE FROM job_positions WHERE job = 'digest';
DROP TABLE alert_states;
DROP TABLE alerts;
