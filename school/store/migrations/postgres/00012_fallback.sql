-- +goose Up

ALTER TABLE push_clusters ADD COLUMN fallback_sms text;
COMMENT ON COLUMN push_clusters.fallback_sms IS 'text for a recipient that definitely failed; NULL: none follows';

-- A fallback has retry_after while it waits or is being posted: whoever claims it
-- sets the time from which another may, so that a claim of a dead owner ends by
-- itself. One that has ended has none.
COMMENT ON TABLE push_fallbacks IS 'messages to people whose devices could not be reached; one a recipient, made with the record of the failure';
COMMENT ON COLUMN push_fallbacks.job_status IS 'PENDING, SENT, FAILED';
COMMENT ON COLUMN push_fallbacks.retry_after IS 'from when it may be claimed; NULL: SENT or FAILED';
CREATE INDEX push_fallbacks_due ON push_fallbacks (retry_after) WHERE retry_after IS NOT NULL;

-- Writes the text beside the notice that this transaction has made, whichever way
-- it was made. A repeat that was answered with an earlier notice, or an id that
-- belongs to another, finds no row of this transaction.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_give_fallback(p_id bigint, p_school text, p_sms text) RETURNS void LANGUAGE sql AS $$
    UPDATE push_clusters c SET fallback_sms = p_sms
        WHERE c.id = p_id AND c.school_id = p_school AND c.xmin = pg_current_xact_id()::xid;
$$;
-- +goose StatementEnd

-- Takes up to p_limit fallbacks that are due for p_lease_us: until then they are
-- nobody else's. What another is just taking is passed over.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_claim_fallbacks(p_limit integer, p_lease_us bigint)
RETURNS TABLE (cluster_id bigint, seq integer, school_id text, ref text, sms text, attempt integer, age_us bigint, void text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH due AS (
        SELECT f.cluster_id, f.seq FROM push_fallbacks f
        WHERE f.retry_after IS NOT NULL AND f.retry_after <= v_now
        ORDER BY f.retry_after LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE push_fallbacks f SET attempts = f.attempts + 1, retry_after = v_now + p_lease_us * interval '1 microsecond'
        FROM due d WHERE f.cluster_id = d.cluster_id AND f.seq = d.seq
        RETURNING f.cluster_id, f.seq, f.school_id, f.attempts, f.created_at
    )
    SELECT k.cluster_id, k.seq, k.school_id, coalesce(t.ref, ''), coalesce(c.fallback_sms, ''), k.attempts,
           (extract(epoch FROM v_now - k.created_at) * 1000000)::bigint,
           coalesce(c.closing, CASE WHEN c.expires_at <= v_now THEN 'EXPIRED' ELSE '' END)
    FROM taken k
    JOIN push_clusters c ON c.id = k.cluster_id
    LEFT JOIN push_cluster_tokens t ON t.cluster_id = k.cluster_id AND t.seq = k.seq;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_claim_fallbacks(integer, bigint);
DROP FUNCTION schoolbell_give_fallback(bigint, text, text);
DROP INDEX push_fallbacks_due;
ALTER TABLE push_clusters DROP COLUMN fallback_sms;
