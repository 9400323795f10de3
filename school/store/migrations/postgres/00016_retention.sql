-- +goose Up

-- Where the removal of an ended notice's recipients stands (R29): they go in the
-- order of seq, in steps, from a notice that says so before.
ALTER TABLE push_clusters ADD COLUMN purged_seq integer NOT NULL DEFAULT 0, ADD COLUMN emptied_at timestamptz;
COMMENT ON COLUMN push_clusters.purged_at IS 'since then its recipients are being removed; its counts stay';
COMMENT ON COLUMN push_clusters.purged_seq IS 'recipients up to here are removed';
COMMENT ON COLUMN push_clusters.emptied_at IS 'when the last of them was';
CREATE INDEX push_clusters_retained ON push_clusters (ended_at, id) WHERE ended_at IS NOT NULL AND emptied_at IS NULL;

-- Removes what ended longer ago than p_after_us: at most p_rows recipients, and
-- of batches that were settled by then at most as many as sent that many. Answers
-- how much of each, and whether there may be more; one step at a time in the
-- whole cluster, so who comes while another works is answered that there is
-- nothing. Notices are locked by trying: whoever has one has it for a moment.
--
-- Ranges of keys that were removed are never walked again, whatever vacuum has
-- come to, and every statement finds its rows by key with any statistics, so the
-- settings are the function's own. A batch's id begins with its time, so the
-- oldest are the first.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_purge(p_after_us bigint, p_rows integer,
    OUT notices integer, OUT recipients integer, OUT batches integer, OUT ranges integer, OUT fallbacks integer, OUT more boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_before  timestamptz := v_now - p_after_us * interval '1 microsecond';
    v_batches text[];
    v_ids     bigint[];
    v_from    integer[];
    v_upto    integer[];
BEGIN
    notices := 0; recipients := 0; batches := 0; ranges := 0; fallbacks := 0; more := false;
    IF NOT pg_try_advisory_xact_lock(4171926, 29) THEN
        RETURN;
    END IF;
    SELECT array_agg(s.id) INTO v_batches FROM (
        SELECT b.id, b.settled_at, sum(b.size + 1) OVER (ORDER BY b.id) - b.size AS upto
        FROM (SELECT id, size, settled_at FROM push_batches ORDER BY id LIMIT 1000) b) s
        WHERE s.settled_at <= v_before AND s.upto <= p_rows;
    IF v_batches IS NOT NULL THEN
        DELETE FROM push_batch_ranges r WHERE r.batch_id = ANY (v_batches);
        GET DIAGNOSTICS ranges = ROW_COUNT;
        DELETE FROM push_batches b WHERE b.id = ANY (v_batches);
        GET DIAGNOSTICS batches = ROW_COUNT;
    END IF;

    SELECT array_agg(n.id), array_agg(n.purged_seq), array_agg(least(n.total_count, n.purged_seq + p_rows - n.before))
        INTO v_ids, v_from, v_upto FROM (
            SELECT c.id, c.purged_seq, c.total_count,
                   (sum(c.total_count - c.purged_seq) OVER (ORDER BY c.ended_at, c.id) - (c.total_count - c.purged_seq))::integer AS before
            FROM (SELECT id, ended_at, purged_seq, total_count FROM push_clusters
                WHERE ended_at IS NOT NULL AND emptied_at IS NULL AND ended_at <= v_before
                ORDER BY ended_at, id LIMIT 500 FOR NO KEY UPDATE SKIP LOCKED) c) n
        WHERE n.before < p_rows;
    IF v_ids IS NOT NULL THEN
        UPDATE push_clusters c SET purged_at = coalesce(c.purged_at, v_now), purged_seq = x.upto,
            emptied_at = CASE WHEN x.upto = c.total_count THEN v_now END
            FROM unnest(v_ids, v_upto) AS x(id, upto) WHERE c.id = x.id;
        DELETE FROM push_cluster_tokens t USING unnest(v_ids, v_from, v_upto) AS x(id, after, upto)
            WHERE t.cluster_id = x.id AND t.seq > x.after AND t.seq <= x.upto;
        GET DIAGNOSTICS recipients = ROW_COUNT;
        DELETE FROM push_fallbacks f USING unnest(v_ids, v_from, v_upto) AS x(id, after, upto)
            WHERE f.cluster_id = x.id AND f.seq > x.after AND f.seq <= x.upto;
        GET DIAGNOSTICS fallbacks = ROW_COUNT;
        notices := (SELECT count(*) FROM push_clusters c WHERE c.id = ANY (v_ids) AND c.emptied_at = v_now);
    END IF;
    more := v_batches IS NOT NULL OR v_ids IS NOT NULL;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_purge(bigint, integer);
DROP INDEX push_clusters_retained;
ALTER TABLE push_clusters DROP COLUMN purged_seq, DROP COLUMN emptied_at;
