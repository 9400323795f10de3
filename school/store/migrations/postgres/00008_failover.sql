-- +goose Up

-- How far a job that looks at a part at a time has got, so that whichever
-- replica runs it next goes on from there.
CREATE TABLE job_positions (
    job      text PRIMARY KEY,
    position bigint      NOT NULL,
    moved_at timestamptz NOT NULL
);
COMMENT ON COLUMN job_positions.position IS 'sweep: the notice after which it goes on; 0: from the beginning';

-- The timelines that this database was seen on. Another one means that a standby
-- took over, or that a backup was brought back to life.
CREATE TABLE database_timelines (
    id            integer PRIMARY KEY,
    first_seen_at timestamptz NOT NULL
);

-- The timeline that is written now; NULL where the service does not tell. (What
-- pg_control_checkpoint tells is that of the last checkpoint, which comes later.)
-- +goose StatementBegin
CREATE FUNCTION schoolbell_timeline() RETURNS integer LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- Notes the timeline, and returns since when there is this one after another;
-- NULL where there was no other.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_failed_over_at() RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
    v_timeline integer := schoolbell_timeline();
    v_since    timestamptz;
BEGIN
    IF v_timeline IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT t.first_seen_at INTO v_since FROM database_timelines t WHERE t.id = v_timeline;
    IF NOT FOUND THEN
        INSERT INTO database_timelines VALUES (v_timeline, clock_timestamp()) ON CONFLICT DO NOTHING;
        SELECT t.first_seen_at INTO v_since FROM database_timelines t WHERE t.id = v_timeline;
    END IF;
    RETURN (SELECT v_since WHERE EXISTS (SELECT FROM database_timelines t WHERE t.id < v_timeline));
END $$;
-- +goose StatementEnd

SELECT schoolbell_failed_over_at();

