-- +goose Up

-- What operators are told. An alert waits here until a webhook has taken it, so
-- that a webhook that is down, or a replica that dies, delays it and loses none.
CREATE TABLE alerts (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind        text        NOT NULL,
    body        jsonb       NOT NULL,
    since       timestamptz NOT NULL,
    seen        bigint      NOT NULL,
    job_status  text        NOT NULL DEFAULT 'PENDING',
    attempts    integer     NOT NULL DEFAULT 0,
    retry_after timestamptz,
    error_code  text,
    created_at  timestamptz NOT NULL,
    sent_at     timestamptz
);
COMMENT ON COLUMN alerts.since IS 'when what it tells of began';
COMMENT ON COLUMN alerts.seen IS 'how often it was seen since the alert before it';
COMMENT ON COLUMN alerts.job_status IS 'PENDING, SENT, FAILED';
COMMENT ON COLUMN alerts.retry_after IS 'from when it may be claimed; NULL: SENT or FAILED';
CREATE INDEX alerts_due ON alerts (retry_after) WHERE retry_after IS NOT NULL;

-- What holds now, so that several replicas that see the same tell it once.
CREATE TABLE alert_states (
    key     text COLLATE "C" PRIMARY KEY,
    active  boolean     NOT NULL,
    since   timestamptz NOT NULL,
    told_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    seen    bigint      NOT NULL
);
COMMENT ON COLUMN alert_states.seen IS 'since it was told';

-- Notes that something was seen p_n times, and makes an alert of it where it is
-- new, was not seen for p_lapse_us, or was told p_every_us ago. p_remind: only
-- where it holds already. The answer is whether an alert was made.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_raise_alert(p_key text, p_kind text, p_body jsonb, p_n bigint, p_every_us bigint, p_lapse_us bigint, p_remind boolean)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_now   timestamptz;
    v_state alert_states%ROWTYPE;
    v_tell  boolean;
BEGIN
    IF NOT p_remind THEN
        INSERT INTO alert_states VALUES (p_key, false, clock_timestamp(), clock_timestamp(), clock_timestamp(), 0) ON CONFLICT DO NOTHING;
    END IF;
    SELECT s.* INTO v_state FROM alert_states s WHERE s.key = p_key FOR NO KEY UPDATE;
    IF NOT FOUND OR (p_remind AND NOT v_state.active) THEN
        RETURN false;
    END IF;
    v_now := clock_timestamp();
    v_tell := false;
    IF NOT v_state.active OR v_state.seen_at < v_now - p_lapse_us * interval '1 microsecond' THEN
        v_tell := true;
        v_state.since := v_now;
        v_state.seen := 0;
    END IF;
    v_state.seen := v_state.seen + p_n;
    IF v_tell OR v_state.told_at <= v_now - p_every_us * interval '1 microsecond' THEN
        INSERT INTO alerts (kind, body, since, seen, retry_after, created_at) VALUES (p_kind, p_body, v_state.since, v_state.seen, v_now, v_now);
        v_tell := true;
        v_state.told_at := v_now;
        v_state.seen := 0;
    END IF;
    UPDATE alert_states s SET active = true, since = v_state.since, told_at = v_state.told_at, seen_at = v_now, seen = v_state.seen
        WHERE s.key = p_key;
    RETURN v_tell;
END $$;
-- +goose StatementEnd

-- Moves the position of the digest from p_from to p_until, both in microseconds
-- since 1970, with the alert that tells of what is between: whoever comes second
-- finds it moved and tells nothing. p_body NULL: there is nothing to tell. What was
-- told long ago is removed.
-- +goose StatementBegin
CREATE FUNCTION schoolbell_tell_digest(p_from bigint, p_until bigint, p_kind text, p_body jsonb, p_n bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    UPDATE job_positions p SET position = p_until, moved_at = v_now WHERE p.job = 'digest' AND p.position = p_from;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF p_body IS NOT NULL THEN
        INSERT INTO alerts (kind, body, since, seen, retry_after, created_at)
            VALUES (p_kind, p_body, to_timestamp(p_from / 1000000.0), p_n, v_now, v_now);
    END IF;
    DELETE FROM alerts a WHERE a.retry_after IS NULL AND a.created_at < v_now - interval '7 days';
    RETURN p_body IS NOT NULL;
END $$;
-- +goose StatementEnd

-- +goose Down
DELETE FROM job_positions WHERE job = 'digest';
DROP FUNCTION schoolbell_tell_digest(bigint, bigint, text, jsonb, bigint);
DROP FUNCTION schoolbell_raise_alert(text, text, jsonb, bigint, bigint, bigint, boolean);
DROP TABLE alert_states;
DROP TABLE alerts;
