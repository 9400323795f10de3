-- Says what became of a reservation.
--
-- KEYS[1]  quota hash
-- ARGV[1]  batch id of the reservation
-- ARGV[2]  cycle that it was granted in
-- ARGV[3]  messages handed to the sending call, whatever became of them
--
-- Returns  {"OK", now_ms}       settled; the rest is given back
--          {"LATE", now_ms}     settled; its cycle is over, so the count stays
--          {"DUP", now_ms}      settled before, or closed after its deadline
--          {"UNKNOWN", now_ms}  there is no such reservation, or no quota
--
-- Atomic because refund, rest and the note that the batch is settled are one
-- step. A repeat is harmless: it finds that note. It does not ask for the lock:
-- an owner that lost it must still say what it did.
-- include quota.lua

local quota = KEYS[1]
local batch, cycle, attempted = ARGV[1], whole(2, 0), whole(3, 0)
if not valid_batch(batch) or not cycle or not attempted then
  return redis.error_reply('ERR quota: settle: batch id, cycle or attempted is not acceptable')
end

load(quota)
if not s then
  return {'UNKNOWN', now}
end
close_overdue()

if is_settled(batch) then
  save(quota)
  return {'DUP', now}
end
local at = nil
for i, o in ipairs(s.open) do
  if o.batch == batch and o.cycle == cycle then at = i end
end
if not at then
  save(quota)
  return {'UNKNOWN', now}
end
local o = s.open[at]
if attempted > o.size then
  return redis.error_reply('ERR quota: settle: attempted more than was granted')
end
table.remove(s.open, at)
bury(batch, attempted)
if o.cycle ~= s.cycle then
  save(quota)
  return {'LATE', now}
end

if attempted > 0 then
  s.last_end_ms = math.max(s.last_end_ms, now)
end
local left = math.max(s.attempted - (o.size - attempted), math.min(s.attempted, s.floor_attempted))
local gave_back = left < s.attempted
s.attempted = left
if gave_back and s.attempted < s.limit and s.floor_next_ms == 0 then
  -- Not full after all. Only giving something back may take a rest away.
  s.nextEligibleMs, s.span_ms = 0, 0
  apply()
else
  exact()
end
save(quota)
return {'OK', now}