-- What was claimed before a failover has its send_deadline from another machine's
-- clock, which may have been behind this one's: then a call can be in flight
-- although the deadline has passed. Such batches wait 30 s longer.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schoolbell_takeover(p_school text, p_fence bigint, p_acquisition text, p_owner text, p_max_orphanings integer,
    OUT batches jsonb, OUT recipients integer, OUT wait_us bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_now      timestamptz;
    v_failover timestamptz := schoolbell_failed_over_at();
    v_ids      text[];
    v_notices  bigint[];
    v_source   text[];
    v_target   text[];
    v_counts   integer[];
BEGIN
    recipients := 0;
    SELECT array_agg(b.id) INTO v_ids FROM (
        SELECT id FROM push_batches
        WHERE school_id = p_school AND settled_at IS NULL AND fence < p_fence AND send_deadline <= clock_timestamp()
          - CASE WHEN claimed_at < v_failover THEN interval '30 seconds' ELSE interval '0' END
        ORDER BY id FOR NO KEY UPDATE) b;
    v_now := clock_timestamp();
    WITH settled AS (
        UPDATE push_batches b SET settled_at = v_now, settled_by = p_owner, settled_as = 'taken_over'
            WHERE b.id = ANY (v_ids) AND b.settled_at IS NULL
            RETURNING b.id, b.fence, b.cycle, b.size
    )
    SELECT array_agg(s.id), jsonb_agg(jsonb_build_object('id', s.id, 'fence', s.fence, 'cycle', s.cycle, 'size', s.size) ORDER BY s.fence, s.id)
        INTO v_ids, batches FROM settled s;
    PERFORM FROM school_terms t
        WHERE t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a newer term holds the school' USING ERRCODE = 'SB001';
    END IF;
    IF v_ids IS NOT NULL THEN
        PERFORM FROM push_clusters c
            WHERE c.id IN (SELECT r.cluster_id FROM push_batch_ranges r WHERE r.batch_id = ANY (v_ids))
            ORDER BY c.id FOR NO KEY UPDATE;
        WITH moved AS (
            UPDATE push_cluster_tokens t SET
                attempts = t.attempts + 1, orphan_count = t.orphan_count + 1, error_code = 'ORPHANED', processed_at = v_now,
                job_status = CASE WHEN c.delivery = 'at_most_once' OR t.orphan_count + 1 >= p_max_orphanings OR c.closing IS NOT NULL
                                  THEN 'PERMANENT_FAIL' ELSE 'RETRY_PENDING' END,
                reason = CASE WHEN c.delivery = 'at_most_once' OR t.orphan_count + 1 >= p_max_orphanings
                              THEN 'OUTCOME_UNKNOWN' ELSE coalesce(c.closing, 'OUTCOME_UNKNOWN') END,
                retry_after = CASE WHEN c.delivery = 'at_most_once' OR t.orphan_count + 1 >= p_max_orphanings OR c.closing IS NOT NULL
                                   THEN NULL ELSE v_now END
                FROM push_batch_ranges r JOIN push_clusters c ON c.id = r.cluster_id
                WHERE r.batch_id = ANY (v_ids) AND t.cluster_id = r.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq
                  AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL
                RETURNING t.cluster_id, t.job_status, t.attempts, t.reason
        ), counted AS (
            SELECT m.cluster_id, schoolbell_counter(m.job_status, m.attempts, m.reason) AS target, count(*)::integer AS n
            FROM moved m GROUP BY 1, 2
        )
        SELECT array_agg(k.cluster_id), array_agg('in_progress'::text), array_agg(k.target), array_agg(k.n), coalesce(sum(k.n), 0)
            INTO v_notices, v_source, v_target, v_counts, recipients FROM counted k;
        PERFORM schoolbell_move(v_now, v_notices, v_source, v_target, v_counts);
    END IF;
    SELECT coalesce(greatest(0, ceil(extract(epoch FROM max(b.send_deadline
               + CASE WHEN b.claimed_at < v_failover THEN interval '30 seconds' ELSE interval '0' END) - v_now) * 1000000)), 0)
        INTO wait_us FROM push_batches b
        WHERE b.school_id = p_school AND b.settled_at IS NULL AND b.fence < p_fence;
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schoolbell_takeover(p_school text, p_fence bigint, p_acquisition text, p_owner text, p_max_orphanings integer,
    OUT batches jsonb, OUT recipients integer, OUT wait_us bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_now     timestamptz;
    v_ids     text[];
    v_notices bigint[];
    v_source  text[];
    v_target  text[];
    v_counts  integer[];
BEGIN
    recipients := 0;
    SELECT array_agg(b.id) INTO v_ids FROM (
        SELECT id FROM push_batches
        WHERE school_id = p_school AND settled_at IS NULL AND fence < p_fence AND send_deadline <= clock_timestamp()
        ORDER BY id FOR NO KEY UPDATE) b;
    v_now := clock_timestamp();
    WITH settled AS (
        UPDATE push_batches b SET settled_at = v_now, settled_by = p_owner, settled_as = 'taken_over'
            WHERE b.id = ANY (v_ids) AND b.settled_at IS NULL
            RETURNING b.id, b.fence, b.cycle, b.size
    )
    SELECT array_agg(s.id), jsonb_agg(jsonb_build_object('id', s.id, 'fence', s.fence, 'cycle', s.cycle, 'size', s.size) ORDER BY s.fence, s.id)
        INTO v_ids, batches FROM settled s;
    PERFORM FROM school_terms t
        WHERE t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a newer term holds the school' USING ERRCODE = 'SB001';
    END IF;
    IF v_ids IS NOT NULL THEN
        PERFORM FROM push_clusters c
            WHERE c.id IN (SELECT r.cluster_id FROM push_batch_ranges r WHERE r.batch_id = ANY (v_ids))
            ORDER BY c.id FOR NO KEY UPDATE;
        WITH moved AS (
            UPDATE push_cluster_tokens t SET
                attempts = t.attempts + 1, orphan_count = t.orphan_count + 1, error_code = 'ORPHANED', processed_at = v_now,
                job_status = CASE WHEN c.delivery = 'at_most_once' OR t.orphan_count + 1 >= p_max_orphanings OR c.closing IS NOT NULL
                                  THEN 'PERMANENT_FAIL' ELSE 'RETRY_PENDING' END,
                reason = CASE WHEN c.delivery = 'at_most_once' OR t.orphan_count + 1 >= p_max_orphanings
                              THEN 'OUTCOME_UNKNOWN' ELSE coalesce(c.closing, 'OUTCOME_UNKNOWN') END,
                retry_after = CASE WHEN c.delivery = 'at_most_once' OR t.orphan_count + 1 >= p_max_orphanings OR c.closing IS NOT NULL
                                   THEN NULL ELSE v_now END
                FROM push_batch_ranges r JOIN push_clusters c ON c.id = r.cluster_id
                WHERE r.batch_id = ANY (v_ids) AND t.cluster_id = r.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq
                  AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL
                RETURNING t.cluster_id, t.job_status, t.attempts, t.reason
        ), counted AS (
            SELECT m.cluster_id, schoolbell_counter(m.job_status, m.attempts, m.reason) AS target, count(*)::integer AS n
            FROM moved m GROUP BY 1, 2
        )
        SELECT array_agg(k.cluster_id), array_agg('in_progress'::text), array_agg(k.target), array_agg(k.n), coalesce(sum(k.n), 0)
            INTO v_notices, v_source, v_target, v_counts, recipients FROM counted k;
        PERFORM schoolbell_move(v_now, v_notices, v_source, v_target, v_counts);
    END IF;
    SELECT coalesce(greatest(0, ceil(extract(epoch FROM max(b.send_deadline) - v_now) * 1000000)), 0)
        INTO wait_us FROM push_batches b
        WHERE b.school_id = p_school AND b.settled_at IS NULL AND b.fence < p_fence;
END $$;
-- +goose StatementEnd

DROP FUNCTION schoolbell_failed_over_at();
DROP FUNCTION schoolbell_timeline();
DROP TABLE database_timelines;
DROP TABLE job_positions;
