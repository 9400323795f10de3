-- Takes a school's lock.
--
-- KEYS[1]  lock hash
-- ARGV[1]  owner: instance id, for people and for the answer to others
-- ARGV[2]  acquisition: id made by the caller for this attempt to take the lock
-- ARGV[3]  lease in ms, above 0
-- ARGV[4]  expected time to complete in ms, kept for people and for the answer to others
-- ARGV[5]  not-after: ms since the epoch by this server's clock
--
-- Returns  {"OK", now_ms, lease_ms}                          taken
--          {"OK_AGAIN", now_ms, pttl_ms}                     this acquisition has it already; nothing changed
--          {"BUSY", now_ms, pttl_ms, owner, etc_ms}          another has it
--          {"STALE", now_ms}                                 asked too late; nothing changed
--
-- Atomic because look and take are one step: two replicas never both see a free
-- lock. A repeat is harmless: the same acquisition gets the same answer and the
-- lease is not touched. A packet that comes late, after its sender gave up and
-- released, is refused by not-after; it is the one absolute time that crosses,
-- and it is this server's own, which the caller knows from an earlier answer.
-- One key, so that it goes on working while a cluster moves the slot.
-- include time.lua

-- rfc3339 is the moment in UTC, to the millisecond.
local function rfc3339(ms)
  local sec = math.floor(ms / 1000)
  return utc(sec) .. string.format('.%03dZ', ms - sec * 1000)
end

local lock = KEYS[1]
local owner, acq = ARGV[1], ARGV[2]
local lease, etc, not_after = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if not owner or owner == '' or not acq or acq == '' then
  return redis.error_reply('ERR acquire: owner and acquisition must not be empty')
end
-- PEXPIRE with 0 or less would delete the key and answer success.
if not lease or lease < 1 or not etc or not not_after then
  return redis.error_reply('ERR acquire: lease must be above 0, etc and not-after must be numbers')
end

if now > not_after then
  return {'STALE', now}
end

local held = redis.call('HMGET', lock, 'acq', 'owner', 'etc_ms', 'lease_ms')
if held[1] == acq then
  return {'OK_AGAIN', now, redis.call('PTTL', lock)}
end
if redis.call('EXISTS', lock) == 1 then
  local pttl = redis.call('PTTL', lock)
  if pttl < 0 then
    -- No script makes a lock without an end. Somebody's hand did, and without
    -- this nobody could ever take the school again.
    redis.call('PEXPIRE', lock, lease)
    pttl = lease
  end
  local most = tonumber(held[4])
  if most and pttl > most then
    -- More than its lease is left: this server's clock went back since. A dead
    -- owner would keep the school for as long as the step was; from now on, the
    -- lease it asked for is as much as an owner that lives can believe in.
    redis.call('PEXPIRE', lock, most)
    pttl = most
  end
  return {'BUSY', now, pttl, held[2] or '', tonumber(held[3]) or 0}
end

redis.call('HSET', lock, 'owner', owner, 'acq', acq, 'fence', '0',
  'acquired_at', rfc3339(now), 'expires_at', rfc3339(now + lease),
  'etc_ms', ARGV[4], 'lease_ms', ARGV[3], 'renewals', '0', 'batch', '')
redis.call('PEXPIRE', lock, lease)
return {'OK', now, lease}
