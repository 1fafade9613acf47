-- release.lua - give back every slot of many leases of one scope set
--
-- KEYS   the `leases` keys of one scope set: S >= 1 ZSETs, in one cluster slot
-- ARGV   id_1 .. id_n
-- reply  integer: members removed, of all scopes together (for the curious: 0 is no error)
--
-- A lease is removed by its own name and by nothing else: releasing twice, late, or after
-- someone else took the slot removes nothing of theirs, and a count cannot fall below 0,
-- as nothing is counted but the members. Hence safe to repeat, and what to send when
-- the outcome of admit is unknown.
--
-- One scope's error (a key of another type) does not keep the slots of the others: all
-- are tried, the first error is the reply. ZREM passes over maxmemory. No clock is
-- read. A key whose last member goes, goes with it.
-- Time: O(S * n * log card). Callers keep n <= 250.

local CHUNK = 1000 -- ids per ZREM: unpack() is bounded by the C stack of Lua

local removed, failed = 0, nil
for s = 1, #KEYS do
    for from = 1, #ARGV, CHUNK do
        local done = redis.pcall('ZREM', KEYS[s], unpack(ARGV, from, math.min(from + CHUNK - 1, #ARGV)))
        if type(done) == 'table' then
            failed = failed or done
        else
            removed = removed + done
        end
    end
end
return failed or removed
