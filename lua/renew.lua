-- renew.lua - the heartbeat of many leases of one scope set
--
-- KEYS   the `leases` keys of one scope set: S >= 1 ZSETs, in one cluster slot
-- ARGV   ttl_ms, strict (0|1), cap_1 .. cap_S, id_1 .. id_n
-- reply  n integers, in the order of the ids:
--          0  renewed   it was live in every scope
--          1  restored  it was gone somewhere, has been put back, and fits
--          2  over      it was gone somewhere and has been put back, though others hold all
--                       slots of some scope by now
--          3  lost      (strict only) as 2, but it has been removed from every scope instead:
--                       the caller must end its call
--
-- Words, clock and key life are those of admit.lua. Safe to repeat: a second run finds
-- the leases live and answers 0, or judges anew what was lost.
--
-- What is kept, and by which step
--   the truth        a call that runs is counted even over the cap (nobody new enters until
--                    live < cap again); a limit that was lowered harms no live lease:
--                    held is held, whatever the cap.
--   dead = absent    a dead member is judged like one that was swept: its slot may have
--                    been given away. So the short way (3) is open only where no
--                    member of any scope is dead.
--   all or none      a lost id is removed from every scope (4).
--   wrong types      (1) reads every key before the first write to any.
--   clock            the date is set, not raised: one from the future (the clock went back)
--                    comes down to now. A negative age is none: live.
--   key life         (2) renews each key that exists, (5) those that (4) may have created.
--   no memory        a heartbeat must pass when Redis is over maxmemory, or all leases would die.
--                    ZADD is refused then, but only as the first write of a script;
--                    PEXPIRE never is. Hence PEXPIRE first.
--   time             (3) is one ZADD per scope; (4) is O(S * (n + SWEEP) * log card).
--                    Callers keep n <= 250.

local SWEEP = 200 -- dead members removed per scope and call
local CHUNK = 500 -- ids per ZADD: unpack() is bounded by the C stack of Lua

local scopes = #KEYS
local first = scopes + 2 -- ARGV[first + i] is the i-th id
local n = #ARGV - first
local ttl = tonumber(ARGV[1])
local strict = ARGV[2] == '1'
if scopes == 0 or n < 0 or not (ttl and ttl >= 1 and ttl % 1 == 0) then
    return redis.error_reply('ERR leasegate renew: bad arguments')
end

local time = redis.call('TIME')
local now = string.format('%d%03d', time[1], time[2] / 1000)
local cut = now - ttl

-- 1. How many dead?
local dead, clean = {}, true
for s = 1, scopes do
    dead[s] = redis.call('ZCOUNT', KEYS[s], '-inf', cut)
    clean = clean and dead[s] == 0
end

-- 2. Key life.
for s = 1, scopes do
    redis.call('PEXPIRE', KEYS[s], 3 * ttl)
end

-- 3. The short way: XX dates members and adds none, CH counts those whose date changed. All of
-- them: so all were there. Fewer: some are gone, or were dated in this very millisecond, or an id came
-- twice; (4) tells these apart, with every member already dated.
local reply, found = {}, clean
for from = 1, clean and n or 0, CHUNK do
    local dated, len = {}, 0
    for i = from, math.min(from + CHUNK - 1, n) do
        dated[len + 1], dated[len + 2] = now, ARGV[first + i]
        len = len + 2
        reply[i] = 0
    end
    for s = 1, scopes do
        found = redis.call('ZADD', KEYS[s], 'XX', 'CH', unpack(dated)) == len / 2 and found
    end
end
if found then
    return reply
end

-- 4. One id after the other.
local cap, live, held = {}, {}, {}
for s = 1, scopes do
    cap[s] = tonumber(ARGV[s + 2])
    live[s] = redis.call('ZCARD', KEYS[s]) - dead[s]
    if dead[s] > 0 then
        redis.call('ZREMRANGEBYRANK', KEYS[s], 0, math.min(dead[s], SWEEP) - 1)
    end
end
for i = 1, n do
    local id, all, room = ARGV[first + i], true, true
    for s = 1, scopes do
        local score = redis.call('ZSCORE', KEYS[s], id)
        held[s] = score and tonumber(score) > cut
        all = all and held[s]
        room = room and (held[s] or live[s] < cap[s])
    end
    local lost = strict and not room
    for s = 1, scopes do
        if lost then
            redis.call('ZREM', KEYS[s], id)
            live[s] = live[s] - (held[s] and 1 or 0)
        elseif not (all and clean) then
            redis.call('ZADD', KEYS[s], now, id)
            live[s] = live[s] + (held[s] and 0 or 1)
        end
    end
    reply[i] = all and 0 or room and 1 or lost and 3 or 2
end

-- 5. Key life of what was created.
for s = 1, scopes do
    redis.call('PEXPIRE', KEYS[s], 3 * ttl)
end
return reply
