-- +goose Up

-- What a notice's counters should be, counted from its recipients.
CREATE VIEW push_cluster_counts AS
SELECT v.cluster_id,
    count(*) AS total,
    count(*) FILTER (WHERE v.job_status = 'PENDING') AS waiting,
    count(*) FILTER (WHERE v.job_status = 'IN_PROGRESS') AS in_progress,
    count(*) FILTER (WHERE v.job_status = 'RETRY_PENDING') AS retry_pending,
    count(*) FILTER (WHERE v.job_status = 'SUCCESS' AND v.attempts <= 1) AS success,
    count(*) FILTER (WHERE v.job_status = 'SUCCESS' AND v.attempts > 1) AS retry_success,
    count(*) FILTER (WHERE v.job_status = 'FAIL' AND v.attempts <= 1) AS fail,
    count(*) FILTER (WHERE v.job_status = 'FAIL' AND v.attempts > 1) AS retry_fail,
    count(*) FILTER (WHERE v.job_status = 'PERMANENT_FAIL') AS permanent_fail,
    count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'DISABLED') AS disabled,
    count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'CANCELLED') AS cancelled,
    count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'EXPIRED') AS expired,
    count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'DUPLICATE') AS duplicate,
    count(*) FILTER (WHERE v.job_status = 'SKIPPED' AND v.reason = 'NOT_ALLOWED') AS not_allowed,
    count(*) FILTER (WHERE v.job_status IN ('PENDING', 'RETRY_PENDING') AND v.retry_after IS NULL AND v.seq <= c.frontier) AS stranded
FROM push_cluster_token_states v JOIN push_clusters c ON c.id = v.cluster_id
GROUP BY v.cluster_id;

-- +goose Down
DROP VIEW push_cluster_counts;
