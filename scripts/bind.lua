-- Writes the fencing number that PostgreSQL gave to this acquisition on the lock.
--
-- KEYS[1]  lock hash
-- ARGV[1]  acquisition
-- ARGV[2]  fence, above 0
--
-- Returns  {"OK", now_ms, fence}      the lock is this acquisition's and carries this fence or a greater one
--          {"LOST", now_ms, owner}    it is another's (owner) or gone (owner empty); nothing changed
--
-- Atomic because the check of the owner and the write are one step: a lock that
-- changed hands never gets the old owner's number. A repeat writes the same
-- number, an older one changes nothing. Only this acquisition's own lock is
-- touched, and never its TTL.
-- include time.lua

local lock, acq, fence = KEYS[1], ARGV[1], tonumber(ARGV[2])
if not acq or acq == '' or not fence or fence < 1 then
  return redis.error_reply('ERR bind: acquisition must not be empty, fence must be above 0')
end

local held = redis.call('HMGET', lock, 'acq', 'owner', 'fence')
if held[1] ~= acq then
  return {'LOST', now, held[2] or ''}
end
local bound = tonumber(held[3]) or 0
if fence > bound then
  redis.call('HSET', lock, 'fence', ARGV[2])
  bound = fence
end
return {'OK', now, bound}
