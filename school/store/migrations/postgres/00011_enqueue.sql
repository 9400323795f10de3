-- +goose Up

-- What an application calls inside a transaction of its own (R19). Input that is
-- refused raises 22023 with the message "field: what is wrong" as the HTTP API
-- words it, the field alone as COLUMN, and what to do as HINT. Besides:
--   SB007  another open transaction enqueues with this idempotency key
--   SB010  the idempotency key came before with another request
--   40001  where the caller's isolation asks for it: repeat the transaction
-- A complaint is what the checks below answer: what follows the field's name, a
-- line end, what is wrong; NULL where nothing is. Written as one expression where
-- it is asked of each recipient, so that it becomes part of the statement.

-- A name that the caller made up, as it can stand in a message.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_printable(p_name text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_name ~ '^[!-~]{1,64}$' THEN p_name
        ELSE to_json(left(p_name, 64) || CASE WHEN length(p_name) > 64 THEN '…' ELSE '' END)::text END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION schoolbell_reject(p_field text, p_message text, p_hint text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = p_field || ': ' || p_message, COLUMN = p_field, HINT = p_hint;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION schoolbell_token_complaint(p_token text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN coalesce(p_token, '') = '' THEN E'\nis required'
        WHEN octet_length(p_token) > 4096 THEN E'\nis longer than 4,096 bytes'
        WHEN p_token ~ '[\u0001-\u001f\u007f-\u009f]' THEN E'\nmust be UTF-8 without control characters' END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION schoolbell_data_complaint(p_data jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF jsonb_typeof(p_data) = 'null' THEN
        RETURN NULL;
    ELSIF jsonb_typeof(p_data) <> 'object' THEN
        RETURN E'\nmust be an object of strings';
    END IF;
    RETURN (SELECT CASE
            WHEN e.key = '' THEN E'\na key is empty'
            WHEN jsonb_typeof(e.value) <> 'string' THEN '.' || schoolbell_printable(e.key) || E'\nmust be a string'
            ELSE '.' || schoolbell_printable(e.key)
                || E'\nthis key is reserved: from, message_type, google*, gcm* and schoolbell_* cannot be used' END
        FROM jsonb_each(p_data) e
        WHERE e.key = '' OR jsonb_typeof(e.value) <> 'string'
           OR e.key IN ('from', 'message_type') OR e.key ~ '^(google|gcm|schoolbell_)'
        ORDER BY e.key COLLATE "C" LIMIT 1);
END $$;
-- +goose StatementEnd

-- The bytes of data as the receiver counts them.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_data_size(p_data jsonb) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(sum(octet_length(convert_to(e.key, 'UTF8')) + octet_length(convert_to(e.value, 'UTF8'))), 0)::integer
    FROM jsonb_each_text(CASE WHEN jsonb_typeof(p_data) = 'object' THEN p_data ELSE '{}' END) e
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION schoolbell_unknown_key(p_object jsonb, p_known text[]) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT schoolbell_printable(k) FROM jsonb_object_keys(p_object) k WHERE k <> ALL (p_known) ORDER BY k COLLATE "C" LIMIT 1
$$;
-- +goose StatementEnd

-- A recipient as an object; p_data and p_size are the notice's data and what its
-- message takes without any data of a recipient.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_recipient_complaint(p_recipient jsonb, p_data jsonb, p_size integer) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN jsonb_typeof(p_recipient) <> 'object' THEN E'\nmust be an object, {"token":"…"}'
        WHEN p_recipient - ARRAY['token', 'ref', 'enabled', 'badge', 'data'] <> '{}'
            THEN '.' || schoolbell_unknown_key(p_recipient, ARRAY['token', 'ref', 'enabled', 'badge', 'data'])
                || E'\nis not a field of a recipient; it has token, ref, enabled, badge, data'
        WHEN jsonb_typeof(p_recipient -> 'token') NOT IN ('string', 'null') THEN E'.token\nmust be a string'
        WHEN schoolbell_token_complaint(p_recipient ->> 'token') IS NOT NULL THEN '.token' || schoolbell_token_complaint(p_recipient ->> 'token')
        WHEN jsonb_typeof(p_recipient -> 'ref') NOT IN ('string', 'null') THEN E'.ref\nmust be a string'
        WHEN length(p_recipient ->> 'ref') > 255 THEN E'.ref\nis longer than 255 characters'
        WHEN jsonb_typeof(p_recipient -> 'enabled') NOT IN ('boolean', 'null') THEN E'.enabled\nmust be true or false'
        WHEN jsonb_typeof(p_recipient -> 'badge') NOT IN ('number', 'null') OR p_recipient ->> 'badge' !~ '^-?[0-9]+$'
            THEN E'.badge\nmust be a whole number'
        WHEN (p_recipient ->> 'badge')::numeric NOT BETWEEN 0 AND 2147483647 THEN E'.badge\nmust be between 0 and 2147483647'
        WHEN jsonb_typeof(p_recipient -> 'data') IS NULL THEN NULL
        WHEN schoolbell_data_complaint(p_recipient -> 'data') IS NOT NULL THEN '.data' || schoolbell_data_complaint(p_recipient -> 'data')
        WHEN jsonb_typeof(p_recipient -> 'data') = 'object'
            AND p_size + schoolbell_data_size(coalesce(p_data, '{}') || (p_recipient -> 'data')) > 4096
            THEN E'.data\ntitle, body and data together take '
                || (p_size + schoolbell_data_size(coalesce(p_data, '{}') || (p_recipient -> 'data')))::text
                || ' bytes, 271 of them added by schoolbell; at most 4096 fit' END
$$;
-- +goose StatementEnd

-- An option that is a text; NULL where it is not given.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_text_option(p_options jsonb, p_name text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF jsonb_typeof(p_options -> p_name) NOT IN ('string', 'null') THEN
        PERFORM schoolbell_reject(p_name, 'must be a string', 'write it in double quotes');
    END IF;
    RETURN p_options ->> p_name;
END $$;
-- +goose StatementEnd

-- An option that is a moment, in the form in which JSON made from a timestamptz
-- has it.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_time_option(p_options jsonb, p_name text) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_text text := schoolbell_text_option(p_options, p_name);
    v_time timestamptz;
BEGIN
    IF v_text IS NULL THEN
        RETURN NULL;
    END IF;
    IF v_text ~ '^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)$' THEN
        BEGIN
            v_time := v_text;
        EXCEPTION WHEN data_exception THEN
            NULL;
        END;
    END IF;
    IF v_time IS NULL THEN
        PERFORM schoolbell_reject(p_name, 'must be a time with its zone as in RFC 3339, e.g. 2030-01-02T08:00:00+09:00',
            'to_jsonb of a timestamptz has this form');
    ELSIF v_time < timestamptz '2000-01-01T00:00:00Z' THEN
        PERFORM schoolbell_reject(p_name, 'lies before the year 2000', 'give a moment to come');
    END IF;
    RETURN v_time;
END $$;
-- +goose StatementEnd

-- An address; the API's own look at it is the stricter one.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_link_option(p_options jsonb, p_name text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_link text := coalesce(schoolbell_text_option(p_options, p_name), '');
BEGIN
    IF octet_length(v_link) > 2048 THEN
        PERFORM schoolbell_reject(p_name, 'must be at most 2,048 bytes', 'use a shorter address');
    ELSIF v_link <> '' AND (v_link !~* '^https?://([^/?#@]*@)?(\[[0-9a-f:.]+\]|[^]/?#@:[:space:]%<>"\\^`{|}[]+)(:[0-9]*)?([/?#].*)?$'
            OR v_link ~ '[\u0001-\u001f\u007f]' OR v_link ~ '^[^?#]*%(?![0-9A-Fa-f]{2})') THEN
        PERFORM schoolbell_reject(p_name, 'must be an absolute http or https address', 'begin it with https:// and a host');
    END IF;
    RETURN v_link;
END $$;
-- +goose StatementEnd

-- A school that is not known yet is made when its first notice commits, and not
-- where it is enqueued: whoever else enqueues for it meanwhile would wait for the
-- end of a transaction that is not ours. A row lives within its transaction only.
CREATE TABLE school_arrivals (
    cluster_id bigint PRIMARY KEY,
    school_id  text COLLATE "C" NOT NULL
);

-- Runs at COMMIT, by then as the role of the application.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_arrive() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off AS $$
BEGIN
    PERFORM schoolbell_touch_school(NEW.school_id);
    DELETE FROM school_arrivals a WHERE a.cluster_id = NEW.cluster_id;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE CONSTRAINT TRIGGER school_arrives AFTER INSERT ON school_arrivals
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION schoolbell_arrive();

-- Stores a notice with its recipients in the caller's transaction and returns the
-- notice's id. Recipients are tokens, or options.recipients, each an object as in
-- the HTTP API, numbered from 1 in their order, or the devices of options.topic.
-- The dispatchers are told when the
-- transaction commits; rolled back, nothing of it ever was (R18).
--
-- With the rights of the schema's owner, so that an application needs EXECUTE on
-- this and nothing else; therefore on a search_path that is fixed below. What the
-- caller's session has set of how text is read and statements are planned does not
-- reach in here.
--
-- It takes no lock that a claim, a pause, a change of the school or another
-- enqueue would wait for: the school is held against deletion (FOR KEY SHARE), and
-- the idempotency key, where there is one, by a lock that is tried.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_enqueue(school text, title text, body text DEFAULT '', data jsonb DEFAULT NULL,
    tokens text[] DEFAULT NULL, options jsonb DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET standard_conforming_strings = on SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    c_options   CONSTANT text[] := ARRAY['scheduled_at', 'expires_at', 'priority', 'delivery', 'image', 'link', 'idempotency_key',
        'topic', 'recipients', 'fallback', 'notify'];
    c_later     CONSTANT text[] := ARRAY['fallback'];
    c_added     CONSTANT integer := 271; -- school.payloadAdded: what a sender adds to data, at its longest
    v_school    text := coalesce(school, '');
    v_title     text := coalesce(title, '');
    v_body      text := coalesce(body, '');
    v_data      jsonb := CASE WHEN jsonb_typeof(data) <> 'null' THEN data END;
    v_tokens    text[] := tokens;
    v_options   jsonb := CASE WHEN jsonb_typeof(options) <> 'null' THEN options ELSE '{}' END;
    v_listed    jsonb;
    v_image     text;
    v_link      text;
    v_priority  integer;
    v_delivery  text;
    v_scheduled timestamptz;
    v_expires   timestamptz;
    v_key       text;
    v_topic     text;
    v_hash      bytea;
    v_found     record;
    v_size      integer;
    v_sizes     integer[];
    v_complaint text;
    v_at        text;
    v_refs      text[];
    v_enabled   boolean[];
    v_badges    integer[];
    v_own       jsonb[];
    v_total     integer;
    v_twice     integer;
    v_id        bigint;
    v_now       timestamptz;
BEGIN
    -- The notice, in the order in which the API looks at it.
    IF jsonb_typeof(v_options) <> 'object' THEN
        PERFORM schoolbell_reject('options', 'must be an object', 'such as {"priority":"normal"}');
    END IF;
    v_at := schoolbell_unknown_key(v_options, c_options);
    IF v_at IS NOT NULL THEN
        PERFORM schoolbell_reject('options.' || v_at, 'is not an option; there are '
            || (SELECT string_agg(o, ', ' ORDER BY n) FROM unnest(c_options) WITH ORDINALITY x(o, n) WHERE o <> ALL (c_later)), 'leave it out');
    END IF;
    FOREACH v_at IN ARRAY c_later LOOP
        IF v_options ->> v_at IS NOT NULL THEN
            PERFORM schoolbell_reject(v_at, 'is not available in this version', 'leave it out');
        END IF;
    END LOOP;
    IF v_school = '' THEN
        PERFORM schoolbell_reject('school', 'is required', 'give the id of a school; one that is not known is made');
    ELSIF v_school !~ '^[A-Za-z0-9._-]{1,64}$' THEN
        PERFORM schoolbell_reject('school', 'must be 1 to 64 of the characters A-Z a-z 0-9 . _ -', 'ids with other characters cannot name a school');
    END IF;
    IF v_title ~ '^[[:space:]\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*$' THEN
        PERFORM schoolbell_reject('title', 'is required', 'give a title that is not blank');
    END IF;
    v_complaint := schoolbell_data_complaint(v_data);
    IF v_complaint IS NOT NULL THEN
        PERFORM schoolbell_reject('data' || split_part(v_complaint, E'\n', 1), split_part(v_complaint, E'\n', 2),
            'data is an object of strings: {"board":"3"}');
    END IF;
    v_image := schoolbell_link_option(v_options, 'image');
    v_link := schoolbell_link_option(v_options, 'link');
    v_sizes := ARRAY[octet_length(convert_to(v_title, 'UTF8')), octet_length(convert_to(v_body, 'UTF8')), schoolbell_data_size(v_data)];
    v_size := v_sizes[1] + v_sizes[2] + v_sizes[3] + c_added;
    IF v_size > 4096 THEN
        PERFORM schoolbell_reject(
            CASE WHEN v_sizes[3] > greatest(v_sizes[1], v_sizes[2]) THEN 'data' WHEN v_sizes[2] > v_sizes[1] THEN 'body' ELSE 'title' END,
            format('title, body and data together take %s bytes, %s of them added by schoolbell; at most 4096 fit', v_size, c_added),
            'shorten it, or send an address from which the rest can be read');
    END IF;
    v_priority := array_position(ARRAY['urgent', 'normal', 'low'], coalesce(schoolbell_text_option(v_options, 'priority'), 'normal')) - 1;
    IF v_priority IS NULL THEN
        PERFORM schoolbell_reject('priority', 'must be urgent, normal or low', 'leave it out for normal');
    END IF;
    v_delivery := coalesce(schoolbell_text_option(v_options, 'delivery'), 'at_least_once');
    IF v_delivery NOT IN ('at_least_once', 'at_most_once') THEN
        PERFORM schoolbell_reject('delivery', 'must be at_least_once or at_most_once', 'leave it out for at_least_once');
    END IF;
    v_topic := schoolbell_text_option(v_options, 'topic');
    IF v_topic !~ '^[A-Za-z0-9._~%-]{1,255}$' THEN
        PERFORM schoolbell_reject('topic', 'must be 1 to 255 of the characters A-Z a-z 0-9 . _ ~ % -', 'give the name under which devices have it');
    END IF;
    v_scheduled := schoolbell_time_option(v_options, 'scheduled_at');
    v_expires := schoolbell_time_option(v_options, 'expires_at');
    IF v_expires <= v_scheduled THEN
        PERFORM schoolbell_reject('expires_at', 'must be after scheduled_at', 'give a later one');
    END IF;
    v_key := schoolbell_text_option(v_options, 'idempotency_key');
    IF v_key !~ '^.{1,255}$' OR v_key ~ '[\u0001-\u001f\u007f-\u00a0\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]' THEN
        PERFORM schoolbell_reject('idempotency_key', 'must be 1 to 255 printable characters', 'take the id of what the notice is about');
    END IF;
    IF jsonb_typeof(v_options -> 'notify') NOT IN ('boolean', 'null') THEN
        PERFORM schoolbell_reject('notify', 'must be true or false', 'false leaves the notice to the next tick of the dispatchers');
    END IF;
    v_listed := CASE WHEN jsonb_typeof(v_options -> 'recipients') <> 'null' THEN v_options -> 'recipients' END;
    CASE
        WHEN v_topic IS NOT NULL AND (v_listed IS NOT NULL OR cardinality(v_tokens) > 0) THEN
            PERFORM schoolbell_reject('topic', 'cannot go with recipients; give one of the two', 'leave the topic or the tokens out');
        WHEN v_topic IS NOT NULL THEN
            v_tokens := '{}';
        WHEN v_listed IS NOT NULL AND v_tokens IS NOT NULL THEN
            PERFORM schoolbell_reject('tokens', 'cannot go with recipients; give one of the two', 'put the tokens into options.recipients, or leave that out');
        WHEN jsonb_typeof(v_listed) <> 'array' THEN
            PERFORM schoolbell_reject('recipients', 'must be an array of objects, [{"token":"…"}]', 'or give tokens');
        WHEN v_listed IS NULL AND v_tokens IS NULL THEN
            PERFORM schoolbell_reject('tokens', 'is required; or name a topic', 'give tokens, or recipients or a topic in options');
        WHEN array_ndims(v_tokens) > 1 THEN
            PERFORM schoolbell_reject('tokens', 'must have one dimension', 'give a text[] such as ARRAY[''…'', ''…'']');
        ELSE NULL;
    END CASE;
    v_total := coalesce(jsonb_array_length(v_listed), cardinality(v_tokens));
    v_at := CASE WHEN v_listed IS NULL THEN 'tokens' ELSE 'recipients' END;
    IF v_total = 0 AND v_topic IS NULL THEN
        PERFORM schoolbell_reject(v_at, 'must name at least one device', 'do not enqueue a notice for nobody');
    ELSIF v_total > 1000000 THEN
        PERFORM schoolbell_reject(v_at, 'at most 1000000', 'make several notices');
    END IF;

    -- The same key with the same request answers as it did the first time.
    IF v_key IS NOT NULL THEN
        v_hash := sha256(convert_to(jsonb_build_array('schoolbell_enqueue', v_school, v_title, v_body, v_data,
                v_options - ARRAY['idempotency_key', 'notify'])::text, 'UTF8')
            || coalesce((SELECT sha256(string_agg(sha256(convert_to(coalesce(t, ''), 'UTF8')), ''::bytea ORDER BY n))
                FROM unnest(v_tokens) WITH ORDINALITY x(t, n)), ''));
        IF NOT pg_try_advisory_xact_lock(hashtextextended(v_school || '/' || v_key, 4171926)) THEN
            RAISE EXCEPTION 'idempotency_key: another transaction that is still open uses it'
                USING ERRCODE = 'SB007', COLUMN = 'idempotency_key', HINT = 'ask again when it has ended';
        END IF;
        SELECT c.id, c.request_hash INTO v_found FROM push_clusters c WHERE c.school_id = v_school AND c.idempotency_key = v_key;
        IF FOUND THEN
            IF v_found.request_hash IS DISTINCT FROM v_hash THEN
                RAISE EXCEPTION 'idempotency_key: was used before with another request'
                    USING ERRCODE = 'SB010', COLUMN = 'idempotency_key', HINT = 'take another key for another notice';
            END IF;
            RETURN v_found.id::text;
        END IF;
    END IF;
    v_now := clock_timestamp();
    IF v_expires <= v_now THEN
        PERFORM schoolbell_reject('expires_at', 'has passed already', 'give a later one, or do not enqueue the notice');
    END IF;

    -- The recipients. The first that is wrong is named by its subscript, as SQL
    -- counts in tokens, from 1, and JSON in recipients, from 0.
    IF v_listed IS NULL THEN
        SELECT format('tokens[%s]', x.n), schoolbell_token_complaint(x.t) INTO v_at, v_complaint
            FROM unnest(v_tokens) WITH ORDINALITY x(t, n) WHERE schoolbell_token_complaint(x.t) IS NOT NULL ORDER BY x.n LIMIT 1;
    ELSE
        SELECT format('recipients[%s]', x.n - 1), schoolbell_recipient_complaint(x.r, v_data, v_size - v_sizes[3]) INTO v_at, v_complaint
            FROM jsonb_array_elements(v_listed) WITH ORDINALITY x(r, n)
            WHERE schoolbell_recipient_complaint(x.r, v_data, v_size - v_sizes[3]) IS NOT NULL ORDER BY x.n LIMIT 1;
    END IF;
    IF v_complaint IS NOT NULL THEN
        PERFORM schoolbell_reject(v_at || split_part(v_complaint, E'\n', 1), split_part(v_complaint, E'\n', 2),
            'put this recipient right or leave it out; nothing was stored');
    END IF;
    IF v_listed IS NOT NULL THEN
        SELECT array_agg(x.r ->> 'token' ORDER BY x.n), array_agg(nullif(x.r ->> 'ref', '') ORDER BY x.n),
               array_agg((x.r ->> 'enabled')::boolean ORDER BY x.n), array_agg((x.r ->> 'badge')::integer ORDER BY x.n),
               array_agg(CASE WHEN x.r -> 'data' NOT IN ('null', '{}') THEN x.r -> 'data' END ORDER BY x.n)
            INTO v_tokens, v_refs, v_enabled, v_badges, v_own
            FROM jsonb_array_elements(v_listed) WITH ORDINALITY x(r, n);
    END IF;
    v_twice := v_total - (SELECT count(*) FROM (SELECT FROM unnest(v_tokens) t GROUP BY t COLLATE "C") d);

    -- Ids as school.NewNoticeID makes them: 41 bits of milliseconds since 2020 and
    -- 22 random ones. One that is taken, in this millisecond, is made again. ON
    -- CONFLICT also meets a key that was stored without its lock: under READ
    -- COMMITTED it is then looked up, and above that the transaction has to be
    -- repeated, which PostgreSQL says itself.
    LOOP
        v_id := ((floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - 1577836800000) << 22)
            | (('x' || right(gen_random_uuid()::text, 6))::bit(24)::bigint & 4194303);
        INSERT INTO push_clusters (id, school_id, title, body, data, image, link, priority, delivery,
                scheduled_at, due_at, expires_at, idempotency_key, request_hash, created_at, total_count, skipped_duplicate_count)
            VALUES (v_id, v_school, v_title, v_body, CASE WHEN v_data <> '{}' THEN v_data END, v_image, v_link, v_priority, v_delivery,
                v_scheduled, greatest(v_scheduled, v_now), v_expires, v_key, v_hash, v_now, v_total, v_twice)
            ON CONFLICT DO NOTHING;
        EXIT WHEN FOUND;
        IF EXISTS (SELECT FROM push_clusters c WHERE c.school_id = v_school AND c.idempotency_key = v_key) THEN
            RAISE EXCEPTION 'idempotency_key: another transaction that is still open uses it'
                USING ERRCODE = 'SB007', COLUMN = 'idempotency_key', HINT = 'ask again when it has ended';
        END IF;
    END LOOP;
    PERFORM FROM schools s WHERE s.id = v_school FOR KEY SHARE;
    IF NOT FOUND THEN
        INSERT INTO school_arrivals VALUES (v_id, v_school);
        UPDATE push_clusters c SET topic = v_topic, job_status = 'COMPLETED', ended_at = v_now WHERE c.id = v_id AND v_topic IS NOT NULL;
    ELSIF v_topic IS NOT NULL THEN
        BEGIN
            PERFORM schoolbell_fill_topic(v_id, v_school, v_topic);
        EXCEPTION WHEN SQLSTATE 'SB009' THEN
            PERFORM schoolbell_reject('topic', 'has more than 1000000 devices', 'make several topics of it');
        END;
    END IF;
    IF v_topic IS NOT NULL THEN
        NULL; -- its recipients are there
    ELSIF v_twice = 0 THEN
        INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, ref, enabled, badge, data)
            SELECT v_id, x.seq, v_school, x.token, x.ref, x.enabled, x.badge, x.data
            FROM unnest(v_tokens, v_refs, v_enabled, v_badges, v_own) WITH ORDINALITY AS x(token, ref, enabled, badge, data, seq);
    ELSE
        INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, ref, enabled, badge, data, job_status, reason, processed_at)
            SELECT v_id, x.seq, v_school, x.token, x.ref, x.enabled, x.badge, x.data,
                   CASE WHEN x.n > 1 THEN 'SKIPPED' ELSE 'PENDING' END,
                   CASE WHEN x.n > 1 THEN 'DUPLICATE' END,
                   CASE WHEN x.n > 1 THEN v_now END
            FROM (SELECT r.*, row_number() OVER (PARTITION BY r.token COLLATE "C" ORDER BY r.seq) AS n
                FROM unnest(v_tokens, v_refs, v_enabled, v_badges, v_own) WITH ORDINALITY AS r(token, ref, enabled, badge, data, seq)) x
            ORDER BY x.seq;
    END IF;
    IF (v_options ->> 'notify')::boolean IS NOT FALSE THEN
        PERFORM pg_notify('schoolbell_wake', v_school);
    END IF;
    RETURN v_id::text;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION schoolbell_enqueue(text, text, text, jsonb, text[], jsonb) IS
    'stores a notice in your own transaction and returns its id; README, "In your own transaction"';

-- Rights of their owner have to be given away on purpose:
-- GRANT EXECUTE ON FUNCTION schoolbell_enqueue TO somebody.
REVOKE EXECUTE ON FUNCTION schoolbell_enqueue(text, text, text, jsonb, text[], jsonb) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION schoolbell_arrive() FROM PUBLIC;

-- The schema that all this is in, and nothing that a caller could put before it.
-- CREATE OR REPLACE forgets this: whoever replaces one says it again.
-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION schoolbell_enqueue(text, text, text, jsonb, text[], jsonb) SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION schoolbell_arrive() SET search_path = %I, pg_temp', current_schema());
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_enqueue(text, text, text, jsonb, text[], jsonb);
DROP TABLE school_arrivals;
DROP FUNCTION schoolbell_arrive();
DROP FUNCTION schoolbell_link_option(jsonb, text);
DROP FUNCTION schoolbell_time_option(jsonb, text);
DROP FUNCTION schoolbell_text_option(jsonb, text);
DROP FUNCTION schoolbell_recipient_complaint(jsonb, jsonb, integer);
DROP FUNCTION schoolbell_unknown_key(jsonb, text[]);
DROP FUNCTION schoolbell_data_size(jsonb);
DROP FUNCTION schoolbell_data_complaint(jsonb);
DROP FUNCTION schoolbell_token_complaint(text);
DROP FUNCTION schoolbell_reject(text, text, text);
DROP FUNCTION schoolbell_printable(text);
