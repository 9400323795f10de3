-- +goose Up

-- Makes a school or changes the fields that are not NULL. Its version grows
-- where something did change.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_put_school(p_school text, p_name text, p_sender text, p_limit integer, p_rest bigint, OUT created boolean)
LANGUAGE plpgsql AS $$
BEGIN
    created := NOT EXISTS (SELECT FROM schools s WHERE s.id = p_school);
    PERFORM schoolbell_touch_school(p_school);
    UPDATE schools s SET
        name = coalesce(p_name, s.name), sender = coalesce(p_sender, s.sender),
        "limit" = coalesce(p_limit, s."limit"), rest = coalesce(p_rest, s.rest),
        settings_version = s.settings_version + CASE WHEN created THEN 0 ELSE 1 END
        WHERE s.id = p_school
          AND (coalesce(p_name, s.name), coalesce(p_sender, s.sender), coalesce(p_limit, s."limit"), coalesce(p_rest, s.rest))
              IS DISTINCT FROM (s.name, s.sender, s."limit", s.rest);
END $$;
-- +goose StatementEnd

-- Removes a school that has nothing under way, with its devices. The ledger row
-- stays, with the version from which a school of this id goes on.
-- An Accept under way holds the school: its notice is seen here, or it finds no
-- school and makes one.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_delete_school(p_school text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_version bigint;
BEGIN
    SELECT s.settings_version INTO v_version FROM schools s WHERE s.id = p_school FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no such school' USING ERRCODE = 'SB005';
    END IF;
    IF EXISTS (SELECT FROM push_clusters c WHERE c.school_id = p_school AND c.ended_at IS NULL)
        OR EXISTS (SELECT FROM push_batches b WHERE b.school_id = p_school AND b.settled_at IS NULL) THEN
        RAISE EXCEPTION 'school has recipients that wait or are under way' USING ERRCODE = 'SB007';
    END IF;
    UPDATE school_terms t SET settings_version = greatest(t.settings_version, v_version), paused = false WHERE t.school_id = p_school;
    DELETE FROM devices d WHERE d.school_id = p_school;
    DELETE FROM schools s WHERE s.id = p_school;
END $$;
-- +goose StatementEnd

-- Puts a notice right whose counters do not agree with its recipients, or that
-- has recipients which nothing would ever touch again: at or below the
-- frontier, without an open batch, without a time to be tried again. The
-- notice's lock keeps everything else away from its recipients meanwhile.
-- Answers how many were stranded.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_repair(p_notice bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_now      timestamptz;
    v_notice   push_clusters%ROWTYPE;
    v_stranded integer;
BEGIN
    SELECT c.* INTO v_notice FROM push_clusters c WHERE c.id = p_notice AND c.purged_at IS NULL FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    v_now := clock_timestamp();
    UPDATE push_cluster_tokens t SET
        job_status = CASE WHEN v_notice.closing IS NULL THEN t.job_status WHEN t.attempts = 0 THEN 'SKIPPED' ELSE 'PERMANENT_FAIL' END,
        reason = coalesce(v_notice.closing, t.reason),
        retry_after = CASE WHEN v_notice.closing IS NULL THEN v_now END
        WHERE t.cluster_id = p_notice AND t.seq <= v_notice.frontier
          AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL
          AND NOT EXISTS (
            SELECT FROM push_batches b JOIN push_batch_ranges r ON r.batch_id = b.id
            WHERE b.school_id = t.school_id AND b.settled_at IS NULL
              AND r.cluster_id = t.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq);
    GET DIAGNOSTICS v_stranded = ROW_COUNT;
    UPDATE push_clusters c SET
        total_count = k.total, in_progress_count = k.in_progress, retry_pending_count = k.retry_pending,
        success_count = k.success, fail_count = k.fail, retry_success_count = k.retry_success, retry_fail_count = k.retry_fail,
        permanent_fail_count = k.permanent_fail,
        skipped_disabled_count = k.disabled, skipped_cancelled_count = k.cancelled, skipped_expired_count = k.expired,
        skipped_duplicate_count = k.duplicate, skipped_not_allowed_count = k.not_allowed,
        ended_at = CASE WHEN k.waiting + k.in_progress + k.retry_pending = 0 THEN c.ended_at END,
        job_status = CASE WHEN c.ended_at IS NOT NULL AND k.waiting + k.in_progress + k.retry_pending > 0 THEN 'IN_PROGRESS' ELSE c.job_status END
        FROM push_cluster_counts k WHERE c.id = p_notice AND k.cluster_id = p_notice;
    PERFORM schoolbell_move(v_now, ARRAY[p_notice], ARRAY['waiting'], ARRAY['waiting'], ARRAY[0]);
    RETURN v_stranded;
END $$;
-- +goose StatementEnd

-- What a notice's counters should be, counted from its recipients.
CREATE VIEW push_cluster_counts AS
SELECT v.cluster_id,
    count(*)::integer AS total,
    (count(*) FILTER (WHERE v.job_status = 'PENDING'))::integer AS waiting,
    (count(*) FILTER (WHERE v.job_status = 'IN_PROGRESS'))::integer AS in_progress,
    (count(*) FILTER (WHERE v.job_status = 'RETRY_PENDING'))::integer AS retry_pending,
    (count(*) FILTER (WHERE v.job_status = 'SUCCESS' AND v.attempts <= 1))::integer AS success,
    (count(*) FILTER (WHERE v.job_status = 'SUCCESS' AND v.attempts > 1))::integer AS retry_success,
    (count(*) FILTER (WHERE v.job_status = 'FAIL' AND v.attempts <= 1))::integer AS fail,
    (count(*) FILTER (WHERE v.job_status = 'FAIL' AND v.attempts > 1))::integer AS retry_fail,
    (count(*) FILTER (WHERE v.job_status = 'PERMANENT_FAIL'))::integer AS permanent_fail,
    (count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'DISABLED'))::integer AS disabled,
    (count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'CANCELLED'))::integer AS cancelled,
    (count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'EXPIRED'))::integer AS expired,
    (count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'DUPLICATE'))::integer AS duplicate,
    (count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'NOT_ALLOWED'))::integer AS not_allowed,
    (count(*) FILTER (WHERE v.job_status IN ('PENDING', 'RETRY_PENDING') AND v.retry_after IS NULL AND v.seq <= c.frontier))::integer AS stranded
FROM push_cluster_token_states v JOIN push_clusters c ON c.id = v.cluster_id
GROUP BY v.cluster_id;

-- +goose Down
DROP VIEW push_cluster_counts;
DROP FUNCTION schoolbell_repair(bigint);
DROP FUNCTION schoolbell_delete_school(text);
DROP FUNCTION schoolbell_put_school(text, text, text, integer, bigint);
