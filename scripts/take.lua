-- Takes a whole batch of one sender's rate, or a place in the line for it.
--
-- KEYS[1]  rate hash of the sender
-- ARGV[1]  id made by the caller for this batch
-- ARGV[2]  school
-- ARGV[3]  messages wanted, above 0
-- ARGV[4]  for how many ms a probe keeps others from probing
-- ARGV[5]  the code with which the caller believes the sender to be stopped, or empty
-- ARGV[6]  settings: messages a minute, 0 for none   ARGV[7]  most messages of a batch
-- ARGV[8]  ms that a sender out of use takes to come to its whole rate, 0 for none
--
-- Returns  {"GRANTED", now_ms, size, probe, epoch}
--            size: at most what was wanted; less where the place is for less
--            probe: 1 if the sender is stopped and this one message finds out whether it still is
--          {"WAIT", now_ms, wait_ms, joined}
--            the school has a place in the line, and is to come again; joined: 1 since now
--          {"STOPPED", now_ms, wait_ms, code, since_ms}
--
-- Atomic because what is there, the line and the stop are looked at and changed in
-- one step. A repeat is harmless: the id has its answer for the next batches, and
-- a place is the school's. One that comes after that takes once more, which wastes
-- what it took and grants nothing twice.
-- include rate.lua

local key = KEYS[1]
local id, school, want, longest, believed = ARGV[1], ARGV[2], whole(3, 1), whole(4, 1), ARGV[5]
if not (valid_id(id) and valid_school(school) and valid_code(believed)) then
  return redis.error_reply('ERR rate: take: id, school or code is not acceptable')
end
if not (want and longest and read_settings(6) and want <= most) then
  return redis.error_reply('ERR rate: take: a number is missing or out of range')
end

load(key)
believe(believed)
mint()

local known = string.find(' ' .. s.taken, ' ' .. id .. ',', 1, true)
if known then
  local n, probe = string.match(s.taken, '^[^ ,]+,(%d+),(%d) ', known)
  -- Not where the sender has been stopped since: nothing of it has gone out yet.
  if s.stopped_ms == 0 or s.probe_id == id then
    save(key)
    return {'GRANTED', now, tonumber(n), tonumber(probe), s.epoch}
  end
end

local function granted(size, probe)
  s.taken = s.taken .. id .. ',' .. str(size) .. ',' .. str(probe) .. ' '
  local _, kept = string.gsub(s.taken, ' ', ' ')
  if kept > KEEP then
    s.taken = string.sub(s.taken, string.find(s.taken, ' ', 1, true) + 1)
  end
  s.used_now = s.used_now + size
  save(key)
  return {'GRANTED', now, size, probe, s.epoch}
end

if s.stopped_ms > 0 then
  local wait = s.probe_ms - now
  if wait <= 0 and s.prober_until_ms > now and s.prober ~= school then
    wait = math.min(s.prober_until_ms - now, PROBE_FIRST)
  end
  if wait > 0 then
    save(key)
    return {'STOPPED', now, wait, s.stopped_code, now - s.stopped_ms}
  end
  s.prober, s.probe_id = school, id
  s.prober_for_ms, s.prober_until_ms = longest, now + longest
  if rate(now) > 0 then
    local _, from = free()
    s.sold = from + UNIT
  end
  return granted(1, 1)
end

if rate(now) == 0 then return granted(want, 0) end

local p = place(school)
if p and s.minted < p.ends then
  local wait = wait_for(p.ends - s.minted)
  save(key)
  return {'WAIT', now, wait, 0}
end
if p then
  drop(p)
  if not lapsed(p) then
    local size = math.min(want, p.n)
    local left, from = free()
    if want > size and left >= UNIT then
      local more = math.min(want - size, math.floor(left / UNIT))
      s.sold = from + more * UNIT
      size = size + more
    end
    return granted(size, 0)
  end
end

local _, from = free()
local ends = from + want * UNIT
if ends > s.minted and s.waiting >= LINE then
  local wait = wait_for(ends - s.minted)
  save(key)
  return {'WAIT', now, wait, 0}
end
s.sold = ends
if ends <= s.minted then return granted(want, 0) end
s.line = s.line .. school .. ',' .. str(want) .. ',' .. str(ends) .. ' '
s.waiting = s.waiting + 1
local wait = wait_for(ends - s.minted)
save(key)
return {'WAIT', now, wait, 1}
