-- Raises a school's quota to what the ledger in the database says; makes it
-- where it is missing.
--
-- KEYS[1]   quota hash
-- ARGV[1]   the ledger: cycle
-- ARGV[2]   attempts claimed in it
-- ARGV[3]   1 if a rest is set for it, passed or not
-- ARGV[4]   what is left of that rest, in ms
-- ARGV[5]   limit in force     ARGV[6]   rest in force, ms   ARGV[7]   version; 0 0 0: never written
-- ARGV[8]   the settings: limit   ARGV[9]   rest in ms       ARGV[10]  version
--
-- Returns  {"KEPT", now_ms}     nothing was missing
--          {"CREATED", now_ms}  there was no quota, or not all of it
--          {"RAISED", now_ms}   it showed less than the ledger
--
-- Atomic because it is one step. A repeat is harmless, and so is any order: the
-- greater cycle wins, within one cycle the greater count and the later rest.
-- It does not ask for the lock: whoever comes late with an old ledger can make
-- a rest longer, once, and nothing shorter.
-- include quota.lua

local quota = KEYS[1]
local l, r = read_ledger(1)
if not l then
  return redis.error_reply('ERR quota: reconcile: a number is missing or out of range')
end
load(quota)
local how = merge(l, r)
save(quota)
return {how, now}
