-- +goose Up

-- Ids compare by byte in every database: paging by id must mean the same
-- whatever collation the database was made with.
CREATE TABLE schools (
    id               text COLLATE "C" PRIMARY KEY,
    name             text        NOT NULL DEFAULT '',
    sender           text        NOT NULL DEFAULT '',
    "limit"          integer     CHECK ("limit" >= 1),
    rest             bigint      CHECK (rest >= 1),
    settings_version bigint      NOT NULL DEFAULT 1,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 80);
COMMENT ON COLUMN schools.sender IS 'empty: the deployment''s default sender';
COMMENT ON COLUMN schools."limit" IS 'attempts per cycle; NULL: the deployment''s';
COMMENT ON COLUMN schools.rest IS 'milliseconds; NULL: the deployment''s';
COMMENT ON COLUMN schools.settings_version IS 'grows with each change, also over delete and re-creation';

-- The ledger. It outlives its school: a school that is deleted and made again
-- starts neither a new cycle nor a lower fence. No foreign key for that reason.
CREATE TABLE school_terms (
    school_id        text COLLATE "C" PRIMARY KEY,
    fence            bigint      NOT NULL DEFAULT 0,
    acquisition      text        NOT NULL DEFAULT '',
    owner            text        NOT NULL DEFAULT '',
    opened_at        timestamptz,
    cycle            bigint      NOT NULL DEFAULT 0,
    attempted        integer     NOT NULL DEFAULT 0,
    next_eligible_at timestamptz,
    "limit"          integer     NOT NULL DEFAULT 0,
    rest             bigint      NOT NULL DEFAULT 0,
    settings_version bigint      NOT NULL DEFAULT 0,
    paused           boolean     NOT NULL DEFAULT false
) WITH (fillfactor = 50);
COMMENT ON COLUMN school_terms.fence IS 'number of the newest term; claims and takeovers of an older one are refused';
COMMENT ON COLUMN school_terms.attempted IS 'attempts claimed in this cycle';
COMMENT ON COLUMN school_terms.next_eligible_at IS 'end of the rest that this cycle ended with, passed or not; NULL: none was set';
COMMENT ON COLUMN school_terms."limit" IS 'attempts per cycle when the ledger was last written; 0: never claimed';
COMMENT ON COLUMN school_terms.rest IS 'milliseconds, when the ledger was last written';

-- A token may be longer than an index entry, so its SHA-256 is the key.
CREATE TABLE devices (
    school_id     text COLLATE "C" NOT NULL,
    token_sha     bytea       NOT NULL,
    token         text        NOT NULL,
    ref           text        NOT NULL DEFAULT '',
    enabled       boolean     NOT NULL DEFAULT true,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    retired_at    timestamptz,
    PRIMARY KEY (school_id, token_sha)
);
COMMENT ON COLUMN devices.token_sha IS 'sha256(convert_to(token, ''UTF8''))';
COMMENT ON COLUMN devices.registered_at IS 'last registration: an answer to an older batch does not retire it';
-- What a page asks: is this device switched off? Few are.
CREATE INDEX devices_off ON devices (school_id, token_sha) WHERE NOT enabled AND retired_at IS NULL;

CREATE TABLE device_topics (
    school_id text COLLATE "C" NOT NULL,
    topic     text COLLATE "C" NOT NULL,
    token_sha bytea NOT NULL,
    PRIMARY KEY (school_id, topic, token_sha),
    FOREIGN KEY (school_id, token_sha) REFERENCES devices ON DELETE CASCADE
);
CREATE INDEX device_topics_device ON device_topics (school_id, token_sha);

