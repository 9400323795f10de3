-- Extends the lease of a lock that this acquisition holds.
--
-- KEYS[1]  lock hash
-- ARGV[1]  acquisition
-- ARGV[2]  lease in ms from now, above 0
-- ARGV[3]  renewal: 1, 2, 3 … by the caller's count, for people
--
-- Returns  {"OK", now_ms, pttl_ms}    at least the lease is left
--          {"LOST", now_ms, owner}    it is another's (owner) or gone (owner empty); nothing changed
--
-- Atomic because owner check and PEXPIRE are one step. It never creates: a lock
-- that is gone may have been another's in between. It never shortens: a late
-- repeat with an older, smaller lease leaves the longer one; only what is beyond
-- every lease that was asked for goes, since then this server's clock went back.
-- A repeat while the lock is held lengthens its TTL (and expires_at, which is the
-- TTL in words) and nothing else, since renewals and lease_ms keep the greatest;
-- after a release or for another's lock it finds nothing to do.
-- include time.lua

-- rfc3339 is the moment in UTC, to the millisecond.
local function rfc3339(ms)
  local sec = math.floor(ms / 1000)
  return utc(sec) .. string.format('.%03dZ', ms - sec * 1000)
end

local lock, acq = KEYS[1], ARGV[1]
local lease, renewal = tonumber(ARGV[2]), tonumber(ARGV[3])
-- PEXPIRE with 0 or less would delete the key and answer success.
if not acq or acq == '' or not lease or lease < 1 or not renewal then
  return redis.error_reply('ERR extend: acquisition must not be empty, lease must be above 0, renewal a number')
end

local held = redis.call('HMGET', lock, 'acq', 'owner', 'renewals', 'lease_ms')
if held[1] ~= acq then
  return {'LOST', now, held[2] or ''}
end
if renewal > (tonumber(held[3]) or 0) then
  redis.call('HSET', lock, 'renewals', ARGV[3])
end
local pttl = redis.call('PTTL', lock)
local most = tonumber(held[4])
if most and lease > most then
  redis.call('HSET', lock, 'lease_ms', ARGV[2])
end
local set = nil
if pttl < lease then
  set = lease
elseif most and pttl > math.max(lease, most) then
  set = math.max(lease, most)
end
if set then
  redis.call('PEXPIRE', lock, set)
  redis.call('HSET', lock, 'expires_at', rfc3339(now + set))
  pttl = set
end
return {'OK', now, pttl}
