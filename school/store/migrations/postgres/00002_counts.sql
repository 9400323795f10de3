-- +goose Up

-- Moves recipients of notices from one counter to another, and ends a notice
-- of which nothing remains. Counters change here and in schoolbell_claim only,
-- and never by themselves: so they always add up.
--
-- The caller has locked the notices. A closing notice ends only when its
-- closing is written to every recipient.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_move(p_now timestamptz, p_notice bigint[], p_from text[], p_to text[], p_n integer[])
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE push_clusters c SET
        in_progress_count         = c.in_progress_count + m.in_progress,
        retry_pending_count       = c.retry_pending_count + m.retry_pending,
        success_count             = c.success_count + m.success,
        fail_count                = c.fail_count + m.fail,
        retry_success_count       = c.retry_success_count + m.retry_success,
        retry_fail_count          = c.retry_fail_count + m.retry_fail,
        permanent_fail_count      = c.permanent_fail_count + m.permanent_fail,
        skipped_disabled_count    = c.skipped_disabled_count + m.disabled,
        skipped_cancelled_count   = c.skipped_cancelled_count + m.cancelled,
        skipped_expired_count     = c.skipped_expired_count + m.expired,
        skipped_not_allowed_count = c.skipped_not_allowed_count + m.not_allowed,
        (frontier, ended_at, job_status) = (
            SELECT CASE WHEN e.ends THEN c.total_count ELSE c.frontier END,
                   CASE WHEN e.ends THEN p_now ELSE c.ended_at END,
                   CASE WHEN NOT e.ends THEN c.job_status WHEN c.closing = 'CANCELLED' THEN 'CANCELLED' ELSE 'COMPLETED' END
            FROM (SELECT c.ended_at IS NULL AND (c.closing IS NULL OR c.closing_seq = c.total_count)
                     AND c.waiting_count + m.waiting + c.in_progress_count + m.in_progress
                         + c.retry_pending_count + m.retry_pending = 0 AS ends) e)
    FROM (
        SELECT k.notice,
               sum(CASE k.name WHEN 'waiting' THEN k.n ELSE 0 END) AS waiting,
               sum(CASE k.name WHEN 'in_progress' THEN k.n ELSE 0 END) AS in_progress,
               sum(CASE k.name WHEN 'retry_pending' THEN k.n ELSE 0 END) AS retry_pending,
               sum(CASE k.name WHEN 'success' THEN k.n ELSE 0 END) AS success,
               sum(CASE k.name WHEN 'fail' THEN k.n ELSE 0 END) AS fail,
               sum(CASE k.name WHEN 'retry_success' THEN k.n ELSE 0 END) AS retry_success,
               sum(CASE k.name WHEN 'retry_fail' THEN k.n ELSE 0 END) AS retry_fail,
               sum(CASE k.name WHEN 'permanent_fail' THEN k.n ELSE 0 END) AS permanent_fail,
               sum(CASE k.name WHEN 'DISABLED' THEN k.n ELSE 0 END) AS disabled,
               sum(CASE k.name WHEN 'CANCELLED' THEN k.n ELSE 0 END) AS cancelled,
               sum(CASE k.name WHEN 'EXPIRED' THEN k.n ELSE 0 END) AS expired,
               sum(CASE k.name WHEN 'NOT_ALLOWED' THEN k.n ELSE 0 END) AS not_allowed
        FROM (SELECT x.notice, s.name, s.n
              FROM unnest(p_notice, p_from, p_to, p_n) AS x(notice, source, target, n)
              CROSS JOIN LATERAL (VALUES (x.source, -x.n), (x.target, x.n)) AS s(name, n)) k
        GROUP BY k.notice
    ) m
    WHERE c.id = m.notice;
END $$;
-- +goose StatementEnd

-- The counter that a recipient stands under once its attempt is over.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_counter(p_status text, p_attempts integer, p_reason text)
RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_status
        WHEN 'SUCCESS' THEN CASE WHEN p_attempts <= 1 THEN 'success' ELSE 'retry_success' END
        WHEN 'FAIL' THEN CASE WHEN p_attempts <= 1 THEN 'fail' ELSE 'retry_fail' END
        WHEN 'RETRY_PENDING' THEN 'retry_pending'
        WHEN 'PERMANENT_FAIL' THEN 'permanent_fail'
        WHEN 'SKIPPED' THEN p_reason
        WHEN 'PENDING' THEN 'waiting'
    END
$$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_move(timestamptz, bigint[], text[], text[], integer[]);
DROP FUNCTION schoolbell_counter(text, integer, text);
