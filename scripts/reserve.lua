-- Grants attempts to the owner of a school before they are claimed and sent.
--
-- KEYS[1]   lock hash          KEYS[2]   quota hash
-- ARGV[1]   acquisition that holds the lock
-- ARGV[2]   its fence, above 0
-- ARGV[3]   batch: id made by the caller for this reservation
-- ARGV[4]   attempts wanted, above 0
-- ARGV[5]   the longest that the batch can take, in ms, above 0
-- ARGV[6]   by how many ms the lease must outlast that
-- ARGV[7]   limit              ARGV[8]   rest in ms       ARGV[9]   version of these settings
-- ARGV[10]  floor, what the ledger holds: cycle
-- ARGV[11]  attempted          ARGV[12]  1 if a rest is set for that cycle
-- ARGV[13]  what is left of that rest, in ms
--
-- Returns  {"GRANTED", now_ms, size, cycle, attempted, filled, rested_ms, limit, rest_ms, version, again}
--            rested_ms: the grant opened the cycle, so long after the last one's end; -1: it did not
--            again: 1 if this is the answer of an earlier run
--          {"RESTING", now_ms, wait_ms, cycle, attempted, limit, rest_ms, version}
--          {"NOT_OWNER", now_ms}               the lock is another's, gone, or carries another fence
--          {"LEASE_SHORT", now_ms, pttl_ms}    the lease does not outlast the batch
--          {"NEED_REBUILD", now_ms, why}       missing, behind (it is not what the ledger says) or clock (it went back)
--          {"SETTLED", now_ms}                 this batch is settled already
--
-- Atomic because ownership, the count and the rest are looked at and changed in
-- one step. A repeat is harmless: the batch id has its answer until it is
-- settled, and is known as settled after that. One that comes later still finds
-- another owner, or at worst counts attempts that nobody makes.
-- include quota.lua

local lock, quota = KEYS[1], KEYS[2]
local acq, fence, batch = ARGV[1], ARGV[2], ARGV[3]
local want, longest, margin = whole(4, 1), whole(5, 1), whole(6, 0)
local limit, rest, version = whole(7, 1), whole(8, 1), whole(9, 0)
local floor = {cycle = whole(10, 0), attempted = whole(11, 0), filled = whole(12, 0), resting = whole(13, 0)}
if not acq or acq == '' or not valid_fence(fence) or not valid_batch(batch) then
  return redis.error_reply('ERR quota: reserve: acquisition, fence or batch id is not acceptable')
end
if not (want and longest and margin and limit and rest and version
  and floor.cycle and floor.attempted and floor.filled and floor.resting) then
  return redis.error_reply('ERR quota: reserve: a number is missing or out of range')
end
floor.filled = floor.filled > 0 or floor.resting > 0

local held = redis.call('HMGET', lock, 'acq', 'fence')
if held[1] ~= acq or held[2] ~= fence then
  return {'NOT_OWNER', now}
end

local function granted(o, again)
  return {'GRANTED', now, o.size, o.cycle, o.attempted, o.filled, o.rested,
    s.limit, s.rest_ms, s.setting_version, again}
end

local function resting()
  save(quota)
  return {'RESTING', now, math.max(0, s.nextEligibleMs - now), s.cycle, s.attempted,
    s.limit, s.rest_ms, s.setting_version}
end

load(quota)
if s then
  close_overdue()
  if is_settled(batch) then
    save(quota)
    return {'SETTLED', now}
  end
  for _, o in ipairs(s.open) do
    if o.batch == batch then
      save(quota)
      return granted(o, 1)
    end
  end
end

local pttl = redis.call('PTTL', lock)
if pttl < longest + margin then
  return {'LEASE_SHORT', now, pttl}
end
if not s then
  return {'NEED_REBUILD', now, 'missing'}
end
if s.cycle < floor.cycle or (s.cycle == floor.cycle
  and (s.attempted < floor.attempted or (floor.filled and s.nextEligibleMs == 0))) then
  return {'NEED_REBUILD', now, 'behind'}
elseif jumped() then
  return {'NEED_REBUILD', now, 'clock'}
elseif unconfirmed(floor) then
  return {'NEED_REBUILD', now, 'behind'}
end

adopt(limit, rest, version)
if floor.cycle == s.cycle then
  raise_rest(floor.filled, floor.resting)
end

local rested = -1
if s.nextEligibleMs > now then
  return resting()
elseif s.nextEligibleMs > 0 then
  -- The rest was set for this cycle and has passed: the next one begins.
  local last = s.last_end_ms
  if last == 0 then last = s.nextEligibleMs - s.rest_ms end
  rested = math.max(0, now - last)
  s.cycle = s.cycle + 1
  s.attempted = 0
  s.limit, s.rest_ms = s.setting_limit, s.setting_rest_ms
  s.nextEligibleMs, s.span_ms = 0, 0
  s.floor_attempted, s.floor_next_ms = 0, 0
elseif s.attempted >= s.limit then
  -- Full without a rest: the limit was lowered, or the ledger knew of more.
  local last = math.max(s.last_end_ms, latest())
  if last == 0 then last = now end
  set_rest(last + s.rest_ms)
  if unconfirmed(floor) then confirm(floor) end
  return resting()
end

local size = math.min(want, s.limit - s.attempted)
s.attempted = s.attempted + size
local o = {batch = batch, size = size, cycle = s.cycle, deadline = now + longest, longest = longest,
  attempted = s.attempted, filled = s.attempted >= s.limit and 1 or 0, rested = rested}
table.insert(s.open, o)
if o.filled == 1 then
  -- Provisional: from the latest moment at which the call can end.
  set_rest(latest() + s.rest_ms)
end
save(quota)
redis.call('HSET', lock, 'batch', batch)
return granted(o, 0)