-- A notice. Its counters only ever move from one to another; what waits is what
-- is left. No index names a counter, the frontier or job_status, so that the
-- updates of a notice under way stay HOT.
CREATE TABLE push_clusters (
    id                        bigint PRIMARY KEY,
    school_id                 text COLLATE "C" NOT NULL,
    job_status                text        NOT NULL DEFAULT 'PENDING',
    priority                  smallint    NOT NULL DEFAULT 1,
    delivery                  text        NOT NULL DEFAULT 'at_least_once',
    total_count               integer     NOT NULL,
    in_progress_count         integer     NOT NULL DEFAULT 0,
    retry_pending_count       integer     NOT NULL DEFAULT 0,
    success_count             integer     NOT NULL DEFAULT 0,
    fail_count                integer     NOT NULL DEFAULT 0,
    retry_success_count       integer     NOT NULL DEFAULT 0,
    retry_fail_count          integer     NOT NULL DEFAULT 0,
    permanent_fail_count      integer     NOT NULL DEFAULT 0,
    skipped_disabled_count    integer     NOT NULL DEFAULT 0,
    skipped_cancelled_count   integer     NOT NULL DEFAULT 0,
    skipped_expired_count     integer     NOT NULL DEFAULT 0,
    skipped_duplicate_count   integer     NOT NULL DEFAULT 0,
    skipped_not_allowed_count integer     NOT NULL DEFAULT 0,
    waiting_count             integer     NOT NULL GENERATED ALWAYS AS (
        total_count - in_progress_count - retry_pending_count
        - success_count - fail_count - retry_success_count - retry_fail_count - permanent_fail_count
        - skipped_disabled_count - skipped_cancelled_count - skipped_expired_count
        - skipped_duplicate_count - skipped_not_allowed_count) STORED,
    frontier                  integer     NOT NULL DEFAULT 0,
    closing                   text,
    closing_seq               integer     NOT NULL DEFAULT 0,
    due_at                    timestamptz NOT NULL,
    scheduled_at              timestamptz,
    expires_at                timestamptz,
    first_send_at             timestamptz,
    last_send_at              timestamptz,
    ended_at                  timestamptz,
    purged_at                 timestamptz,
    created_at                timestamptz NOT NULL DEFAULT clock_timestamp(),
    idempotency_key           text COLLATE "C",
    request_hash              bytea,
    traceparent               text        NOT NULL DEFAULT '',
    title                     text        NOT NULL,
    body                      text        NOT NULL,
    data                      jsonb,
    image                     text        NOT NULL DEFAULT '',
    link                      text        NOT NULL DEFAULT ''
) WITH (fillfactor = 50);
COMMENT ON COLUMN push_clusters.priority IS '0 urgent, 1 normal, 2 low';
COMMENT ON COLUMN push_clusters.frontier IS 'recipients with a higher seq were never claimed';
COMMENT ON COLUMN push_clusters.closing IS 'CANCELLED or EXPIRED: takes no more attempts; its waiting recipients are SKIPPED by definition';
COMMENT ON COLUMN push_clusters.closing_seq IS 'up to here the closing was written to the recipients';
COMMENT ON COLUMN push_clusters.due_at IS 'scheduled_at, else created_at';
CREATE UNIQUE INDEX push_clusters_idempotency ON push_clusters (school_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX push_clusters_open ON push_clusters (school_id, priority, due_at, id) WHERE ended_at IS NULL;
CREATE INDEX push_clusters_expiring ON push_clusters (expires_at) WHERE ended_at IS NULL AND closing IS NULL AND expires_at IS NOT NULL;
CREATE INDEX push_clusters_closing ON push_clusters (id) WHERE ended_at IS NULL AND closing IS NOT NULL;
CREATE INDEX push_clusters_ended ON push_clusters (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX push_clusters_school ON push_clusters (school_id, id);

-- A recipient. No foreign key: a million checks for what one transaction
-- guarantees. Half of each page is left free, so that the one update that most
-- recipients see stays on its page and touches no index.
CREATE TABLE push_cluster_tokens (
    cluster_id   bigint   NOT NULL,
    seq          integer  NOT NULL,
    attempts     integer  NOT NULL DEFAULT 0,
    retry_count  smallint NOT NULL DEFAULT 0,
    orphan_count smallint NOT NULL DEFAULT 0,
    requeued     smallint NOT NULL DEFAULT 0,
    enabled      boolean,
    badge        integer,
    retry_after  timestamptz,
    processed_at timestamptz,
    school_id    text COLLATE "C" NOT NULL,
    job_status   text     NOT NULL DEFAULT 'PENDING',
    token        text     NOT NULL,
    ref          text,
    data         jsonb,
    error_code   text,
    reason       text,
    PRIMARY KEY (cluster_id, seq)
) WITH (fillfactor = 50);
COMMENT ON COLUMN push_cluster_tokens.attempts IS 'hand-overs; PENDING means none';
COMMENT ON COLUMN push_cluster_tokens.retry_after IS 'behind the frontier a waiting recipient has it, and only that is read; an open batch clears it';
COMMENT ON COLUMN push_cluster_tokens.job_status IS 'PENDING, SUCCESS, FAIL, RETRY_PENDING, PERMANENT_FAIL, SKIPPED; for IN_PROGRESS see push_cluster_token_states. No CHECK: it would be evaluated with each of millions of updates, all of which come from the functions beside';
CREATE INDEX push_cluster_tokens_retry ON push_cluster_tokens (school_id, retry_after) WHERE retry_after IS NOT NULL;

-- A claim: written before anything of it is sent.
CREATE TABLE push_batches (
    id            text COLLATE "C" PRIMARY KEY,
    school_id     text COLLATE "C" NOT NULL,
    sender        text        NOT NULL,
    fence         bigint      NOT NULL,
    cycle         bigint      NOT NULL,
    size          integer     NOT NULL,
    filled        boolean     NOT NULL,
    owner         text        NOT NULL,
    claimed_at    timestamptz NOT NULL,
    send_deadline timestamptz NOT NULL,
    settled_at    timestamptz,
    settled_by    text,
    settled_as    text
);
COMMENT ON COLUMN push_batches.filled IS 'these attempts reached the limit of their cycle';
COMMENT ON COLUMN push_batches.send_deadline IS 'from here on its call cannot be in flight any more';
COMMENT ON COLUMN push_batches.settled_as IS 'recorded, taken_over or withdrawn: the owner alone does not tell, since a replica may take over its own past';
CREATE INDEX push_batches_unsettled ON push_batches (school_id) WHERE settled_at IS NULL;

CREATE TABLE push_batch_ranges (
    batch_id   text COLLATE "C" NOT NULL,
    cluster_id bigint  NOT NULL,
    from_seq   integer NOT NULL,
    to_seq     integer NOT NULL,
    kind       text    NOT NULL,
    PRIMARY KEY (batch_id, cluster_id, from_seq)
);
COMMENT ON TABLE push_batch_ranges IS 'a batch covers the recipients with from_seq < seq <= to_seq that are not final';
COMMENT ON COLUMN push_batch_ranges.kind IS 'first: beyond the frontier; retry: claimed by key';

CREATE TABLE push_fallbacks (
    cluster_id  bigint  NOT NULL,
    seq         integer NOT NULL,
    school_id   text COLLATE "C" NOT NULL,
    kind        text    NOT NULL,
    job_status  text    NOT NULL DEFAULT 'PENDING',
    attempts    integer NOT NULL DEFAULT 0,
    retry_after timestamptz,
    error_code  text,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at     timestamptz,
    PRIMARY KEY (cluster_id, seq)
);

CREATE TABLE api_keys (
    id         text COLLATE "C" PRIMARY KEY,
    name       text        NOT NULL DEFAULT '',
    key_sha    bytea       NOT NULL UNIQUE,
    role       text        NOT NULL,
    schools    text[],
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    revoked_at timestamptz
);
COMMENT ON COLUMN api_keys.schools IS 'school ids it may act for; NULL: all';

-- The states as people know them. IN_PROGRESS is the fact that an open batch
-- covers the recipient; a waiting recipient of a closing notice is SKIPPED
-- before that is written to its row. A token is shortened: at most a third of
-- it, at most 6 characters.
CREATE VIEW push_cluster_token_states AS
SELECT t.cluster_id, t.seq, t.school_id, t.ref, left(t.token, least(6, length(t.token) / 3)) || '…' AS token,
       t.attempts, t.retry_count, t.orphan_count, t.requeued, t.error_code, t.processed_at,
       s.job_status,
       CASE WHEN s.job_status = 'SKIPPED' AND t.job_status <> 'SKIPPED' THEN c.closing ELSE t.reason END AS reason,
       CASE WHEN s.job_status IN ('PENDING', 'RETRY_PENDING') THEN t.retry_after END AS retry_after
FROM push_cluster_tokens t
JOIN push_clusters c ON c.id = t.cluster_id
CROSS JOIN LATERAL (SELECT CASE
    WHEN t.job_status NOT IN ('PENDING', 'RETRY_PENDING') THEN t.job_status
    WHEN t.retry_after IS NULL AND t.seq <= c.frontier AND EXISTS (
        SELECT FROM push_batches b JOIN push_batch_ranges r ON r.batch_id = b.id
        WHERE b.school_id = t.school_id AND b.settled_at IS NULL
          AND r.cluster_id = t.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq) THEN 'IN_PROGRESS'
    WHEN t.job_status = 'PENDING' AND c.closing IS NOT NULL THEN 'SKIPPED'
    ELSE t.job_status END AS job_status) s;

-- +goose Down
DROP VIEW push_cluster_token_states;
DROP TABLE api_keys, push_fallbacks, push_batch_ranges, push_batches, push_cluster_tokens, push_clusters,
    device_topics, devices, school_terms, schools;
