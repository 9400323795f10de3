-- +goose Up

-- Makes a school with its ledger row where it does not exist, and holds it
-- against deletion until the transaction ends.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_touch_school(p_school text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    LOOP
        PERFORM FROM schools WHERE id = p_school FOR KEY SHARE;
        EXIT WHEN FOUND;
        INSERT INTO school_terms (school_id) VALUES (p_school) ON CONFLICT DO NOTHING;
        -- After a deletion the version goes on where it was, since it only grows.
        INSERT INTO schools (id, settings_version)
            SELECT school_id, settings_version + 1 FROM school_terms WHERE school_id = p_school
            ON CONFLICT DO NOTHING;
    END LOOP;
END $$;
-- +goose StatementEnd

-- Opens a notice for its recipients; its school is seen to last, by
-- schoolbell_touch_school, so that a long transaction for a new school does not
-- hold up another for the same school. outcome is
--   new       the row is written; the recipients belong into this transaction
--   replay    the key came before with the same request: id, status, total of then
--   mismatch  the key came before with another request
--   busy      the key's first request is still in progress
--   id_taken  another notice has this id: come again with another
-- The key's lock is tried, never waited for, and is held until the transaction
-- ends. The look-up is a statement of its own and so sees what was committed
-- before the lock was got.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_open_notice(
    p_id bigint, p_school text, p_title text, p_body text, p_data jsonb, p_image text, p_link text,
    p_priority integer, p_delivery text, p_scheduled_at timestamptz, p_expires_at timestamptz,
    p_traceparent text, p_key text, p_hash bytea, p_total integer, p_duplicates integer,
    OUT outcome text, OUT id bigint, OUT status text, OUT total integer)
LANGUAGE plpgsql AS $$
DECLARE
    v_hash bytea;
    v_now  timestamptz := clock_timestamp();
BEGIN
    IF p_key IS NOT NULL THEN
        IF NOT pg_try_advisory_xact_lock(hashtextextended(p_school || '/' || p_key, 4171926)) THEN
            outcome := 'busy';
            RETURN;
        END IF;
        SELECT c.id, c.job_status, c.total_count, c.request_hash INTO id, status, total, v_hash
            FROM push_clusters c WHERE c.school_id = p_school AND c.idempotency_key = p_key;
        IF FOUND THEN
            outcome := CASE WHEN v_hash IS NOT DISTINCT FROM p_hash THEN 'replay' ELSE 'mismatch' END;
            RETURN;
        END IF;
    END IF;
    INSERT INTO push_clusters (id, school_id, title, body, data, image, link, priority, delivery,
            scheduled_at, due_at, expires_at, traceparent, idempotency_key, request_hash, created_at,
            total_count, skipped_duplicate_count)
        VALUES (p_id, p_school, p_title, p_body, p_data, p_image, p_link, p_priority, p_delivery,
            p_scheduled_at, greatest(p_scheduled_at, v_now), p_expires_at, p_traceparent, p_key, p_hash, v_now,
            p_total, p_duplicates)
        ON CONFLICT ON CONSTRAINT push_clusters_pkey DO NOTHING;
    IF NOT FOUND THEN
        outcome := 'id_taken';
        RETURN;
    END IF;
    outcome := 'new';
    id := p_id;
    status := 'PENDING';
    total := p_total;
END $$;
-- +goose StatementEnd

-- A whole notice with a moderate number of recipients in one statement, so in
-- one round trip and one transaction. Outcomes as schoolbell_open_notice.
-- Recipients get seq 1, 2, 3 … in the order of the arrays.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_accept(
    p_id bigint, p_school text, p_title text, p_body text, p_data jsonb, p_image text, p_link text,
    p_priority integer, p_delivery text, p_scheduled_at timestamptz, p_expires_at timestamptz,
    p_traceparent text, p_key text, p_hash bytea, p_total integer, p_duplicates integer,
    p_tokens text[], p_refs text[], p_enabled boolean[], p_badges integer[], p_data_own text[], p_duplicate boolean[],
    OUT outcome text, OUT id bigint, OUT status text, OUT total integer)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT o.outcome, o.id, o.status, o.total INTO outcome, id, status, total
        FROM schoolbell_open_notice(p_id, p_school, p_title, p_body, p_data, p_image, p_link, p_priority, p_delivery,
            p_scheduled_at, p_expires_at, p_traceparent, p_key, p_hash, p_total, p_duplicates) o;
    IF outcome <> 'new' THEN
        RETURN;
    END IF;
    INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, ref, enabled, badge, data, job_status, reason, processed_at)
        SELECT p_id, x.seq, p_school, x.token, x.ref, x.enabled, x.badge, x.data::jsonb,
               CASE WHEN x.duplicate THEN 'SKIPPED' ELSE 'PENDING' END,
               CASE WHEN x.duplicate THEN 'DUPLICATE' END,
               CASE WHEN x.duplicate THEN now() END
        FROM unnest(p_tokens, p_refs, p_enabled, p_badges, p_data_own, p_duplicate)
            WITH ORDINALITY AS x(token, ref, enabled, badge, data, duplicate, seq);
    PERFORM schoolbell_touch_school(p_school);
END $$;
-- +goose StatementEnd

-- Ends what schoolbell_open_notice began, once the recipients are there.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_fill_notice(p_id bigint, p_total integer, p_duplicates integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_school text;
BEGIN
    UPDATE push_clusters c SET total_count = p_total, skipped_duplicate_count = p_duplicates WHERE c.id = p_id
        RETURNING c.school_id INTO v_school;
    PERFORM schoolbell_touch_school(v_school);
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_fill_notice(bigint, integer, integer);
DROP FUNCTION schoolbell_accept(bigint, text, text, text, jsonb, text, text, integer, text, timestamptz, timestamptz,
    text, text, bytea, integer, integer, text[], text[], boolean[], integer[], text[], boolean[]);
DROP FUNCTION schoolbell_open_notice(bigint, text, text, text, jsonb, text, text, integer, text, timestamptz, timestamptz,
    text, text, bytea, integer, integer);
DROP FUNCTION schoolbell_touch_school(text);
