-- +goose Up

-- Settles a batch with its outcomes. It begins with the batch itself: whoever
-- sets settled_at first has it, and a second comer waits for the row's lock and
-- then finds it set.
--
-- p_ok_* count the accepted recipients by notice; the others come one by one,
-- each with the change that was decided for it. What is accepted is written by
-- range, after the others have left the range's condition.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_record(
    p_batch text, p_school text, p_owner text, p_fence bigint, p_cycle bigint, p_filled boolean, p_rest bigint,
    p_ok_notice bigint[], p_ok_n integer[],
    p_notice bigint[], p_seq integer[], p_status text[], p_attempts integer[], p_retries integer[], p_orphans integer[],
    p_retry_in_us bigint[], p_code text[], p_reason text[], p_retire boolean[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_batch   push_batches%ROWTYPE;
    v_notices bigint[] := '{}';
    v_source  text[] := '{}';
    v_target  text[] := '{}';
    v_counts  integer[] := '{}';
    v_n       integer;
    a_notices bigint[];
    a_source  text[];
    a_target  text[];
    a_counts  integer[];
BEGIN
    UPDATE push_batches b SET settled_at = v_now, settled_by = p_owner, settled_as = 'recorded'
        WHERE b.id = p_batch AND b.school_id = p_school AND b.owner = p_owner AND b.fence = p_fence AND b.settled_at IS NULL
        RETURNING b.* INTO v_batch;
    IF NOT FOUND THEN
        SELECT b.* INTO v_batch FROM push_batches b WHERE b.id = p_batch;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'no such batch' USING ERRCODE = 'SB005';
        ELSIF v_batch.settled_as = 'recorded' AND v_batch.settled_by = p_owner AND v_batch.fence = p_fence THEN
            RETURN;
        ELSIF v_batch.settled_at IS NULL THEN
            RAISE EXCEPTION 'batch is another owner''s' USING ERRCODE = 'SB007';
        END IF;
        RAISE EXCEPTION 'batch was taken over' USING ERRCODE = 'SB004';
    END IF;
    IF v_batch.size <> cardinality(p_seq) + (SELECT coalesce(sum(n), 0) FROM unnest(p_ok_n) n) THEN
        RAISE EXCEPTION 'results do not cover the batch' USING ERRCODE = 'SB006';
    END IF;
    v_now := clock_timestamp();

    -- The rest runs from here on (R4); only in the cycle that this batch filled.
    IF p_filled THEN
        UPDATE school_terms t SET next_eligible_at = v_now + p_rest * interval '1 millisecond'
            WHERE t.school_id = p_school AND t.cycle = v_batch.cycle AND v_batch.cycle = p_cycle;
    END IF;

    PERFORM FROM push_clusters c
        WHERE c.id IN (SELECT r.cluster_id FROM push_batch_ranges r WHERE r.batch_id = p_batch)
        ORDER BY c.id FOR NO KEY UPDATE;

    IF cardinality(p_seq) > 0 THEN
        -- No retry follows in a notice that was cancelled or expired meanwhile.
        WITH moved AS (
            UPDATE push_cluster_tokens t SET
                job_status = CASE WHEN x.status = 'RETRY_PENDING' AND c.closing IS NOT NULL THEN 'PERMANENT_FAIL' ELSE x.status END,
                reason = CASE WHEN x.status = 'RETRY_PENDING' THEN coalesce(c.closing, x.reason) ELSE x.reason END,
                retry_after = CASE WHEN x.status = 'RETRY_PENDING' AND c.closing IS NULL THEN v_now + x.retry_in_us * interval '1 microsecond' END,
                attempts = x.attempts, retry_count = x.retries, orphan_count = x.orphans,
                error_code = x.code, processed_at = v_now
                FROM unnest(p_notice, p_seq, p_status, p_attempts, p_retries, p_orphans, p_retry_in_us, p_code, p_reason)
                    AS x(notice, seq, status, attempts, retries, orphans, retry_in_us, code, reason)
                JOIN push_clusters c ON c.id = x.notice
                WHERE t.cluster_id = x.notice AND t.seq = x.seq AND t.attempts = x.attempts - 1
                  AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL
                  AND EXISTS (SELECT FROM push_batch_ranges r WHERE r.batch_id = p_batch
                              AND r.cluster_id = x.notice AND r.from_seq < x.seq AND r.to_seq >= x.seq)
                RETURNING t.cluster_id, t.job_status, t.attempts, t.reason
        ), counted AS (
            SELECT m.cluster_id, schoolbell_counter(m.job_status, m.attempts, m.reason) AS target, count(*)::integer AS n
            FROM moved m GROUP BY 1, 2
        )
        SELECT array_agg(k.cluster_id), array_agg('in_progress'::text), array_agg(k.target), array_agg(k.n), sum(k.n)
            INTO v_notices, v_source, v_target, v_counts, v_n FROM counted k;
        IF v_n IS DISTINCT FROM cardinality(p_seq) THEN
            RAISE EXCEPTION '% of % results are of no recipient that the batch covers', cardinality(p_seq) - coalesce(v_n, 0), cardinality(p_seq)
                USING ERRCODE = 'SB006';
        END IF;
    END IF;

    IF cardinality(p_ok_n) > 0 THEN
        WITH moved AS (
            UPDATE push_cluster_tokens t SET
                job_status = 'SUCCESS', attempts = t.attempts + 1, error_code = NULL, reason = NULL, processed_at = v_now
                FROM push_batch_ranges r
                WHERE r.batch_id = p_batch AND t.cluster_id = r.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq
                  AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL
                RETURNING t.cluster_id, t.attempts
        ), counted AS (
            SELECT m.cluster_id, schoolbell_counter('SUCCESS', m.attempts, NULL) AS target, count(*)::integer AS n
            FROM moved m GROUP BY 1, 2
        )
        SELECT array_agg(k.cluster_id), array_agg('in_progress'::text), array_agg(k.target), array_agg(k.n), sum(k.n)
            INTO a_notices, a_source, a_target, a_counts, v_n FROM counted k;
        IF cardinality(p_ok_n) = 1 AND p_ok_notice[1] = ALL (a_notices) THEN -- mostly, and cheaper
            IF v_n IS DISTINCT FROM p_ok_n[1] THEN
                RAISE EXCEPTION 'accepted results are not the recipients that the batch covers' USING ERRCODE = 'SB006';
            END IF;
        ELSIF EXISTS (SELECT FROM (
                SELECT notice, n FROM unnest(p_ok_notice, p_ok_n) AS o(notice, n)
                UNION ALL SELECT notice, -n FROM unnest(a_notices, a_counts) AS a(notice, n)) d
                GROUP BY d.notice HAVING sum(d.n) <> 0) THEN
            RAISE EXCEPTION 'accepted results are not the recipients that the batch covers' USING ERRCODE = 'SB006';
        END IF;
        v_notices := v_notices || a_notices;
        v_source := v_source || a_source;
        v_target := v_target || a_target;
        v_counts := v_counts || a_counts;
    END IF;
    PERFORM schoolbell_move(v_now, v_notices, v_source, v_target, v_counts);

    -- Registered anew after the claim, a device is not the one that was answered for.
    IF true = ANY (p_retire) THEN
        WITH gone AS (
            SELECT d.school_id, d.token_sha FROM devices d
            WHERE d.school_id = p_school AND d.retired_at IS NULL AND d.registered_at < v_batch.claimed_at
              AND d.token_sha = ANY (ARRAY(
                SELECT sha256(convert_to(t.token, 'UTF8'))
                FROM unnest(p_notice, p_seq, p_retire) AS x(notice, seq, retire)
                JOIN push_cluster_tokens t ON t.cluster_id = x.notice AND t.seq = x.seq
                WHERE x.retire))
            ORDER BY d.token_sha FOR NO KEY UPDATE
        )
        UPDATE devices d SET retired_at = v_now FROM gone g
            WHERE d.school_id = g.school_id AND d.token_sha = g.token_sha;
    END IF;
END $$;
-- +goose StatementEnd

-- Settles every unsettled batch of an older fence whose call cannot be in
-- flight any more. What becomes of its recipients is the outcome "orphaned" of
-- the domain: put back at once without using a retry, or ended where the notice
-- asks for at most once, was orphaned too often, or is closing.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_takeover(p_school text, p_fence bigint, p_acquisition text, p_owner text, p_max_orphanings integer,
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

-- Writes what the receiver took, by its own word, of the recipients whose last
-- outcome was unknown. It is no attempt. Whoever has moved meanwhile is left.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_confirm(p_school text, p_fence bigint, p_acquisition text,
    p_notice bigint[], p_seq integer[], p_attempts integer[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now     timestamptz;
    v_notices bigint[];
    v_source  text[];
    v_target  text[];
    v_counts  integer[];
BEGIN
    PERFORM FROM school_terms t
        WHERE t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a newer term holds the school' USING ERRCODE = 'SB001';
    END IF;
    v_now := clock_timestamp();
    PERFORM FROM push_clusters c WHERE c.id = ANY (p_notice) ORDER BY c.id FOR NO KEY UPDATE;
    WITH moved AS (
        UPDATE push_cluster_tokens t SET
            job_status = 'SUCCESS', retry_after = NULL, error_code = NULL, reason = NULL, processed_at = v_now
            FROM unnest(p_notice, p_seq, p_attempts) AS x(notice, seq, attempts)
            WHERE t.cluster_id = x.notice AND t.seq = x.seq AND t.attempts = x.attempts AND t.school_id = p_school
              AND t.job_status = 'RETRY_PENDING' AND t.retry_after IS NOT NULL
            RETURNING t.cluster_id, t.attempts
    ), counted AS (
        SELECT m.cluster_id, schoolbell_counter('SUCCESS', m.attempts, NULL) AS target, count(*)::integer AS n
        FROM moved m GROUP BY 1, 2
    )
    SELECT array_agg(k.cluster_id), array_agg('retry_pending'::text), array_agg(k.target), array_agg(k.n)
        INTO v_notices, v_source, v_target, v_counts FROM counted k;
    PERFORM schoolbell_move(v_now, v_notices, v_source, v_target, v_counts);
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_confirm(text, bigint, text, bigint[], integer[], integer[]);
DROP FUNCTION schoolbell_takeover(text, bigint, text, text, integer);
DROP FUNCTION schoolbell_record(text, text, text, bigint, bigint, boolean, bigint, bigint[], integer[],
    bigint[], integer[], text[], integer[], integer[], integer[], bigint[], text[], text[], boolean[]);
