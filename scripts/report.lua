-- Says what a batch found out about a sender's receiver.
--
-- KEYS[1]  rate hash of the sender
-- ARGV[1]  id with which the batch took its rate
-- ARGV[2]  epoch of its grant
-- ARGV[3]  what was heard: refused, throttled, answered, silent or nothing
-- ARGV[4]  the receiver's code, or empty
-- ARGV[5]  ms that it asked to wait, 0 for none
-- ARGV[6]  ms since the grant
-- ARGV[7]  settings: messages a minute   ARGV[8]  most messages of a batch   ARGV[9]  ms of the ramp
--
-- Returns  {"OK", now_ms, change, ms, lowered, now_per_minute}
--            change: same, stopped (ms: until the probe), resumed (ms: it was stopped for), probing (the same, until the next probe)
--            lowered: 1 if this report lowered the rate
--
-- Atomic because what follows depends on what was known. A repeat is harmless: the
-- id of the report that stopped, resumed or lowered is kept with it and has the
-- same answer; a probe that is over is not over twice.
-- include rate.lua

local key = KEYS[1]
local id, epoch, heard, code = ARGV[1], whole(2, 0), ARGV[3], ARGV[4]
local wish, age = whole(5, 0), whole(6, 0)
if not (valid_id(id) and valid_code(code)) then
  return redis.error_reply('ERR rate: report: id or code is not acceptable')
end
if not (epoch and wish and age and read_settings(7)) then
  return redis.error_reply('ERR rate: report: a number is missing or out of range')
end

load(key)
mint()
local change, ms, lowered = 'same', 0, 0

local function stop_for(pause)
  s.pause_ms = pause
  s.probe_in_ms = math.max(pause, wish)
  s.probe_ms = now + s.probe_in_ms
end

local probe = s.stopped_ms > 0 and s.probe_id == id
if probe then
  s.prober, s.probe_id, s.prober_until_ms = '', '', 0
end
if heard == 'refused' then
  if s.stopped_ms > 0 and s.stopped_by == id then
    change, ms = 'stopped', math.max(0, s.probe_ms - now)
  elseif s.stopped_ms == 0 and (epoch == s.epoch or fresh) then
    stop_for(PROBE_FIRST)
    s.stopped_ms, s.stopped_by, s.stopped_code = now, id, code
    s.epoch = s.epoch + 1
    s.prober, s.probe_id, s.prober_until_ms = '', '', 0
    change, ms = 'stopped', s.probe_in_ms
  elseif probe then
    stop_for(math.min(s.pause_ms * 2, PROBE_MOST))
    s.stopped_code = code
    change, ms = 'probing', s.probe_in_ms
  end
elseif heard == 'silent' then
  if probe then -- nobody answered it: the receiver is away on top
    stop_for(math.min(s.pause_ms * 2, PROBE_MOST))
    change, ms = 'probing', s.probe_in_ms
  end
elseif heard == 'answered' or heard == 'throttled' then
  if probe then
    change, ms = 'resumed', now - s.stopped_ms
    s.resumed_by = id
    s.stopped_ms, s.stopped_by, s.stopped_code = 0, '', ''
    s.pause_ms, s.probe_in_ms, s.probe_ms = 0, 0, 0
  elseif s.stopped_ms == 0 and s.resumed_by == id then
    change = 'resumed'
  end
elseif heard ~= 'nothing' then
  return redis.error_reply('ERR rate: report: what was heard is not known')
end

if heard == 'throttled' then
  local hold = wish > 0 and wish or LOWER
  if s.lowered_by == id then
    lowered = 1
  elseif level(now) < 1000 and now - age <= s.lowered_ms then
    -- It went out before the rate was lowered, and may only ask for longer.
    if now + hold > s.level_until_ms and now < s.level_until_ms then
      s.level_until_ms, s.level_hold_ms = now + hold, hold
    end
  else
    if limit == 0 and level(now) == 1000 then
      s.base = math.max(used(), most * 60)
    end
    local before = level(now)
    s.level = math.max(LOWEST, math.floor(before / 2))
    s.level_until_ms, s.level_hold_ms = now + hold, hold
    s.lowered_ms = now
    if s.level < before then -- else it is as low as it gets
      s.lowered_by, s.lowered_code = id, code
      lowered = 1
    end
  end
end
save(key)
return {'OK', now, change, ms, lowered, rate(now)}
