-- +goose Up

-- Puts recipients that failed for good back, of one notice and with seqs in
-- (p_from, p_upto], so that its lock is not held for long: those that failed with
-- this code or reason (NULL: any) until p_until. Their retries begin anew, their
-- attempts go on counting. A notice that had ended is open again. An outcome that
-- is not known of an at-most-once notice is left unless it is named.
--
-- Answers done, absent, cancelled, expired, purged or deleted (its school is
-- gone), and how many were put back. A purged notice has no recipients left; the
-- purge marks it under this lock before it removes any. A school that is being
-- deleted is waited for, or waits.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_requeue(p_notice bigint, p_from integer, p_upto integer, p_code text, p_until timestamptz,
    OUT outcome text, OUT n integer)
LANGUAGE plpgsql AS $$
DECLARE
    v_now    timestamptz;
    v_notice push_clusters%ROWTYPE;
BEGIN
    n := 0;
    SELECT c.* INTO v_notice FROM push_clusters c WHERE c.id = p_notice FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    outcome := CASE WHEN v_notice.id IS NULL THEN 'absent'
                    WHEN v_notice.purged_at IS NOT NULL THEN 'purged'
                    WHEN v_notice.closing = 'CANCELLED' THEN 'cancelled'
                    WHEN v_notice.closing IS NOT NULL OR v_notice.expires_at <= v_now THEN 'expired'
                    ELSE 'done' END;
    IF outcome <> 'done' THEN
        RETURN;
    END IF;
    PERFORM FROM schools s WHERE s.id = v_notice.school_id FOR KEY SHARE;
    IF NOT FOUND THEN
        outcome := 'deleted';
        RETURN;
    END IF;
    UPDATE push_cluster_tokens t SET
        job_status = 'RETRY_PENDING', retry_after = v_now, retry_count = 0, orphan_count = 0, requeued = t.requeued + 1,
        error_code = NULL, reason = NULL
        WHERE t.cluster_id = p_notice AND t.seq > p_from AND t.seq <= p_upto AND t.job_status = 'PERMANENT_FAIL'
          AND (t.processed_at IS NULL OR t.processed_at <= p_until)
          AND (p_code IS NULL OR t.error_code = p_code OR t.reason = p_code)
          AND (v_notice.delivery <> 'at_most_once' OR t.reason IS DISTINCT FROM 'OUTCOME_UNKNOWN' OR p_code = 'OUTCOME_UNKNOWN');
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n = 0 THEN
        RETURN;
    END IF;
    UPDATE push_clusters c SET ended_at = NULL, job_status = 'IN_PROGRESS' WHERE c.id = p_notice AND c.ended_at IS NOT NULL;
    PERFORM schoolbell_move(v_now, ARRAY[p_notice], ARRAY['permanent_fail'], ARRAY['retry_pending'], ARRAY[n]);
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_requeue(bigint, integer, integer, text, timestamptz);
