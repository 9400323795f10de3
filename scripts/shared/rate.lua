-- What the cluster knows of one sender: its rate, its line and whether it is
-- stopped. Package sender/redisrate/ratetest is the same rule in Go, with the same
-- names; a differential test holds them together, and sender/redisrate/DESIGN.md
-- says why each part is there. Everything in ms; nothing is written before save().
-- include time.lua

local UNIT = 60000            -- units of a token: a rate a minute makes so many of them a ms
local HOLDS = 2000            -- of its rate, in ms, may be kept for later
local LATE = 1000             -- a place's own batch may come so late at least
local IDLE = 5000             -- without a batch for so long: out of use
local COLD = 10               -- what is out of use begins with a tenth of its rate
local LOWER = 60000           -- a lowered rate stays so long, where the receiver does not say
local LOWEST = 62             -- of 1000: how far it is lowered at most
local RECOVER = 300000        -- from nothing to the whole rate
local PROBE_FIRST = 5000      -- a stopped sender is probed after so long, and then after twice as long
local PROBE_MOST = 300000
local SLOT = 10000            -- what is used is counted in slots
local KEEP = 64               -- answers that are remembered
local LINE = 10000            -- places in the line
local REBASE = 1000000000000  -- what is minted begins anew there, since numbers are exact up to 2^53
local GAP = 3600000           -- the longest time that is minted for
local MAX = 9007199254740991

local function str(n) return string.format('%.0f', n) end

-- whole returns argument i as an integer of at least least, or nil.
local function whole(i, least)
  local a = ARGV[i]
  if not a or not string.find(a, '^%d+$') then return nil end
  local n = tonumber(a)
  if n < least or n > MAX then return nil end
  return n
end

local function valid_id(b) return b and #b >= 1 and #b <= 128 and string.find(b, '^[%w%._:%-]+$') end
local function valid_school(b) return b and #b >= 1 and #b <= 64 and string.find(b, '^[%w%._%-]+$') end
local function valid_code(b) return b and #b <= 64 and string.find(b, '^[A-Z0-9_]*$') end

local function rfc3339(ms) return utc(math.ceil(ms / 1000)) .. 'Z' end

local NUMBERS = {'clock_ms', 'minted', 'sold', 'waiting', 'warm_ms',
  'level', 'level_until_ms', 'level_hold_ms', 'lowered_ms', 'base',
  'slot', 'used_now', 'used_last',
  'epoch', 'stopped_ms', 'pause_ms', 'probe_ms', 'probe_in_ms', 'prober_until_ms', 'prober_for_ms'}
local TEXTS = {'line', 'taken', 'lowered_by', 'lowered_code', 'stopped_by', 'stopped_code', 'resumed_by', 'prober', 'probe_id'}

local s = nil      -- the state
local fresh = false -- nothing was known
local limit, most, ramp = 0, 0, 0 -- the settings: a minute (0: none), messages of a batch, ms

-- load reads the state. A field that is missing or no number is loss as much as
-- a missing key: then the sender starts with nothing, and a stop is found anew.
local function load(key)
  local v = redis.call('HMGET', key, unpack(NUMBERS))
  local w = redis.call('HMGET', key, unpack(TEXTS))
  local got = {}
  for i, name in ipairs(NUMBERS) do
    got[name] = v[i] and tonumber(v[i])
    if not got[name] then fresh = true end
  end
  for i, name in ipairs(TEXTS) do
    got[name] = w[i]
    if not w[i] then fresh = true end
  end
  if fresh then
    got = {}
    for _, name in ipairs(NUMBERS) do got[name] = 0 end
    for _, name in ipairs(TEXTS) do got[name] = '' end
    got.clock_ms, got.epoch, got.level = now, now, 1000
  end
  s = got
  -- A clock that went back must not keep anybody waiting for what it took.
  s.clock_ms = math.min(s.clock_ms, now)
  s.level_until_ms = math.min(s.level_until_ms, now + s.level_hold_ms)
  s.lowered_ms = math.min(s.lowered_ms, now)
  s.probe_ms = math.min(s.probe_ms, now + s.probe_in_ms)
  s.prober_until_ms = math.min(s.prober_until_ms, now + s.prober_for_ms)
  if s.stopped_ms > now then s.stopped_ms = now end
end

-- believe takes the caller's word for a stop that was lost: one message is enough
-- to find out.
local function believe(code)
  if not fresh or code == '' then return end
  s.stopped_ms, s.stopped_code = now, code
  s.pause_ms, s.probe_in_ms, s.probe_ms = PROBE_FIRST, 0, now
end

-- level is what part of 1000 of the rate is left at a moment.
local function level(at)
  local past = at - s.level_until_ms
  if past <= 0 then return s.level end
  return math.min(1000, s.level + math.floor(past * 1000 / RECOVER))
end

local function cold() return math.min(limit, math.max(math.floor(limit / COLD), most * 60)) end

-- rate is how many messages a minute may go out at a moment; 0: no limit.
local function rate(at)
  local r = limit
  if ramp > 0 and limit > 0 then
    r = cold() + math.floor((limit - cold()) * s.warm_ms / ramp)
  end
  local l = level(at)
  if l < 1000 then
    if limit == 0 then r = s.base end
    r = math.max(1, math.floor(r * l / 1000))
  end
  return r
