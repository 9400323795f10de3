-- +goose Up

-- Errors of these functions that have a meaning of their own:
--   SB001 fenced      a newer term holds the school
--   SB002 paused      the school is paused
--   SB003 stale       what was read has moved: read anew
--   SB004 taken over  another settled the batch
--   SB005 not found   no such school or batch
--   SB006 mismatch    the caller's view of a batch is not the store's
--   SB007 conflict    refused as things stand
--   SB008 changed     the school's settings are newer than the term's
-- They roll the whole statement back. Every function is called alone, in a
-- transaction of its own: one round trip, COMMIT included.

-- Opens a term: the fence grows by one, which makes every older claim's fate
-- final: it holds the row's lock and commits before this returns, or it will be
-- refused. The open batches are read by a later statement of this function, so
-- with a snapshot taken after the lock was got: they include such a claim.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_open_term(p_school text, p_acquisition text, p_owner text,
    OUT fence bigint, OUT cycle bigint, OUT attempted integer, OUT filled boolean, OUT resting_us bigint,
    OUT rule_limit integer, OUT rule_rest bigint, OUT rule_version bigint,
    OUT name text, OUT sender text, OUT school_limit integer, OUT school_rest bigint, OUT settings_version bigint,
    OUT paused boolean, OUT created_at timestamptz, OUT batches jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
BEGIN
    UPDATE school_terms t SET fence = t.fence + 1, acquisition = p_acquisition, owner = p_owner, opened_at = clock_timestamp()
        WHERE t.school_id = p_school;
    v_now := clock_timestamp();
    SELECT t.fence, t.cycle, t.attempted, t.next_eligible_at IS NOT NULL,
           coalesce(greatest(0, ceil(extract(epoch FROM t.next_eligible_at - v_now) * 1000000)), 0),
           t."limit", t.rest, t.settings_version,
           s.name, s.sender, s."limit", s.rest, s.settings_version, t.paused, s.created_at
        INTO fence, cycle, attempted, filled, resting_us, rule_limit, rule_rest, rule_version,
             name, sender, school_limit, school_rest, settings_version, paused, created_at
        FROM school_terms t JOIN schools s ON s.id = t.school_id WHERE t.school_id = p_school;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no such school' USING ERRCODE = 'SB005';
    END IF;
    SELECT jsonb_agg(jsonb_build_object('id', b.id, 'fence', b.fence, 'cycle', b.cycle, 'size', b.size,
               'remaining_us', ceil(extract(epoch FROM b.send_deadline - v_now) * 1000000)) ORDER BY b.fence, b.id)
        INTO batches FROM push_batches b WHERE b.school_id = p_school AND b.settled_at IS NULL;
END $$;
-- +goose StatementEnd

-- Says why a guarded update of a term met no row.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_refuse(p_school text, p_fence bigint, p_acquisition text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM school_terms t WHERE t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition) THEN
        RAISE EXCEPTION 'school is paused' USING ERRCODE = 'SB002';
    END IF;
    RAISE EXCEPTION 'a newer term holds the school' USING ERRCODE = 'SB001';
END $$;
-- +goose StatementEnd

-- Claims recipients, or, without a batch id, only moves frontiers over
-- recipients that are not to be sent.
--
-- p_notice is sorted and distinct; for each notice the frontier moves from
-- p_from to p_to (NULL: it stays), p_taken recipients are handed over, of which
-- p_retries waited as RETRY_PENDING. p_again are the recipients claimed by key,
-- p_skip those that will never be handed over.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_claim(
    p_school text, p_fence bigint, p_acquisition text, p_owner text,
    p_batch text, p_sender text, p_size integer, p_cycle bigint, p_attempted integer, p_filled boolean,
    p_longest_us bigint, p_record_us bigint, p_limit integer, p_rest bigint, p_version bigint,
    p_notice bigint[], p_from integer[], p_to integer[], p_taken integer[], p_retries integer[],
    p_again_notice bigint[], p_again_seq integer[], p_again_attempts integer[],
    p_skip_notice bigint[], p_skip_seq integer[], p_skip_attempts integer[], p_skip_reason text[],
    p_range_notice bigint[], p_range_from integer[], p_range_to integer[], p_range_kind text[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now     timestamptz;
    v_n       integer;
    v_cycle   bigint;
    v_notices bigint[];
    v_source  text[];
    v_target  text[];
    v_counts  integer[];
BEGIN
    IF p_batch IS NULL THEN
        PERFORM FROM school_terms t
            WHERE t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition AND NOT t.paused
            FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            PERFORM schoolbell_refuse(p_school, p_fence, p_acquisition);
        END IF;
        v_now := clock_timestamp();
    ELSE
        -- Within its cycle attempted never falls, so that a ledger which lost its
        -- newest writes in a failover catches up with the first claim after it.
        -- A rest is set at once, from the latest moment the call can end.
        UPDATE school_terms t SET
            cycle = greatest(t.cycle, p_cycle),
            attempted = CASE WHEN p_cycle = t.cycle THEN greatest(t.attempted, p_attempted)
                             WHEN p_cycle > t.cycle THEN p_attempted ELSE t.attempted END,
            next_eligible_at = CASE WHEN p_cycle < t.cycle THEN t.next_eligible_at
                                    WHEN p_filled THEN clock_timestamp() + (p_longest_us + p_rest * 1000) * interval '1 microsecond'
                                    WHEN p_cycle = t.cycle THEN t.next_eligible_at END,
            "limit" = CASE WHEN p_version >= t.settings_version THEN p_limit ELSE t."limit" END,
            rest = CASE WHEN p_version >= t.settings_version THEN p_rest ELSE t.rest END,
            settings_version = greatest(t.settings_version, p_version)
            WHERE t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition AND NOT t.paused
            RETURNING t.cycle INTO v_cycle;
        IF NOT FOUND THEN
            PERFORM schoolbell_refuse(p_school, p_fence, p_acquisition);
        END IF;
        IF v_cycle <> p_cycle THEN
            RAISE EXCEPTION 'grant of cycle % is older than the ledger''s %', p_cycle, v_cycle USING ERRCODE = 'SB007';
        END IF;
        -- A lower limit acts at once: who claims by an older rule opens a new term.
        IF EXISTS (SELECT FROM schools s WHERE s.id = p_school AND s.settings_version > p_version) THEN
            RAISE EXCEPTION 'settings have changed' USING ERRCODE = 'SB008';
        END IF;
        v_now := clock_timestamp();
        INSERT INTO push_batches (id, school_id, sender, fence, cycle, size, filled, owner, claimed_at, send_deadline)
            VALUES (p_batch, p_school, p_sender, p_fence, p_cycle, p_size, p_filled, p_owner, v_now,
                v_now + (p_longest_us + p_record_us) * interval '1 microsecond');
        INSERT INTO push_batch_ranges (batch_id, cluster_id, from_seq, to_seq, kind)
            SELECT p_batch, x.* FROM unnest(p_range_notice, p_range_from, p_range_to, p_range_kind) x;
    END IF;

    IF cardinality(p_notice) > 1 THEN
        PERFORM FROM push_clusters c WHERE c.id = ANY (p_notice) ORDER BY c.id FOR NO KEY UPDATE;
    END IF;
    UPDATE push_clusters c SET
        frontier = coalesce(x.upto, c.frontier),
        in_progress_count = c.in_progress_count + x.taken,
        retry_pending_count = c.retry_pending_count - x.retries,
        job_status = CASE WHEN x.taken > 0 THEN 'IN_PROGRESS' ELSE c.job_status END,
        first_send_at = CASE WHEN x.taken > 0 THEN coalesce(c.first_send_at, v_now) ELSE c.first_send_at END,
        last_send_at = CASE WHEN x.taken > 0 THEN v_now ELSE c.last_send_at END
        FROM unnest(p_notice, p_from, p_to, p_taken, p_retries) AS x(id, since, upto, taken, retries)
        WHERE c.id = x.id AND c.school_id = p_school
          AND (x.upto IS NULL OR (c.frontier = x.since AND x.upto <= c.total_count))
          AND c.closing IS NULL AND c.ended_at IS NULL AND (c.expires_at IS NULL OR c.expires_at > v_now);
    GET DIAGNOSTICS v_n = ROW_COUNT;
    IF v_n <> cardinality(p_notice) THEN
        RAISE EXCEPTION 'a notice has moved' USING ERRCODE = 'SB003';
    END IF;

    IF cardinality(p_again_seq) > 0 THEN
        UPDATE push_cluster_tokens t SET retry_after = NULL
            FROM unnest(p_again_notice, p_again_seq, p_again_attempts) AS x(notice, seq, attempts)
            WHERE t.cluster_id = x.notice AND t.seq = x.seq AND t.attempts = x.attempts
              AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after <= v_now;
        GET DIAGNOSTICS v_n = ROW_COUNT;
        IF v_n <> cardinality(p_again_seq) THEN
            RAISE EXCEPTION 'a retry has moved' USING ERRCODE = 'SB003';
        END IF;
    END IF;

    -- One that was handed over before cannot be SKIPPED any more.
    IF cardinality(p_skip_seq) > 0 THEN
        WITH moved AS (
            UPDATE push_cluster_tokens t SET
                job_status = CASE WHEN t.attempts = 0 THEN 'SKIPPED' ELSE 'PERMANENT_FAIL' END,
                reason = x.reason, retry_after = NULL, processed_at = v_now
                FROM unnest(p_skip_notice, p_skip_seq, p_skip_attempts, p_skip_reason) AS x(notice, seq, attempts, reason)
                WHERE t.cluster_id = x.notice AND t.seq = x.seq AND t.attempts = x.attempts
                  AND t.job_status IN ('PENDING', 'RETRY_PENDING')
                RETURNING t.cluster_id, t.job_status, t.attempts, t.reason
        ), counted AS (
            SELECT m.cluster_id, CASE WHEN m.attempts = 0 THEN 'waiting' ELSE 'retry_pending' END AS source,
                   schoolbell_counter(m.job_status, m.attempts, m.reason) AS target, count(*)::integer AS n
            FROM moved m GROUP BY 1, 2, 3
        )
        SELECT array_agg(k.cluster_id), array_agg(k.source), array_agg(k.target), array_agg(k.n), sum(k.n)
            INTO v_notices, v_source, v_target, v_counts, v_n FROM counted k;
        IF v_n IS DISTINCT FROM cardinality(p_skip_seq) THEN
            RAISE EXCEPTION 'a recipient has moved' USING ERRCODE = 'SB003';
        END IF;
        PERFORM schoolbell_move(v_now, v_notices, v_source, v_target, v_counts);
    END IF;
END $$;
-- +goose StatementEnd

-- Takes back a claim of which nothing was handed to a sender. The term is
-- locked first, since a claim whose commit is unknown may still be running
-- under it: its row is looked for only after its fate is final. The other
-- order cannot meet this one: whoever settles this batch besides its owner
-- needs a newer fence, and that waits for this lock.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_withdraw(p_school text, p_fence bigint, p_acquisition text, p_owner text, p_batch text)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now     timestamptz;
    v_batch   push_batches%ROWTYPE;
    v_notices bigint[];
    v_source  text[];
    v_target  text[];
    v_counts  integer[];
BEGIN
    PERFORM FROM school_terms t
        WHERE t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a newer term holds the school' USING ERRCODE = 'SB001';
    END IF;
    v_now := clock_timestamp();
    UPDATE push_batches b SET settled_at = v_now, settled_by = p_owner, settled_as = 'withdrawn'
        WHERE b.id = p_batch AND b.school_id = p_school AND b.owner = p_owner AND b.settled_at IS NULL
        RETURNING b.* INTO v_batch;
    IF NOT FOUND THEN
        SELECT b.* INTO v_batch FROM push_batches b WHERE b.id = p_batch;
        IF NOT FOUND OR v_batch.settled_as = 'withdrawn' THEN
            RETURN;
        ELSIF v_batch.settled_at IS NULL THEN
            RAISE EXCEPTION 'batch is another owner''s' USING ERRCODE = 'SB007';
        END IF;
        RAISE EXCEPTION 'batch was settled otherwise' USING ERRCODE = 'SB004';
    END IF;
    UPDATE school_terms t SET
        attempted = greatest(0, t.attempted - v_batch.size),
        next_eligible_at = CASE WHEN v_batch.filled THEN NULL ELSE t.next_eligible_at END
        WHERE t.school_id = p_school AND t.cycle = v_batch.cycle;
    PERFORM FROM push_clusters c
        WHERE c.id IN (SELECT r.cluster_id FROM push_batch_ranges r WHERE r.batch_id = p_batch)
        ORDER BY c.id FOR NO KEY UPDATE;
    WITH moved AS (
        UPDATE push_cluster_tokens t SET
            job_status = CASE WHEN c.closing IS NULL THEN t.job_status WHEN t.attempts = 0 THEN 'SKIPPED' ELSE 'PERMANENT_FAIL' END,
            reason = coalesce(c.closing, t.reason),
            retry_after = CASE WHEN c.closing IS NULL THEN v_now END,
            processed_at = CASE WHEN c.closing IS NULL THEN t.processed_at ELSE v_now END
            FROM push_batch_ranges r JOIN push_clusters c ON c.id = r.cluster_id
            WHERE r.batch_id = p_batch AND t.cluster_id = r.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq
              AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL
            RETURNING t.cluster_id, t.job_status, t.attempts, t.reason
    ), counted AS (
        SELECT m.cluster_id, schoolbell_counter(m.job_status, m.attempts, m.reason) AS target, count(*)::integer AS n
        FROM moved m GROUP BY 1, 2
    )
    SELECT array_agg(k.cluster_id), array_agg('in_progress'::text), array_agg(k.target), array_agg(k.n)
        INTO v_notices, v_source, v_target, v_counts FROM counted k;
    PERFORM schoolbell_move(v_now, v_notices, v_source, v_target, v_counts);
END $$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION schoolbell_withdraw(text, bigint, text, text, text);
DROP FUNCTION schoolbell_claim(text, bigint, text, text, text, text, integer, bigint, integer, boolean, bigint, bigint,
    integer, bigint, bigint, bigint[], integer[], integer[], integer[], integer[], bigint[], integer[], integer[],
    bigint[], integer[], integer[], text[], bigint[], integer[], integer[], text[]);
DROP FUNCTION schoolbell_refuse(text, bigint, text);
DROP FUNCTION schoolbell_open_term(text, text, text);
