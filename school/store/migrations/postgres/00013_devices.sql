-- +goose Up

-- While a brake is on, devices of its school that come back as unregistered from
-- its sender are flagged and not retired, until a person has looked: with another
-- project's credentials every device looks gone. It belongs to its school and
-- goes with it.
CREATE TABLE device_brakes (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    school_id     text COLLATE "C" NOT NULL REFERENCES schools ON DELETE CASCADE,
    sender        text COLLATE "C" NOT NULL,
    batch_id      text COLLATE "C" NOT NULL,
    owner         text        NOT NULL,
    unregistered  integer     NOT NULL,
    size          integer     NOT NULL,
    engaged_at    timestamptz NOT NULL,
    closed_at     timestamptz,
    closed_as     text,
    closed_by     text,
    retired_count integer     NOT NULL DEFAULT 0
);
COMMENT ON COLUMN device_brakes.batch_id IS 'that engaged it, recorded by owner: unregistered of size messages';
COMMENT ON COLUMN device_brakes.closed_at IS 'NULL: it is on';
COMMENT ON COLUMN device_brakes.closed_as IS 'confirmed: those flagged are retired; cleared: the flags are removed';
COMMENT ON COLUMN device_brakes.retired_count IS 'devices that its confirmation retired';
CREATE UNIQUE INDEX device_brakes_open ON device_brakes (school_id, sender) WHERE closed_at IS NULL;
CREATE INDEX device_brakes_batch ON device_brakes (batch_id);
CREATE INDEX device_brakes_school ON device_brakes (school_id, id);

CREATE TABLE device_flags (
    brake_id   bigint NOT NULL REFERENCES device_brakes ON DELETE CASCADE,
    school_id  text COLLATE "C" NOT NULL,
    token_sha  bytea NOT NULL,
    batch_id   text COLLATE "C" NOT NULL,
    claimed_at timestamptz NOT NULL,
    flagged_at timestamptz NOT NULL,
    PRIMARY KEY (brake_id, token_sha),
    FOREIGN KEY (school_id, token_sha) REFERENCES devices ON DELETE CASCADE
);
COMMENT ON COLUMN device_flags.claimed_at IS 'of the last batch that flagged it: registered since, a device is not the one that was answered for';
CREATE INDEX device_flags_device ON device_flags (school_id, token_sha);

-- Registers devices of a school: what is NULL stays as it was. The tokens are
-- distinct. A registration revives a device that was retired. p_topics holds the
-- topics of the devices whose place in the arrays is p_topic_of; the set of each
-- device with p_topics_given is replaced.
--
-- The school first, as a deletion has it; then the devices by key, so that two
-- registrations never wait for one another in a circle.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_put_devices(p_school text, p_tokens text[], p_refs text[], p_enabled boolean[], p_topics_given boolean[],
    p_topic_of integer[], p_topics text[], OUT created integer, OUT revived integer)
LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
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
        SELECT d.retired_at FROM devices d WHERE d.school_id = p_school AND d.token_sha = ANY (v_shas)
        ORDER BY d.token_sha FOR NO KEY UPDATE) l;
    -- To make it here, with the others' locks held, could deadlock.
    IF v_n <> cardinality(v_shas) THEN
        RAISE EXCEPTION 'a device was deleted meanwhile: come again' USING ERRCODE = 'SB010';
    END IF;
    v_now := clock_timestamp();
    UPDATE devices d SET
        ref = coalesce(x.ref, d.ref), enabled = coalesce(x.enabled, d.enabled),
        registered_at = v_now, updated_at = v_now, retired_at = NULL
        FROM unnest(v_shas, p_refs, p_enabled) AS x(sha, ref, enabled)
        WHERE d.school_id = p_school AND d.token_sha = x.sha;
    IF true = ANY (p_topics_given) THEN
        DELETE FROM device_topics t
            USING unnest(v_shas, p_topics_given) WITH ORDINALITY AS x(sha, given, place)
            WHERE x.given AND t.school_id = p_school AND t.token_sha = x.sha
              AND NOT EXISTS (SELECT FROM unnest(p_topic_of, p_topics) AS g(place, topic) WHERE g.place = x.place AND g.topic = t.topic);
        INSERT INTO device_topics (school_id, topic, token_sha)
            SELECT p_school, g.topic, v_shas[g.place] FROM unnest(p_topic_of, p_topics) AS g(place, topic)
            ORDER BY 3, 2
            ON CONFLICT DO NOTHING;
    END IF;
END $$;
-- +goose StatementEnd

