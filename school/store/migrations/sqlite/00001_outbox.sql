-- +goose Up

-- The tables of the outbox, with the names and columns that they have on
-- PostgreSQL; what the two engines mean by them is the same. Every time is
-- microseconds since 1970 UTC, so that it can be compared, added to and indexed
-- as the number it is. For people: datetime(due_at / 1000000, 'unixepoch').
-- Comments at the end of a line stay with the table: see .schema.

CREATE TABLE schools (
    id               TEXT    PRIMARY KEY,
    name             TEXT    NOT NULL DEFAULT '',
    sender           TEXT    NOT NULL DEFAULT '', -- empty: the deployment's default sender
    "limit"          INTEGER CHECK ("limit" >= 1), -- attempts per cycle; NULL: the deployment's
    rest             INTEGER CHECK (rest >= 1), -- milliseconds; NULL: the deployment's
    settings_version INTEGER NOT NULL DEFAULT 1, -- grows with each change, also over delete and re-creation
    created_at       INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The ledger. It outlives its school: a school that is deleted and made again
-- starts neither a new cycle nor a lower fence. No foreign key for that reason.
CREATE TABLE school_terms (
    school_id        TEXT    PRIMARY KEY,
    fence            INTEGER NOT NULL DEFAULT 0, -- number of the newest term; claims and takeovers of an older one are refused
    acquisition      TEXT    NOT NULL DEFAULT '',
    owner            TEXT    NOT NULL DEFAULT '',
    opened_at        INTEGER,
    cycle            INTEGER NOT NULL DEFAULT 0,
    attempted        INTEGER NOT NULL DEFAULT 0, -- attempts claimed in this cycle
    next_eligible_at INTEGER, -- end of the rest that this cycle ended with, passed or not; NULL: none was set
    "limit"          INTEGER NOT NULL DEFAULT 0, -- attempts per cycle when the ledger was last written; 0: never claimed
    rest             INTEGER NOT NULL DEFAULT 0, -- milliseconds, when the ledger was last written
    settings_version INTEGER NOT NULL DEFAULT 0,
    paused           INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1))
) STRICT, WITHOUT ROWID;

CREATE TABLE devices (
    school_id     TEXT    NOT NULL,
    token_sha     BLOB    NOT NULL, -- SHA-256 of the token
    token         TEXT    NOT NULL,
    ref           TEXT    NOT NULL DEFAULT '',
    enabled       INTEGER NOT NULL DEFAULT 1 CHECK (enabled IN (0, 1)),
    registered_at INTEGER NOT NULL, -- last registration: an answer to an older batch does not retire it
    updated_at    INTEGER NOT NULL,
    retired_at    INTEGER,
    PRIMARY KEY (school_id, token_sha)
) STRICT, WITHOUT ROWID;
-- What a page asks: is this device switched off? Few are.
CREATE INDEX devices_off ON devices (school_id, token_sha) WHERE enabled = 0 AND retired_at IS NULL;