end

-- wait_for is how long it takes to mint so many units, at most: a rate that grows
-- is asked for early rather than late, since a place ends.
local function wait_for(units)
  local r = rate(now)
  local l = level(now)
  local grows = 0
  if limit > 0 and ramp > 0 and s.warm_ms < ramp then grows = (limit - cold()) * l / 1000 / ramp end
  if l < 1000 and now >= s.level_until_ms then
    local whole_rate = limit > 0 and limit or s.base
    grows = grows + whole_rate / RECOVER
  end
  if grows == 0 then return math.max(1, math.ceil(units / r)) end
  return math.max(1, math.ceil((math.sqrt(r * r + 2 * grows * units) - r) / grows))
end

-- The line is text, "school,messages,end " in order of the ends: a place is the
-- stretch of what is minted that ends there. It may be long, and is searched and
-- cut rather than read.
local function place(school)
  local from = string.find(' ' .. s.line, ' ' .. school .. ',', 1, true)
  if not from then return nil end
  local _, to, n, ends = string.find(s.line, '^[^ ,]+,(%d+),(%-?%d+) ', from)
  return {from = from, to = to, n = tonumber(n), ends = tonumber(ends)}
end

local function drop(p)
  s.line = string.sub(s.line, 1, p.from - 1) .. string.sub(s.line, p.to + 1)
  s.waiting = s.waiting - 1
end

-- holds is how far back what was minted may still be taken.
local function holds(n)
  local r = rate(now)
  return math.max(r * HOLDS, n * UNIT + r * LATE)
end

local function lapsed(p) return s.minted - (p.ends - p.n * UNIT) > holds(p.n) end

-- mint makes what the time since the last look is worth, by the rate that it
-- began with, which is never too much.
local function mint()
  local gap = now - s.clock_ms
  local r = rate(s.clock_ms)
  if r > 0 then
    local busy = math.max(0, math.ceil((s.sold - s.minted) / r)) + IDLE
    s.minted = s.minted + r * math.min(gap, GAP)
    if gap <= busy then
      s.warm_ms = math.min(ramp, s.warm_ms + gap)
    else
      s.warm_ms = math.max(0, math.min(ramp, s.warm_ms) - gap)
    end
  end
  s.clock_ms = now
  if s.level < 1000 and level(now) >= 1000 then
    s.level, s.base, s.level_hold_ms = 1000, 0, 0
  end
  if rate(now) == 0 then -- nobody has to wait any more
    s.line, s.waiting, s.sold = '', 0, s.minted
  end
  while s.waiting > 0 do -- whoever was in front and did not come
    local _, to, n, ends = string.find(s.line, '^[^ ,]+,(%d+),(%-?%d+) ')
    local p = {from = 1, to = to, n = tonumber(n), ends = tonumber(ends)}
    if not lapsed(p) then break end
    drop(p)
  end
  if s.minted > REBASE then
    local line = {}
    for school, n, ends in string.gmatch(s.line, '([^ ,]+),(%d+),(%-?%d+) ') do
      table.insert(line, school .. ',' .. n .. ',' .. str(tonumber(ends) - s.minted) .. ' ')
    end
    s.line = table.concat(line)
    s.sold, s.minted = s.sold - s.minted, 0
  end
  local slot = math.floor(now / SLOT)
  if slot ~= s.slot then
    s.used_last = slot == s.slot + 1 and s.used_now or 0
    s.used_now, s.slot = 0, slot
  end
end

-- used is what went out lately, a minute.
local function used()
  return math.floor((s.used_now + s.used_last * (SLOT - now % SLOT) / SLOT) * (60000 / SLOT))
end

-- free is what nobody waits for, in units, and where it begins.
local function free()
  local from = math.max(s.sold, s.minted - rate(now) * HOLDS)
  return s.minted - from, from
end

-- save writes the state, and what people read of it.
local function save(key)
  local args = {}
  local function put(name, v)
    table.insert(args, name)
    table.insert(args, v)
  end
  for _, name in ipairs(NUMBERS) do put(name, str(s[name])) end
  for _, name in ipairs(TEXTS) do put(name, s[name]) end
  put('state', s.stopped_ms > 0 and 'stopped' or level(now) < 1000 and 'lowered' or 'running')
  put('stopped_at', s.stopped_ms > 0 and rfc3339(s.stopped_ms) or '')
  put('next_probe_at', s.stopped_ms > 0 and rfc3339(s.probe_ms) or '')
  put('lowered_until', level(now) < 1000 and rfc3339(s.level_until_ms) or '')
  put('limit_per_minute', str(limit))
  put('now_per_minute', str(rate(now)))
  put('used_per_minute', str(used()))
  put('tokens', rate(now) > 0 and str(math.max(0, math.floor((free()) / UNIT))) or '')
  redis.call('HSET', key, unpack(args))
end

-- read_settings reads them from argument i on.
local function read_settings(i)
  limit, most, ramp = whole(i, 0), whole(i + 1, 1), whole(i + 2, 0)
  return limit and most and ramp and limit <= 100000000 and most <= 1000000 and ramp <= 3600000
end
