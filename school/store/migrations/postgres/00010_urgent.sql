-- +goose Up

-- Claims as schoolbell_claim does, unless an urgent notice waits that this claim
-- leaves behind: first attempts of urgent notices go before everything else of
-- their school, also before the rest of a page that was read before they came.
-- Its statement has a snapshot of its own, from after the claim's time: whatever
-- was committed before that is seen.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_claim_urgent_first(
    p_school text, p_fence bigint, p_acquisition text, p_owner text,
    p_batch text, p_sender text, p_size integer, p_cycle bigint, p_attempted integer, p_filled boolean,
    p_longest_us bigint, p_record_us bigint, p_limit integer, p_rest bigint, p_version bigint,
    p_notice bigint[], p_from integer[], p_to integer[], p_taken integer[], p_retries integer[],
    p_again_notice bigint[], p_again_seq integer[], p_again_attempts integer[],
    p_skip_notice bigint[], p_skip_seq integer[], p_skip_attempts integer[], p_skip_reason text[],
    p_range_notice bigint[], p_range_from integer[], p_range_to integer[], p_range_kind text[])
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM schoolbell_claim(p_school, p_fence, p_acquisition, p_owner, p_batch, p_sender, p_size, p_cycle, p_attempted, p_filled, p_longest_us, p_record_us, p_limit, p_rest, p_version,
        p_notice, p_from, p_to, p_taken, p_retries, p_again_notice, p_again_seq, p_again_attempts,
        p_skip_notice, p_skip_seq, p_skip_attempts, p_skip_reason, p_range_notice, p_range_from, p_range_to, p_range_kind);
    IF EXISTS (SELECT FROM push_clusters c
               WHERE c.school_id = p_school AND c.ended_at IS NULL AND c.priority = 0 AND c.due_at <= clock_timestamp()
                 AND c.frontier < c.total_count AND c.closing IS NULL AND (c.expires_at IS NULL OR c.expires_at > clock_timestamp()))
       AND (cardinality(p_again_seq) > 0 OR EXISTS (
               SELECT FROM unnest(p_notice, p_taken) AS x(id, taken) JOIN push_clusters c ON c.id = x.id
               WHERE x.taken > 0 AND c.priority > 0)) THEN
        RAISE EXCEPTION 'an urgent notice waits' USING ERRCODE = 'SB003';
    END IF;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_claim_urgent_first(text, bigint, text, text, text, text, integer, bigint, integer, boolean, bigint, bigint,
    integer, bigint, bigint, bigint[], integer[], integer[], integer[], integer[], bigint[], integer[], integer[],
    bigint[], integer[], integer[], text[], bigint[], integer[], integer[], text[]);
