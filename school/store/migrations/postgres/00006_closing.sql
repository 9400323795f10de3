-- +goose Up

-- Closes a notice: from here on it takes no attempt. All that waits for a first
-- attempt leaves the counters at once as skipped, whatever its size; the rows
-- follow in steps, and until then a waiting recipient of a closing notice is
-- SKIPPED by definition. What an open batch covers gets that batch's outcome.
-- Answers closing, closed (that reason already), ended or absent.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_close(p_notice bigint, p_reason text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_notice push_clusters%ROWTYPE;
    v_now    timestamptz;
BEGIN
    SELECT c.* INTO v_notice FROM push_clusters c WHERE c.id = p_notice FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    IF NOT FOUND THEN
        RETURN 'absent';
    ELSIF v_notice.closing = p_reason THEN
        RETURN 'closed';
    ELSIF v_notice.ended_at IS NOT NULL OR v_notice.closing IS NOT NULL THEN
        RETURN 'ended';
    ELSIF p_reason = 'EXPIRED' AND NOT coalesce(v_notice.expires_at <= v_now, false) THEN
        RETURN 'ended';
    END IF;
    UPDATE push_clusters c SET closing = p_reason WHERE c.id = p_notice;
    PERFORM schoolbell_move(v_now, ARRAY[p_notice], ARRAY['waiting'], ARRAY[p_reason], ARRAY[v_notice.waiting_count]);
    RETURN 'closing';
END $$;
-- +goose StatementEnd

-- Writes the closing to the next p_step recipients, in order of seq: those that
-- were never handed over are SKIPPED, those that wait for a retry fail for good
-- with their last code kept, those of an open batch are left to it. Unless
-- p_wait, it leaves a notice alone that another works on. The answer is whether
-- there is more to do, NULL where it did nothing.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_close_step(p_notice bigint, p_step integer, p_wait boolean) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_now    timestamptz;
    v_notice push_clusters%ROWTYPE;
    v_upto   integer;
    v_failed integer;
BEGIN
    IF p_wait THEN
        PERFORM FROM push_clusters c WHERE c.id = p_notice FOR NO KEY UPDATE;
    END IF;
    SELECT c.* INTO v_notice FROM push_clusters c
        WHERE c.id = p_notice AND c.ended_at IS NULL AND c.closing IS NOT NULL AND c.closing_seq < c.total_count
        FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    v_now := clock_timestamp();
    v_upto := least(v_notice.total_count, v_notice.closing_seq + p_step);
    WITH moved AS (
        UPDATE push_cluster_tokens t SET
            job_status = CASE WHEN t.attempts = 0 THEN 'SKIPPED' ELSE 'PERMANENT_FAIL' END,
            reason = v_notice.closing, retry_after = NULL, processed_at = v_now
            WHERE t.cluster_id = p_notice AND t.seq > v_notice.closing_seq AND t.seq <= v_upto
              AND t.job_status IN ('PENDING', 'RETRY_PENDING')
              AND (t.retry_after IS NOT NULL OR t.seq > v_notice.frontier)
            RETURNING t.job_status
    )
    SELECT count(*) FILTER (WHERE m.job_status = 'PERMANENT_FAIL') INTO v_failed FROM moved m;
    UPDATE push_clusters c SET closing_seq = v_upto, frontier = greatest(c.frontier, v_upto) WHERE c.id = p_notice;
    PERFORM schoolbell_move(v_now, ARRAY[p_notice], ARRAY['retry_pending'], ARRAY['permanent_fail'], ARRAY[v_failed]);
    RETURN v_upto < v_notice.total_count;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_close_step(bigint, integer, boolean);
DROP FUNCTION schoolbell_close(bigint, text);
