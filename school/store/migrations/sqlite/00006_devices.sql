-- +goose Up

-- While a brake is on, devices of its school that come back as unregistered from
-- its sender are flagged and not retired, until a person has looked.
CREATE TABLE device_brakes (
    id            INTEGER PRIMARY KEY AUTOINCREMENT, -- never given out again: people close brakes by it
    school_id     TEXT    NOT NULL REFERENCES schools ON DELETE CASCADE,
    sender        TEXT    NOT NULL,
    batch_id      TEXT    NOT NULL, -- that engaged it, recorded by owner: unregistered of size messages
    owner         TEXT    NOT NULL,
    unregistered  INTEGER NOT NULL,
    size          INTEGER NOT NULL,
    engaged_at    INTEGER NOT NULL,
    closed_at     INTEGER, -- NULL: it is on
    closed_as     TEXT, -- confirmed: those flagged are retired; cleared: the flags are removed
    closed_by     TEXT,
    retired_count INTEGER NOT NULL DEFAULT 0 -- devices that its confirmation retired
) STRICT;
CREATE UNIQUE INDEX device_brakes_open ON device_brakes (school_id, sender) WHERE closed_at IS NULL;
CREATE INDEX device_brakes_school ON device_brakes (school_id, id);

CREATE TABLE device_flags (
    brake_id   INTEGER NOT NULL REFERENCES device_brakes ON DELETE CASCADE,
    school_id  TEXT    NOT NULL,
    token_sha  BLOB    NOT NULL,
    batch_id   TEXT    NOT NULL,
    claimed_at INTEGER NOT NULL, -- of the last batch that flagged it: registered since, a device is not the one that was answered for
    flagged_at INTEGER NOT NULL,
    PRIMARY KEY (brake_id, token_sha),
    FOREIGN KEY (school_id, token_sha) REFERENCES devices ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE INDEX device_flags_device ON device_flags (school_id, token_sha);

-- +goose Down
DROP TABLE device_flags;
DROP TABLE device_brakes;