CREATE TABLE device_topics (
    school_id TEXT NOT NULL,
    topic     TEXT NOT NULL,
    token_sha BLOB NOT NULL,
    PRIMARY KEY (school_id, topic, token_sha),
    FOREIGN KEY (school_id, token_sha) REFERENCES devices ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE INDEX device_topics_device ON device_topics (school_id, token_sha);

-- A notice. Its counters only ever move from one to another; what waits is what
-- is left. No index names a counter, the frontier or job_status, so that the
-- updates of a notice under way touch its row alone.
CREATE TABLE push_clusters (
    id                        INTEGER PRIMARY KEY,
    school_id                 TEXT    NOT NULL,
    job_status                TEXT    NOT NULL DEFAULT 'PENDING',
    priority                  INTEGER NOT NULL DEFAULT 1, -- 0 urgent, 1 normal, 2 low
    delivery                  TEXT    NOT NULL DEFAULT 'at_least_once',
    total_count               INTEGER NOT NULL,
    in_progress_count         INTEGER NOT NULL DEFAULT 0,
    retry_pending_count       INTEGER NOT NULL DEFAULT 0,
    success_count             INTEGER NOT NULL DEFAULT 0,
    fail_count                INTEGER NOT NULL DEFAULT 0,
    retry_success_count       INTEGER NOT NULL DEFAULT 0,
    retry_fail_count          INTEGER NOT NULL DEFAULT 0,
    permanent_fail_count      INTEGER NOT NULL DEFAULT 0,
    skipped_disabled_count    INTEGER NOT NULL DEFAULT 0,
    skipped_cancelled_count   INTEGER NOT NULL DEFAULT 0,
    skipped_expired_count     INTEGER NOT NULL DEFAULT 0,
    skipped_duplicate_count   INTEGER NOT NULL DEFAULT 0,
    skipped_not_allowed_count INTEGER NOT NULL DEFAULT 0,
    waiting_count             INTEGER NOT NULL GENERATED ALWAYS AS (
        total_count - in_progress_count - retry_pending_count
        - success_count - fail_count - retry_success_count - retry_fail_count - permanent_fail_count
        - skipped_disabled_count - skipped_cancelled_count - skipped_expired_count
        - skipped_duplicate_count - skipped_not_allowed_count) VIRTUAL,
    frontier                  INTEGER NOT NULL DEFAULT 0, -- recipients with a higher seq were never claimed
    closing                   TEXT, -- CANCELLED or EXPIRED: takes no more attempts; its waiting recipients are SKIPPED by definition
    closing_seq               INTEGER NOT NULL DEFAULT 0, -- up to here the closing was written to the recipients
    due_at                    INTEGER NOT NULL, -- scheduled_at, else created_at
    scheduled_at              INTEGER,
    expires_at                INTEGER,
    first_send_at             INTEGER,
    last_send_at              INTEGER,
    ended_at                  INTEGER,
    purged_at                 INTEGER,
    created_at                INTEGER NOT NULL,
    idempotency_key           TEXT,
    request_hash              BLOB,
    traceparent               TEXT    NOT NULL DEFAULT '',
    title                     TEXT    NOT NULL,
    body                      TEXT    NOT NULL,
    data                      TEXT, -- JSON
    image                     TEXT    NOT NULL DEFAULT '',
    link                      TEXT    NOT NULL DEFAULT ''
) STRICT;
CREATE UNIQUE INDEX push_clusters_idempotency ON push_clusters (school_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX push_clusters_open ON push_clusters (school_id, priority, due_at, id) WHERE ended_at IS NULL;
CREATE INDEX push_clusters_expiring ON push_clusters (expires_at) WHERE ended_at IS NULL AND closing IS NULL AND expires_at IS NOT NULL;
CREATE INDEX push_clusters_closing ON push_clusters (id) WHERE ended_at IS NULL AND closing IS NOT NULL;
CREATE INDEX push_clusters_ended ON push_clusters (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX push_clusters_school ON push_clusters (school_id, id);

-- A recipient. Its row lies in the tree of its key, so that a range of one
-- notice is read and written without an index beside it. No foreign key: a
-- million checks for what one transaction guarantees.
CREATE TABLE push_cluster_tokens (
    cluster_id   INTEGER NOT NULL,
    seq          INTEGER NOT NULL,
    attempts     INTEGER NOT NULL DEFAULT 0, -- hand-overs; PENDING means none
    retry_count  INTEGER NOT NULL DEFAULT 0,
    orphan_count INTEGER NOT NULL DEFAULT 0,
    requeued     INTEGER NOT NULL DEFAULT 0,
    enabled      INTEGER,
    badge        INTEGER,
    retry_after  INTEGER, -- behind the frontier a waiting recipient has it, and only that is read; an open batch clears it
    processed_at INTEGER,
    school_id    TEXT    NOT NULL,
    job_status   TEXT    NOT NULL DEFAULT 'PENDING', -- PENDING, SUCCESS, FAIL, RETRY_PENDING, PERMANENT_FAIL, SKIPPED; for IN_PROGRESS see push_cluster_token_states
    token        TEXT    NOT NULL,
    ref          TEXT,
    data         TEXT, -- JSON
    error_code   TEXT,
    reason       TEXT,
    PRIMARY KEY (cluster_id, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX push_cluster_tokens_retry ON push_cluster_tokens (school_id, retry_after) WHERE retry_after IS NOT NULL;

-- A claim: written before anything of it is sent.
CREATE TABLE push_batches (
    id            TEXT    PRIMARY KEY,
    school_id     TEXT    NOT NULL,
    sender        TEXT    NOT NULL,
    fence         INTEGER NOT NULL,
    cycle         INTEGER NOT NULL,
    size          INTEGER NOT NULL,
    filled        INTEGER NOT NULL CHECK (filled IN (0, 1)), -- these attempts reached the limit of their cycle
    owner         TEXT    NOT NULL,
    claimed_at    INTEGER NOT NULL,
    send_deadline INTEGER NOT NULL, -- from here on its call cannot be in flight any more
    settled_at    INTEGER,
    settled_by    TEXT,
    settled_as    TEXT -- recorded, taken_over or withdrawn
) STRICT, WITHOUT ROWID;
CREATE INDEX push_batches_unsettled ON push_batches (school_id) WHERE settled_at IS NULL;

-- A batch covers the recipients with from_seq < seq <= to_seq that are not final.
CREATE TABLE push_batch_ranges (
    batch_id   TEXT    NOT NULL,
    cluster_id INTEGER NOT NULL,
    from_seq   INTEGER NOT NULL,
    to_seq     INTEGER NOT NULL,
    kind       TEXT    NOT NULL, -- first: beyond the frontier; retry: claimed by key
    PRIMARY KEY (batch_id, cluster_id, from_seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE push_fallbacks (
    cluster_id  INTEGER NOT NULL,
    seq         INTEGER NOT NULL,
    school_id   TEXT    NOT NULL,
    kind        TEXT    NOT NULL,
    job_status  TEXT    NOT NULL DEFAULT 'PENDING',
    attempts    INTEGER NOT NULL DEFAULT 0,
    retry_after INTEGER,
    error_code  TEXT,
    created_at  INTEGER NOT NULL,
    sent_at     INTEGER,
    PRIMARY KEY (cluster_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE api_keys (
    id         TEXT    PRIMARY KEY,
    name       TEXT    NOT NULL DEFAULT '',
    key_sha    BLOB    NOT NULL UNIQUE,
    role       TEXT    NOT NULL,
    schools    TEXT, -- JSON array of the school ids it may act for; NULL: all
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

-- The states as people know them. IN_PROGRESS is the fact that an open batch
-- covers the recipient; a waiting recipient of a closing notice is SKIPPED
-- before that is written to its row. A token is shortened: at most a third of
-- it, at most 6 characters.
CREATE VIEW push_cluster_token_states AS
SELECT s.cluster_id, s.seq, s.school_id, s.ref, s.token, s.attempts, s.retry_count, s.orphan_count, s.requeued, s.error_code, s.processed_at,
       s.job_status,
       CASE WHEN s.job_status = 'SKIPPED' AND s.stored <> 'SKIPPED' THEN s.closing ELSE s.reason END AS reason,
       CASE WHEN s.job_status IN ('PENDING', 'RETRY_PENDING') THEN s.retry_after END AS retry_after
FROM (
    SELECT t.cluster_id, t.seq, t.school_id, t.ref, substr(t.token, 1, min(6, length(t.token) / 3)) || '…' AS token,
           t.attempts, t.retry_count, t.orphan_count, t.requeued, t.error_code, t.processed_at, t.reason, t.retry_after,
           t.job_status AS stored, c.closing,
           CASE
               WHEN t.job_status NOT IN ('PENDING', 'RETRY_PENDING') THEN t.job_status
               WHEN t.retry_after IS NULL AND t.seq <= c.frontier AND EXISTS (
                   SELECT 1 FROM push_batches b JOIN push_batch_ranges r ON r.batch_id = b.id
                   WHERE b.school_id = t.school_id AND b.settled_at IS NULL
                     AND r.cluster_id = t.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq) THEN 'IN_PROGRESS'
               WHEN t.job_status = 'PENDING' AND c.closing IS NOT NULL THEN 'SKIPPED'
               ELSE t.job_status END AS job_status
    FROM push_cluster_tokens t JOIN push_clusters c ON c.id = t.cluster_id
) s;

-- +goose Down
DROP VIEW push_cluster_token_states;
DROP TABLE api_keys;
DROP TABLE push_fallbacks;
DROP TABLE push_batch_ranges;
DROP TABLE push_batches;
DROP TABLE push_cluster_tokens;
DROP TABLE push_clusters;
DROP TABLE device_topics;
DROP TABLE devices;
DROP TABLE school_terms;
DROP TABLE schools;
