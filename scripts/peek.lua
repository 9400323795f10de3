-- Looks at a school's lock and quota without touching them.
--
-- KEYS[1]  lock hash    KEYS[2]  quota hash
--
-- Returns  {"KNOWN" or "UNKNOWN", now_ms, attempted, limit, cycle, wait_ms, pttl_ms, owner, fence, orphaned}
--          UNKNOWN: there is no quota, and its numbers are 0
--          pttl_ms: what is left of the lease; 0 if nobody holds the lock, or if more
--          is left than its lease: the clock went back, and acquire puts it right
--          owner and fence are text, empty and "0" if nobody holds it
--          orphaned: 1 if a reservation is open whose deadline has passed
--
-- Atomic because lock and quota are of one moment. It writes nothing, so that
-- it may run on a replica and a repeat is no matter.
-- include time.lua

local held = redis.call('HMGET', KEYS[1], 'owner', 'fence', 'lease_ms')
local pttl = math.max(0, redis.call('PTTL', KEYS[1]))
if pttl > (tonumber(held[3]) or pttl) then pttl = 0 end
local q = redis.call('HMGET', KEYS[2], 'inc', 'attempted', 'limit', 'cycle', 'nextEligibleMs', 'open')
local answer = {'UNKNOWN', now, 0, 0, 0, 0, pttl, held[1] or '', held[2] or '0', 0}
if q[1] and tonumber(q[2]) and tonumber(q[3]) and tonumber(q[4]) and tonumber(q[5]) then
  answer[1] = 'KNOWN'
  answer[3], answer[4], answer[5] = tonumber(q[2]), tonumber(q[3]), tonumber(q[4])
  answer[6] = math.max(0, tonumber(q[5]) - now)
  for deadline in string.gmatch(q[6] or '', '[^ ,]+,%d+,%d+,(%d+),') do
    if tonumber(deadline) <= now then answer[10] = 1 end
  end
end
return answer
