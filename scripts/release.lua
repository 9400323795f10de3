-- Gives a lock back.
--
-- KEYS[1]  lock hash
-- ARGV[1]  acquisition
--
-- Returns  {"OK", now_ms}               it was this acquisition's and is free now
--          {"NOT_HELD", now_ms, owner}  it is another's (owner) or gone (owner empty); nothing changed
--
-- Atomic because owner check and DEL are one step: a slow former owner never
-- frees another's lock. A repeat finds nothing and answers NOT_HELD, which a
-- caller whose first try had no answer takes for done.
-- include time.lua

local lock, acq = KEYS[1], ARGV[1]
if not acq or acq == '' then
  return redis.error_reply('ERR release: acquisition must not be empty')
end
local held = redis.call('HMGET', lock, 'acq', 'owner')
if held[1] ~= acq then
  return {'NOT_HELD', now, held[2] or ''}
end
redis.call('DEL', lock)
return {'OK', now}