-- Records a batch of which devices are gone: schoolbell_record for all else, and
-- then the devices, in the same transaction. p_brake says that they are too many
-- to be believed. Where it does, or a brake is on for the school and the batch's
-- sender, they are flagged; otherwise they are retired.
--
-- Only the call that settles the batch does so. The first statement holds the
-- batch or finds it settled, also after it waited for another call of this kind,
-- since the condition is looked at again then. engaged is also true for a repeat
-- whose first answer may have been lost.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_record_gone(
    p_batch text, p_school text, p_owner text, p_fence bigint, p_cycle bigint, p_filled boolean, p_rest bigint,
    p_ok_notice bigint[], p_ok_n integer[],
    p_notice bigint[], p_seq integer[], p_status text[], p_attempts integer[], p_retries integer[], p_orphans integer[],
    p_retry_in_us bigint[], p_code text[], p_reason text[], p_retire boolean[], p_brake boolean,
    OUT engaged boolean, OUT retired integer, OUT flagged integer)
LANGUAGE plpgsql AS $$
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
    PERFORM FROM devices d
        WHERE d.school_id = p_school AND d.token_sha = ANY (v_shas) AND d.retired_at IS NULL AND d.registered_at < v_batch.claimed_at
        ORDER BY d.token_sha FOR NO KEY UPDATE;
    IF v_brake IS NULL THEN
        UPDATE devices d SET retired_at = v_now
            WHERE d.school_id = p_school AND d.token_sha = ANY (v_shas) AND d.retired_at IS NULL AND d.registered_at < v_batch.claimed_at;
        GET DIAGNOSTICS retired = ROW_COUNT;
    ELSE
        INSERT INTO device_flags AS f (brake_id, school_id, token_sha, batch_id, claimed_at, flagged_at)
            SELECT v_brake, d.school_id, d.token_sha, p_batch, v_batch.claimed_at, v_now FROM devices d
            WHERE d.school_id = p_school AND d.token_sha = ANY (v_shas) AND d.retired_at IS NULL AND d.registered_at < v_batch.claimed_at
            ON CONFLICT (brake_id, token_sha) DO UPDATE SET
                batch_id = excluded.batch_id, claimed_at = greatest(f.claimed_at, excluded.claimed_at), flagged_at = excluded.flagged_at;
        GET DIAGNOSTICS flagged = ROW_COUNT;
    END IF;
END $$;
-- +goose StatementEnd

-- Closes a brake as it is said to be; closing it again in the same way is no
-- error, so that a confirmation which broke off can go on.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_close_brake(p_id bigint, p_as text, p_by text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_as text;
BEGIN
    SELECT k.closed_as INTO v_as FROM device_brakes k WHERE k.id = p_id FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no such brake' USING ERRCODE = 'SB005';
    ELSIF v_as <> p_as THEN
        RAISE EXCEPTION 'the brake was closed otherwise' USING ERRCODE = 'SB007';
    ELSIF v_as IS NULL THEN
        UPDATE device_brakes k SET closed_at = clock_timestamp(), closed_as = p_as, closed_by = p_by WHERE k.id = p_id;
    END IF;
END $$;
-- +goose StatementEnd

-- Takes up to p_limit flags off a brake that was closed, and, where it was
-- confirmed, retires their devices but for those registered since they were
-- flagged. Answers how many flags it took: less than p_limit were all.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_end_flags(p_brake bigint, p_limit integer) RETURNS integer LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
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
        PERFORM FROM devices d WHERE d.school_id = v_school AND d.token_sha = ANY (v_shas) ORDER BY d.token_sha FOR NO KEY UPDATE;
        UPDATE devices d SET retired_at = clock_timestamp() FROM device_flags f
            WHERE f.brake_id = p_brake AND f.token_sha = ANY (v_shas)
              AND d.school_id = f.school_id AND d.token_sha = f.token_sha AND d.retired_at IS NULL AND d.registered_at < f.claimed_at;
        GET DIAGNOSTICS v_n = ROW_COUNT;
        UPDATE device_brakes k SET retired_count = k.retired_count + v_n WHERE k.id = p_brake;
    END IF;
    DELETE FROM device_flags f WHERE f.brake_id = p_brake AND f.token_sha = ANY (v_shas);
    RETURN cardinality(v_shas);
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_end_flags(bigint, integer);
DROP FUNCTION schoolbell_close_brake(bigint, text, text);
DROP FUNCTION schoolbell_record_gone(text, text, text, bigint, bigint, boolean, bigint, bigint[], integer[],
    bigint[], integer[], text[], integer[], integer[], integer[], bigint[], text[], text[], boolean[], boolean);
DROP FUNCTION schoolbell_put_devices(text, text[], text[], boolean[], boolean[], integer[], text[]);
DROP TABLE device_flags, device_brakes;
