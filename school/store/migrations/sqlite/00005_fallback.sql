-- +goose Up

ALTER TABLE push_clusters ADD COLUMN fallback_sms TEXT; -- text for a recipient that definitely failed; NULL: none follows

-- A fallback (PENDING, SENT, FAILED) has retry_after while it waits or is being
-- posted: whoever claims it sets the time from which another may, so that a claim
-- of a dead owner ends by itself. One that has ended has none.
CREATE INDEX push_fallbacks_due ON push_fallbacks (retry_after) WHERE retry_after IS NOT NULL;

-- +goose Down
DROP INDEX push_fallbacks_due;
ALTER TABLE push_clusters DROP COLUMN fallback_sms;
