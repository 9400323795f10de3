-- +goose Up

-- The functions about devices find them one by one, by key: with plans made while
-- the tables were tiny, or without statistics, a list of keys was looked for among
-- all devices of a school. A lateral query that cannot be pulled up (it locks, or
-- has an OFFSET) is asked once for each key, whatever the planner thinks; what is
-- to be changed is then reached by its place. The rows that are changed were locked
-- before, so their places stay.

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schoolbell_put_devices(p_school text, p_tokens text[], p_refs text[], p_enabled boolean[], p_topics_given boolean[],
    p_topic_of integer[], p_topics text[], OUT created integer, OUT revived integer)
LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_shas bytea[];
    v_n    integer;
    v_now  timestamptz;
BEGIN
    PERFORM schoolbell_touch_school(p_school);
    v_shas := ARRAY(SELECT sha256(convert_to(x.token, 'UTF8')) FROM unnest(p_tokens) WITH ORDINALITY AS x(token, place) ORDER BY x.place);
    INSERT INTO devices (school_id, token_sha, token)
        SELECT p_school, x.sha, x.token FROM unnest(v_shas, p_tokens) AS x(sha, token) ORDER BY x.sha
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS created = ROW_COUNT;
    SELECT count(*), count(*) FILTER (WHERE l.retired_at IS NOT NULL) INTO v_n, revived FROM (
        SELECT d.retired_at FROM (SELECT x.sha FROM unnest(v_shas) AS x(sha) ORDER BY x.sha) k CROSS JOIN LATERAL (
            SELECT m.retired_at FROM devices m WHERE m.school_id = p_school AND m.token_sha = k.sha FOR NO KEY UPDATE) d) l;
    -- To make it here, with the others' locks held, could deadlock.
    IF v_n <> cardinality(v_shas) THEN
        RAISE EXCEPTION 'a device was deleted meanwhile: come again' USING ERRCODE = 'SB010';
    END IF;
    v_now := clock_timestamp();
    UPDATE devices d SET
        ref = coalesce(x.ref, d.ref), enabled = coalesce(x.enabled, d.enabled),
        registered_at = v_now, updated_at = v_now, retired_at = NULL
        FROM (
            SELECT l.at, k.ref, k.enabled FROM unnest(v_shas, p_refs, p_enabled) AS k(sha, ref, enabled) CROSS JOIN LATERAL (
                SELECT m.ctid AS at FROM devices m WHERE m.school_id = p_school AND m.token_sha = k.sha OFFSET 0) l
        ) x
        WHERE d.ctid = x.at;
    IF true = ANY (p_topics_given) THEN
        DELETE FROM device_topics t
            USING (
                SELECT l.at FROM unnest(v_shas, p_topics_given) WITH ORDINALITY AS k(sha, given, place) CROSS JOIN LATERAL (
                    SELECT m.ctid AS at, m.topic FROM device_topics m WHERE m.school_id = p_school AND m.token_sha = k.sha OFFSET 0) l
                WHERE k.given
                  AND NOT EXISTS (SELECT FROM unnest(p_topic_of, p_topics) AS g(place, topic) WHERE g.place = k.place AND g.topic = l.topic)
            ) x
            WHERE t.ctid = x.at;
        INSERT INTO device_topics (school_id, topic, token_sha)
            SELECT p_school, g.topic, v_shas[g.place] FROM unnest(p_topic_of, p_topics) AS g(place, topic)
            ORDER BY 3, 2
            ON CONFLICT DO NOTHING;
    END IF;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schoolbell_record_gone(
    p_batch text, p_school text, p_owner text, p_fence bigint, p_cycle bigint, p_filled boolean, p_rest bigint,
    p_ok_notice bigint[], p_ok_n integer[],
    p_notice bigint[], p_seq integer[], p_status text[], p_attempts integer[], p_retries integer[], p_orphans integer[],
    p_retry_in_us bigint[], p_code text[], p_reason text[], p_retire boolean[], p_brake boolean,
    OUT engaged boolean, OUT retired integer, OUT flagged integer)
LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_now   timestamptz;
    v_batch push_batches%ROWTYPE;
    v_brake bigint;
    v_shas  bytea[];
