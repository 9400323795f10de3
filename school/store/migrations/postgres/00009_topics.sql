-- +goose Up

ALTER TABLE push_clusters ADD COLUMN topic text COLLATE "C";
COMMENT ON COLUMN push_clusters.topic IS 'its recipients are the devices of this topic, as they were when it was accepted; NULL: they were listed';

-- Makes the devices of a topic the recipients of a notice that
-- schoolbell_open_notice wrote in this transaction, and answers how many they
-- are. Retired ones are left out; one that is switched off is taken along, since
-- that is decided when a page is read (R20). They are numbered in the order of
-- token_sha, which is the order of the index that they come from. A notice that
-- nobody is to get has ended.
--
-- Found by key, whatever the planner thinks of tables without statistics or of a
-- topic that was tiny once: a topic of three in a school of a million reads
-- three devices, so the settings are the function's own and not the session's.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_fill_topic(p_id bigint, p_school text, p_topic text) RETURNS integer LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_total integer;
BEGIN
    INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, ref)
        SELECT p_id, row_number() OVER (ORDER BY m.token_sha), p_school, m.token, nullif(m.ref, '')
        FROM (
            SELECT t.token_sha, d.token, d.ref
            FROM device_topics t JOIN devices d ON d.school_id = t.school_id AND d.token_sha = t.token_sha
            WHERE t.school_id = p_school AND t.topic = p_topic AND d.retired_at IS NULL
            ORDER BY t.token_sha LIMIT 1000001
        ) m;
    GET DIAGNOSTICS v_total = ROW_COUNT;
    IF v_total > 1000000 THEN
        RAISE EXCEPTION 'more than 1,000,000 devices in the topic' USING ERRCODE = 'SB009';
    END IF;
    UPDATE push_clusters c SET
        topic = p_topic, total_count = v_total,
        job_status = CASE WHEN v_total = 0 THEN 'COMPLETED' ELSE c.job_status END,
        ended_at = CASE WHEN v_total = 0 THEN clock_timestamp() END
        WHERE c.id = p_id;
    PERFORM schoolbell_touch_school(p_school);
    RETURN v_total;
END $$;
-- +goose StatementEnd

-- A whole notice to a topic in one statement, so in one round trip and one
-- transaction. Outcomes as schoolbell_open_notice.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_accept_topic(
    p_id bigint, p_school text, p_title text, p_body text, p_data jsonb, p_image text, p_link text,
    p_priority integer, p_delivery text, p_scheduled_at timestamptz, p_expires_at timestamptz,
    p_traceparent text, p_key text, p_hash bytea, p_topic text,
    OUT outcome text, OUT id bigint, OUT status text, OUT total integer)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT o.outcome, o.id, o.status, o.total INTO outcome, id, status, total
        FROM schoolbell_open_notice(p_id, p_school, p_title, p_body, p_data, p_image, p_link, p_priority, p_delivery,
            p_scheduled_at, p_expires_at, p_traceparent, p_key, p_hash, 0, 0) o;
    IF outcome <> 'new' THEN
        RETURN;
    END IF;
    total := schoolbell_fill_topic(p_id, p_school, p_topic);
    IF total = 0 THEN
        status := 'COMPLETED';
    END IF;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_accept_topic(bigint, text, text, text, jsonb, text, text, integer, text, timestamptz, timestamptz,
    text, text, bytea, text);
DROP FUNCTION schoolbell_fill_topic(bigint, text, text);
ALTER TABLE push_clusters DROP COLUMN topic;
