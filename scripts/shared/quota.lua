-- The quota of one school: how it is stored and the parts of the rule that the
-- scripts share. Package school/quota is the same rule in Go, names included,
-- and says why each part is there; a differential test holds them together.
-- Integers only; everything in ms. Nothing is written before save().
-- include time.lua

local KEEP_SETTLED = 128
local SKEW = 1000
local MAX = 9007199254740991

-- A plain tostring turns big numbers into 1e+14.
local function str(n) return string.format('%.0f', n) end

-- whole returns argument i as an integer of at least least, or nil.
local function whole(i, least)
  local a = ARGV[i]
  if not a or not string.find(a, '^%d+$') then return nil end
  local n = tonumber(a)
  if n < least or n > MAX then return nil end
  return n
end

local function valid_batch(b)
  return b and #b >= 1 and #b <= 128 and string.find(b, '^[%w%._:%-]+$')
end

-- A fence is compared as text: it may be greater than a Lua number is exact.
local function valid_fence(f)
  return f and #f <= 19 and string.find(f, '^[1-9]%d*$')
end

-- rfc3339 is the moment in UTC, rounded up to whole seconds, so that nobody who
-- goes by it comes too early.
local function rfc3339(ms) return utc(math.ceil(ms / 1000)) .. 'Z' end

local NUMBERS = {'inc', 'cycle', 'attempted', 'limit', 'rest_ms',
  'setting_version', 'setting_limit', 'setting_rest_ms',
  'nextEligibleMs', 'span_ms', 'last_end_ms', 'floor_attempted', 'floor_next_ms'}

local s = nil -- the state; nil: nothing is known

-- load reads the state. A field that is missing or no number is loss as much as
-- a missing key.
local function load(key)
  local v = redis.call('HMGET', key, 'open', 'settled', unpack(NUMBERS))
  if not v[1] or not v[2] then return end
  local got = {}
  for i, name in ipairs(NUMBERS) do
    local n = v[i + 2] and tonumber(v[i + 2])
    if not n then return end
    got[name] = n
  end
  got.settled = v[2]
  got.open = {}
  for batch, size, cycle, deadline, longest, attempted, filled, rested in
    string.gmatch(v[1], '([^ ,]+),(%d+),(%d+),(%d+),(%d+),(%d+),(%d),(%-?%d+)') do
    table.insert(got.open, {batch = batch, size = tonumber(size), cycle = tonumber(cycle),
      deadline = tonumber(deadline), longest = tonumber(longest), attempted = tonumber(attempted),
      filled = tonumber(filled), rested = tonumber(rested)})
  end
  s = got
end

local function save(key)
  local open = {}
  for _, o in ipairs(s.open) do
    table.insert(open, table.concat({o.batch, str(o.size), str(o.cycle), str(o.deadline),
      str(o.longest), str(o.attempted), str(o.filled), str(o.rested)}, ','))
  end
  local args = {'open', table.concat(open, ' '), 'settled', s.settled,
    'nextEligibleAt', s.nextEligibleMs > 0 and rfc3339(s.nextEligibleMs) or ''}
  for _, name in ipairs(NUMBERS) do
    table.insert(args, name)
    table.insert(args, str(s[name]))
  end
  redis.call('HSET', key, unpack(args))
end

local function is_settled(batch)
  return string.find(' ' .. s.settled, ' ' .. batch .. ',', 1, true) ~= nil
end

local function bury(batch, attempted)
  local all = s.settled
  local _, spaces = string.gsub(all, ' ', ' ')
  if spaces + 1 >= KEEP_SETTLED then
    all = string.sub(all, string.find(all, ' ', 1, true) + 1)
  end
  s.settled = (all == '' and '' or all .. ' ') .. batch .. ',' .. str(attempted)
end

local function jumped()
  return s.nextEligibleMs - now > s.span_ms + SKEW
end

local function set_rest(next)
  s.nextEligibleMs = next
  s.span_ms = math.max(0, next - now)
end

local function latest()
  local d = 0
  for _, o in ipairs(s.open) do
    if o.cycle == s.cycle then d = math.max(d, o.deadline) end
  end
  return d
end

local function exact()
  if s.nextEligibleMs == 0 or s.last_end_ms == 0 or latest() > 0 or jumped() then return end
  set_rest(math.max(s.last_end_ms + s.rest_ms, s.floor_next_ms))
end

