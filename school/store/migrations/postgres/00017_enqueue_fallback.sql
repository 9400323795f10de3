-- +goose Up

-- schoolbell_enqueue takes a fallback, and counts a link and an image towards what
-- fits, as the API does. An idempotency key that came before with another request
-- raises SB011; SB010 was taken.

-- What data and a link, of so many bytes, take in a message: the link travels in
-- data, unless the application has a key of that name.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_message_size(p_data jsonb, p_link integer) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT schoolbell_data_size(p_data) + CASE WHEN p_link > 0 AND NOT coalesce(p_data ? 'link', false) THEN 4 + p_link ELSE 0 END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION schoolbell_sms_option(p_options jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_given jsonb := CASE WHEN jsonb_typeof(p_options -> 'fallback') <> 'null' THEN p_options -> 'fallback' END;
    v_sms   text;
BEGIN
    IF v_given IS NULL THEN
        RETURN NULL;
    ELSIF jsonb_typeof(v_given) <> 'object' THEN
        PERFORM schoolbell_reject('fallback', 'must be an object', 'such as {"sms":"…"}');
    ELSIF v_given - 'sms' <> '{}' THEN
        PERFORM schoolbell_reject('fallback.' || schoolbell_unknown_key(v_given, ARRAY['sms']), 'is not a field of a fallback; it has sms', 'leave it out');
    ELSIF jsonb_typeof(v_given -> 'sms') NOT IN ('string', 'null') THEN
        PERFORM schoolbell_reject('fallback.sms', 'must be a string', 'write it in double quotes');
    END IF;
    v_sms := coalesce(v_given ->> 'sms', '');
    IF v_sms ~ '^[[:space:]\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*$' THEN
        PERFORM schoolbell_reject('fallback.sms', 'is required; leave fallback out for none', 'give the text of the message');
    ELSIF length(v_sms) > 2000 THEN
        PERFORM schoolbell_reject('fallback.sms', 'is longer than 2,000 characters', 'shorten it');
    END IF;
    RETURN v_sms;
END $$;
-- +goose StatementEnd

DROP FUNCTION schoolbell_recipient_complaint(jsonb, jsonb, integer);
-- A recipient as an object; p_data, p_link and p_size are the notice's data, the
-- bytes of its link, and what its message takes without both.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_recipient_complaint(p_recipient jsonb, p_data jsonb, p_size integer, p_link integer) RETURNS text LANGUAGE sql IMMUTABLE AS $$
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
            AND p_size + schoolbell_message_size(coalesce(p_data, '{}') || (p_recipient -> 'data'), p_link) > 4096
            THEN E'.data\ntitle, body, data, link and image together take '
                || (p_size + schoolbell_message_size(coalesce(p_data, '{}') || (p_recipient -> 'data'), p_link))::text
                || ' bytes, 271 of them added by schoolbell; at most 4096 fit' END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schoolbell_enqueue(school text, title text, body text DEFAULT '', data jsonb DEFAULT NULL,
    tokens text[] DEFAULT NULL, options jsonb DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET standard_conforming_strings = on SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    c_options   CONSTANT text[] := ARRAY['scheduled_at', 'expires_at', 'priority', 'delivery', 'image', 'link', 'idempotency_key',
        'topic', 'recipients', 'fallback', 'notify'];
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
    v_sms       text;
    v_topic     text;
    v_hash      bytea;
    v_found     record;
    v_size      integer;
    v_least     integer; -- without data and link
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
            || array_to_string(c_options, ', '), 'leave it out');
    END IF;
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
    v_sizes := ARRAY[octet_length(convert_to(v_title, 'UTF8')), octet_length(convert_to(v_body, 'UTF8')), schoolbell_data_size(v_data),
        octet_length(convert_to(v_link, 'UTF8')), octet_length(convert_to(v_image, 'UTF8'))];
    v_least := v_sizes[1] + v_sizes[2] + v_sizes[5] + c_added;
    v_size := v_least + schoolbell_message_size(v_data, v_sizes[4]);
    IF v_size > 4096 THEN
        PERFORM schoolbell_reject(
            (ARRAY['title', 'body', 'data', 'link', 'image'])[array_position(v_sizes, (SELECT max(s) FROM unnest(v_sizes) s))],
            format('title, body, data, link and image together take %s bytes, %s of them added by schoolbell; at most 4096 fit', v_size, c_added),
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
    v_sms := schoolbell_sms_option(v_options);
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
                    USING ERRCODE = 'SB011', COLUMN = 'idempotency_key', HINT = 'take another key for another notice';
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
        SELECT format('recipients[%s]', x.n - 1), schoolbell_recipient_complaint(x.r, v_data, v_least, v_sizes[4]) INTO v_at, v_complaint
            FROM jsonb_array_elements(v_listed) WITH ORDINALITY x(r, n)
            WHERE schoolbell_recipient_complaint(x.r, v_data, v_least, v_sizes[4]) IS NOT NULL ORDER BY x.n LIMIT 1;
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
                scheduled_at, due_at, expires_at, idempotency_key, request_hash, created_at, total_count, skipped_duplicate_count, fallback_sms)
            VALUES (v_id, v_school, v_title, v_body, CASE WHEN v_data <> '{}' THEN v_data END, v_image, v_link, v_priority, v_delivery,
                v_scheduled, greatest(v_scheduled, v_now), v_expires, v_key, v_hash, v_now, v_total, v_twice, v_sms)
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

-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION schoolbell_enqueue(text, text, text, jsonb, text[], jsonb) SET search_path = %I, pg_temp', current_schema());
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_recipient_complaint(jsonb, jsonb, integer, integer);
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
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION schoolbell_enqueue(school text, title text, body text DEFAULT '', data jsonb DEFAULT NULL,
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
-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION schoolbell_enqueue(text, text, text, jsonb, text[], jsonb) SET search_path = %I, pg_temp', current_schema());
END $$;
-- +goose StatementEnd
DROP FUNCTION schoolbell_sms_option(jsonb);
DROP FUNCTION schoolbell_message_size(jsonb, integer);
