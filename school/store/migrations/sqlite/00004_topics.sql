-- +goose Up

ALTER TABLE push_clusters ADD COLUMN topic TEXT; -- its recipients are the devices of this topic, as they were when it was accepted; NULL: they were listed

-- +goose Down
ALTER TABLE push_clusters DROP COLUMN topic;
