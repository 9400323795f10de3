-- +goose Up

-- Where the removal of an ended notice's recipients stands (R29): they go in the
-- order of seq, in steps, from a notice that says so before.
ALTER TABLE push_clusters ADD COLUMN purged_seq INTEGER NOT NULL DEFAULT 0; -- recipients up to here are removed
ALTER TABLE push_clusters ADD COLUMN emptied_at INTEGER; -- when the last of them was
CREATE INDEX push_clusters_retained ON push_clusters (ended_at, id) WHERE ended_at IS NOT NULL AND emptied_at IS NULL;

-- +goose Down
DROP INDEX push_clusters_retained;
ALTER TABLE push_clusters DROP COLUMN emptied_at;
ALTER TABLE push_clusters DROP COLUMN purged_seq;
