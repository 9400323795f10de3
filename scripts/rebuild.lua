-- Reconciles a school's quota whose rest lies further ahead than it can,
-- because the clock went back: the rest becomes what the ledger has left of it,
-- also where that is less.
--
-- KEYS[1]   lock hash          KEYS[2]   quota hash
-- ARGV[1]   acquisition that holds the lock
-- ARGV[2]   its fence, above 0
-- ARGV[3]   the ledger: cycle
-- ARGV[4]   attempts claimed in it
-- ARGV[5]   1 if a rest is set for it, passed or not
-- ARGV[6]   what is left of that rest, in ms
-- ARGV[7]   limit in force     ARGV[8]   rest in force, ms   ARGV[9]   version; 0 0 0: never written
-- ARGV[10]  the settings: limit   ARGV[11]  rest in ms       ARGV[12]  version
--
-- Returns  {"RESET", now_ms}               the rest was set anew
--          {"KEPT", "CREATED" or "RAISED", now_ms}  the clock is fine: as reconcile
--          {"NOT_OWNER", now_ms}           the lock is another's, gone, or carries another fence
--
-- Atomic because ownership and the rest are looked at and changed in one step.
-- This is the only script that makes a rest shorter than the ledger once said,
-- so it asks for lock and fence: a former owner must not do it. A repeat is
-- harmless: after the first run the rest is no longer too far ahead.
-- include quota.lua

local lock, quota = KEYS[1], KEYS[2]
local acq, fence = ARGV[1], ARGV[2]
local l, r = read_ledger(3)
if not acq or acq == '' or not valid_fence(fence) or not l then
  return redis.error_reply('ERR quota: rebuild: an argument is missing or out of range')
end
local held = redis.call('HMGET', lock, 'acq', 'fence')
if held[1] ~= acq or held[2] ~= fence then
  return {'NOT_OWNER', now}
end

load(quota)
if not s or s.cycle < l.cycle or not jumped() then
  local how = merge(l, r)
  save(quota)
  return {how, now}
end
close_overdue()
if s.cycle == l.cycle and l.filled then
  s.nextEligibleMs, s.floor_next_ms = 0, 0
else
  -- Every rest set in the past ends within its span from now.
  s.nextEligibleMs = math.min(s.nextEligibleMs, now + s.span_ms)
  s.floor_next_ms = math.min(s.floor_next_ms, s.nextEligibleMs)
end
merge(l, r)
save(quota)
return {'RESET', now}