BEGIN
    engaged := false;
    retired := 0;
    flagged := 0;
    SELECT b.* INTO v_batch FROM push_batches b WHERE b.id = p_batch AND b.settled_at IS NULL FOR NO KEY UPDATE;
    PERFORM schoolbell_record(p_batch, p_school, p_owner, p_fence, p_cycle, p_filled, p_rest, p_ok_notice, p_ok_n,
        p_notice, p_seq, p_status, p_attempts, p_retries, p_orphans, p_retry_in_us, p_code, p_reason, '{}');
    IF v_batch.id IS NULL THEN
        engaged := EXISTS (SELECT FROM device_brakes k WHERE k.batch_id = p_batch);
        RETURN;
    END IF;
    v_now := clock_timestamp();
    v_shas := ARRAY(
        SELECT sha256(convert_to(t.token, 'UTF8'))
        FROM unnest(p_notice, p_seq, p_retire) AS x(notice, seq, retire)
        JOIN push_cluster_tokens t ON t.cluster_id = x.notice AND t.seq = x.seq
        WHERE x.retire);
    -- The brake is held against being closed, so that no flag comes behind its end.
    LOOP
        SELECT k.id INTO v_brake FROM device_brakes k
            WHERE k.school_id = p_school AND k.sender = v_batch.sender AND k.closed_at IS NULL FOR SHARE;
        EXIT WHEN FOUND OR NOT p_brake;
        INSERT INTO device_brakes (school_id, sender, batch_id, owner, unregistered, size, engaged_at)
            VALUES (p_school, v_batch.sender, p_batch, p_owner, cardinality(v_shas), v_batch.size, v_now)
            ON CONFLICT (school_id, sender) WHERE closed_at IS NULL DO NOTHING
            RETURNING id INTO v_brake;
        engaged := FOUND;
        EXIT WHEN engaged;
    END LOOP;
    -- Registered anew after the claim, a device is not the one that was answered for.
    PERFORM FROM (SELECT x.sha FROM unnest(v_shas) AS x(sha) ORDER BY x.sha) k CROSS JOIN LATERAL (
        SELECT m.ref FROM devices m WHERE m.school_id = p_school AND m.token_sha = k.sha
            AND m.retired_at IS NULL AND m.registered_at < v_batch.claimed_at FOR NO KEY UPDATE) d;
    IF v_brake IS NULL THEN
        UPDATE devices d SET retired_at = v_now
            FROM (SELECT l.at FROM unnest(v_shas) AS k(sha) CROSS JOIN LATERAL (
                SELECT m.ctid AS at FROM devices m WHERE m.school_id = p_school AND m.token_sha = k.sha
                    AND m.retired_at IS NULL AND m.registered_at < v_batch.claimed_at OFFSET 0) l) x
            WHERE d.ctid = x.at;
        GET DIAGNOSTICS retired = ROW_COUNT;
    ELSE
        INSERT INTO device_flags AS f (brake_id, school_id, token_sha, batch_id, claimed_at, flagged_at)
            SELECT v_brake, d.school_id, d.token_sha, p_batch, v_batch.claimed_at, v_now
            FROM (SELECT DISTINCT x.sha FROM unnest(v_shas) AS x(sha)) k CROSS JOIN LATERAL (
                SELECT m.school_id, m.token_sha FROM devices m WHERE m.school_id = p_school AND m.token_sha = k.sha
                    AND m.retired_at IS NULL AND m.registered_at < v_batch.claimed_at OFFSET 0) d
            ON CONFLICT (brake_id, token_sha) DO UPDATE SET
                batch_id = excluded.batch_id, claimed_at = greatest(f.claimed_at, excluded.claimed_at), flagged_at = excluded.flagged_at;
        GET DIAGNOSTICS flagged = ROW_COUNT;
    END IF;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schoolbell_end_flags(p_brake bigint, p_limit integer) RETURNS integer LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    v_school text;
    v_as     text;
    v_shas   bytea[];
    v_n      integer;
BEGIN
    -- Two confirmations at once take turns, step by step.
    SELECT k.school_id, k.closed_as INTO v_school, v_as FROM device_brakes k WHERE k.id = p_brake FOR NO KEY UPDATE;
    IF v_as IS NULL THEN
        RETURN 0;
    END IF;
    v_shas := ARRAY(SELECT f.token_sha FROM device_flags f WHERE f.brake_id = p_brake ORDER BY f.token_sha LIMIT p_limit);
    IF v_as = 'confirmed' THEN
        PERFORM FROM (SELECT x.sha FROM unnest(v_shas) AS x(sha) ORDER BY x.sha) k CROSS JOIN LATERAL (
            SELECT m.ref FROM devices m WHERE m.school_id = v_school AND m.token_sha = k.sha FOR NO KEY UPDATE) d;
        UPDATE devices d SET retired_at = clock_timestamp()
            FROM (SELECT l.at FROM unnest(v_shas) AS k(sha) CROSS JOIN LATERAL (
                SELECT m.ctid AS at FROM device_flags f CROSS JOIN devices m
                WHERE f.brake_id = p_brake AND f.token_sha = k.sha AND m.school_id = v_school AND m.token_sha = k.sha
                    AND m.retired_at IS NULL AND m.registered_at < f.claimed_at OFFSET 0) l) x
            WHERE d.ctid = x.at;
        GET DIAGNOSTICS v_n = ROW_COUNT;
        UPDATE device_brakes k SET retired_count = k.retired_count + v_n WHERE k.id = p_brake;
    END IF;
    DELETE FROM device_flags f
        USING (SELECT l.at FROM unnest(v_shas) AS k(sha) CROSS JOIN LATERAL (
            SELECT m.ctid AS at FROM device_flags m WHERE m.brake_id = p_brake AND m.token_sha = k.sha OFFSET 0) l) x
        WHERE f.ctid = x.at;
    RETURN cardinality(v_shas);
END $$;
-- +goose StatementEnd

-- +goose Down
-- The step before answers the same with these.
SELECT 1;
