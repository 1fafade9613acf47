-- admit.lua - take one slot in every scope of a set, for each of many leases
--
-- KEYS   the `leases` keys of one scope set: S >= 1 ZSETs, in one cluster slot
-- ARGV   ttl_ms, refresh (0|1), cap_1 .. cap_S, id_1 .. id_n
-- reply  n integers, in the order of the ids:
--          0  granted: the id is in every scope, dated now
--          k  refused: scope k (1..S) is the first that has no room for it
--        An error reply (WRONGTYPE, OOM, READONLY, bad arguments) grants nothing.
--
-- A member is a lease id, its score the time of its last heartbeat in ms of this
-- server's clock: TIME, read once per call; nobody sends a time. A lease is live
-- while its score is > now - ttl, and dead after. A dead one counts as absent
-- in every script, whether it has been swept or not: sweeping is house-cleaning
-- that no reply depends on. A score from the future (the clock went back) is live.
--
-- What is kept, and by which step
--   live <= cap      (3) and (4) add only where live + added <= cap. (1) takes ZCARD for
--                    live: an upper bound, so it may only err towards counting exactly.
--   repeats          an id that is held takes no second slot: ZADD of a member of the
--                    set adds none (3), or it is seen as held (4). So where card + n
--                    <= cap, a plain ZADD of all n is right for new ids and repeats alike.
--   all or none      (4) asks every scope before it writes to any. An id held in some
--                    scopes (a key was lost) needs room in the others; where it finds
--                    none, it is removed from all: a refused id is nowhere.
--   wrong types      (1) reads every key before the first write to any.
--   no memory        the first write is ZADD, which Redis refuses over maxmemory; where a
--                    sweep came first, it has just freed some, and the ZADD passes.
--   key life         see below.
--   time             O(S * (n + SWEEP) * log card). Callers keep n <= 250.
--
-- Why no key is ever left without an expiry, or loses a live lease to it, though
-- most calls send no PEXPIRE. T is ttl; PEXPIRE is always 3T.
--   a. A key without expiry would have to be created without one. Only ZADD creates, and
--      only where the key was absent: empty at (1), emptied by the sweep (2), or
--      emptied by the ZREM in (4). Each of these sets expire[s], and (5) follows in the same
--      call, which nobody can interrupt. renew.lua ends with a PEXPIRE whenever it may have created.
--   b. A lease dated at t must outlive t + T. Its program has, by contract, sent
--      refresh = 1 or a renewal for this set within the last heartbeat h <= T/2.
--      If the key is still the same one, it expires at t - h + 3T or later; if it
--      vanished since and was made anew, at a time after t - h, a. gave it 3T from then.
--      So 2.5 T remain at t, and the next heartbeat comes at t + h. What is left, 1.5 T and
--      more, is for delays on the way. refresh counts even if every id is refused, so
--      that a caller may note "refreshed" without looking at the reply.
--   Programs with different ttls: the same holds with T the smallest of them.
--
-- Redis >= 6.0 and Valkey: no newer command, no shebang line (6.x cannot parse it),
-- effects are replicated, not the script, so reading TIME before writing is safe.

local SWEEP = 200 -- dead members removed per scope and call
local CHUNK = 500 -- ids per ZADD: unpack() is bounded by the C stack of Lua

local scopes = #KEYS
local first = scopes + 2 -- ARGV[first + i] is the i-th id
local n = #ARGV - first
local ttl = tonumber(ARGV[1])
local refresh = ARGV[2] == '1'
if scopes == 0 or n < 0 or not (ttl and ttl >= 1 and ttl % 1 == 0) then
    return redis.error_reply('ERR leasegate admit: bad arguments')
end

-- "<seconds><milliseconds>": formatted once, as a number in a call costs a printf each time.
local time = redis.call('TIME')
local now = string.format('%d%03d', time[1], time[2] / 1000)

-- 1. Does all of it fit? The comparison is written so that a cap of NaN has no room.
local cap, live, expire, fits = {}, {}, {}, true
for s = 1, scopes do
    cap[s] = tonumber(ARGV[s + 2])
    live[s] = redis.call('ZCARD', KEYS[s])
    expire[s] = refresh or live[s] == 0
    fits = live[s] + n <= cap[s] and fits
end

-- 2. If not: count without the dead, and sweep them.
local cut = now - ttl
if not fits then
    fits = true
    for s = 1, scopes do
        if not (live[s] + n <= cap[s]) then
            local dead = redis.call('ZCOUNT', KEYS[s], '-inf', cut)
            if dead > 0 then
                redis.call('ZREMRANGEBYRANK', KEYS[s], 0, math.min(dead, SWEEP) - 1)
                live[s] = live[s] - dead
                expire[s] = true
            end
        end
        fits = live[s] + n <= cap[s] and fits
    end
end

local reply = {}
if fits then
    -- 3. Everything fits: one ZADD per scope.
    for from = 1, n, CHUNK do
        local dated, len = {}, 0
        for i = from, math.min(from + CHUNK - 1, n) do
            dated[len + 1], dated[len + 2] = now, ARGV[first + i]
            len = len + 2
            reply[i] = 0
        end
        for s = 1, scopes do
            redis.call('ZADD', KEYS[s], unpack(dated))
        end
    end
else
    -- 4. Not everything fits: one id after the other, first come first served.
    local held = {}
    for i = 1, n do
        local id, anywhere, full = ARGV[first + i], false, 0
        for s = 1, scopes do
            local score = redis.call('ZSCORE', KEYS[s], id)
            held[s] = score and tonumber(score) > cut
            anywhere = anywhere or held[s]
            if full == 0 and not held[s] and not (live[s] < cap[s]) then
                full = s
            end
        end
        for s = 1, scopes do
            if full == 0 then
                redis.call('ZADD', KEYS[s], now, id)
                live[s] = live[s] + (held[s] and 0 or 1)
            elseif anywhere then
                redis.call('ZREM', KEYS[s], id)
                live[s] = live[s] - (held[s] and 1 or 0)
                expire[s] = true
            end
        end
        reply[i] = full
    end
end

-- 5. Key life.
for s = 1, scopes do
    if expire[s] then
        redis.call('PEXPIRE', KEYS[s], 3 * ttl)
    end
end
return reply
