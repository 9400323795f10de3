-- Looks at a sender's rate, line and state.
--
-- KEYS[1]  rate hash of the sender
-- ARGV[1]  school whose place is looked for, or empty
-- ARGV[2]  the code with which the caller believes the sender to be stopped, or empty
-- ARGV[3]  settings: messages a minute   ARGV[4]  most messages of a batch   ARGV[5]  ms of the ramp
--
-- Returns  {"STATE", now_ms, now_per_minute, used_per_minute, waiting, place_ms, stopped_ms, code, probe_in_ms, probe, lowered_ms, lowered_code, epoch}
--          place_ms: until the school's place comes, 0 if it has, -1 if it has none
--          stopped_ms: for how long it has been, -1 if it is not
--          probe: 1 if a probe is on its way
--          lowered_ms: until a lowered rate begins to grow, 0 while it grows, -1 if it is not lowered
--
-- Atomic because all of it is of one moment. It writes only where nothing is known,
-- so that the rate begins to fill with the first look and not with the first
-- message; a repeat is no matter.
-- include rate.lua

local key, school, believed = KEYS[1], ARGV[1], ARGV[2]
if (school ~= '' and not valid_school(school)) or not valid_code(believed) then
  return redis.error_reply('ERR rate: look: school or code is not acceptable')
end
if not read_settings(3) then
  return redis.error_reply('ERR rate: look: a number is missing or out of range')
end
load(key)
believe(believed)
mint()
if fresh then save(key) end
local at = -1
local p = school ~= '' and place(school)
if p and not lapsed(p) then
  at = s.minted >= p.ends and 0 or wait_for(p.ends - s.minted)
end
local stopped = s.stopped_ms > 0
return {'STATE', now, rate(now), used(), s.waiting, at,
  stopped and now - s.stopped_ms or -1, s.stopped_code, math.max(0, s.probe_ms - now), s.prober_until_ms > now and 1 or 0,
  level(now) < 1000 and math.max(0, s.level_until_ms - now) or -1, s.lowered_code, s.epoch}