local function close_overdue()
  s.last_end_ms = math.min(s.last_end_ms, now)
  local closed = false
  local open = {}
  for _, o in ipairs(s.open) do
    o.deadline = math.min(o.deadline, now + o.longest)
    if o.deadline > now then
      table.insert(open, o)
    else
      bury(o.batch, o.size)
      if o.cycle == s.cycle then
        s.last_end_ms = math.max(s.last_end_ms, o.deadline)
        closed = true
      end
    end
  end
  s.open = open
  if closed then exact() end
end

local function apply()
  s.limit = math.min(s.limit, s.setting_limit)
  if s.nextEligibleMs == 0 then s.rest_ms = s.setting_rest_ms end
end

local function adopt(limit, rest, version)
  if version >= s.setting_version then
    s.setting_version, s.setting_limit, s.setting_rest_ms = version, limit, rest
  end
  apply()
end

local function raise_rest(filled, resting)
  if not filled then return end
  local next = now + resting
  if s.nextEligibleMs == 0 then
    local at = next
    local d = latest()
    if d > 0 then at = math.max(at, d + s.rest_ms) end
    set_rest(at)
  elseif resting > 0 and next > s.nextEligibleMs then
    set_rest(next)
  end
  if resting > 0 or s.floor_next_ms == 0 then
    s.floor_next_ms = math.max(s.floor_next_ms, next)
  end
end

local function unconfirmed(l)
  return s.nextEligibleMs > 0 and s.cycle == l.cycle and not l.filled and l.attempted < s.limit
    and (s.floor_next_ms == 0 or s.floor_attempted < l.attempted)
end

local function confirm(l)
  set_rest(math.max(s.nextEligibleMs, now + s.rest_ms))
  s.floor_next_ms = s.nextEligibleMs
  s.floor_attempted = math.max(s.floor_attempted, l.attempted)
end

-- read_ledger reads a ledger and a rule from the arguments from i on; nil if
-- one of them is bad. A ledger that was never written has no rule: 0, 0, 0.
local function read_ledger(i)
  local l = {cycle = whole(i, 0), attempted = whole(i + 1, 0), filled = whole(i + 2, 0),
    resting = whole(i + 3, 0), limit = whole(i + 4, 0), rest = whole(i + 5, 0), version = whole(i + 6, 0)}
  local r = {limit = whole(i + 7, 1), rest = whole(i + 8, 1), version = whole(i + 9, 0)}
  if not (l.cycle and l.attempted and l.filled and l.resting and l.limit and l.rest and l.version
    and r.limit and r.rest and r.version) then
    return nil
  end
  l.filled = l.filled > 0 or l.resting > 0
  if l.limit == 0 or l.rest == 0 then
    l.unwritten = true
    l.limit, l.rest, l.version = r.limit, r.rest, r.version
  end
  return l, r
end

local function take(l)
  s.cycle, s.attempted = l.cycle, l.attempted
  s.limit, s.rest_ms = l.limit, l.rest
  s.nextEligibleMs, s.span_ms, s.last_end_ms = 0, 0, 0
  s.floor_attempted, s.floor_next_ms = l.attempted, 0
end

local function merge(l, r)
  local how = 'KEPT'
  local again = false
  if s then
    close_overdue()
    again = unconfirmed(l) and not jumped()
  end
  if not s then
    how = 'CREATED'
    s = {inc = now, open = {}, settled = '',
      setting_version = l.version, setting_limit = l.limit, setting_rest_ms = l.rest}
    take(l)
  elseif s.cycle < l.cycle then
    how = 'RAISED'
    take(l)
  elseif s.cycle == l.cycle then
    if s.attempted < l.attempted then
      how = 'RAISED'
      s.attempted = l.attempted
      s.last_end_ms = 0
    end
    s.floor_attempted = math.max(s.floor_attempted, l.attempted)
    if not l.unwritten then s.limit = math.min(s.limit, l.limit) end
  end
  if again then
    how = 'RAISED'
    confirm(l)
  end
  if s.cycle == l.cycle then
    if l.filled and s.nextEligibleMs == 0 then
      s.rest_ms = l.rest
      if how == 'KEPT' then how = 'RAISED' end
    end
    raise_rest(l.filled, l.resting)
  end
  if l.version > s.setting_version then adopt(l.limit, l.rest, l.version) end
  adopt(r.limit, r.rest, r.version)
  return how
end
