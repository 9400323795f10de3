-- +goose Up

-- How far a job that looks at a part at a time has got, so that the next run goes
-- on from there.
CREATE TABLE job_positions (
    job      TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    moved_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE job_positions;
