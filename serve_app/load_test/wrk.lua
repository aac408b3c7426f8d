-- The script of wrk. wrk.py sets folder, count, ramp, seconds, connections, mark and wrk.headers above it.
local ffi = require("ffi")
ffi.cdef("typedef struct { long s, ns; } instant; int clock_gettime(int clock, instant *now);")
local instant, threads, wires, turn = ffi.new("instant"), {}, {}, 0
answers = 0  -- those of this thread that came in the measured time

local function bytes(name)
  local file = assert(io.open(folder .. "/" .. name, "rb"))
  local content = file:read("*a")
  file:close()
  return content
end

wrk.method = bytes("method")

function setup(thread) table.insert(threads, thread) end

function init(args)
  for i = 1, count do
    local body = bytes("body" .. (i - 1))
    wires[i] = wrk.format(nil, nil, nil, body ~= "" and body or nil)
  end
end

function request()  -- each after the first of a connection follows an answer
  ffi.C.clock_gettime(1, instant)
  local now = tonumber(instant.s) + tonumber(instant.ns) / 1e9
  from = from or now + ramp
  if from <= now and now < from + seconds then answers = answers + 1 end
  turn = turn % #wires + 1
  return wires[turn]
end

-- wrk adds up latencies that it did not measure: for each above twice the mean, those of the requests that the
-- connection would have sent meanwhile. With one response of 200 that takes 100 ms, and 2 ms for the others, its p90
-- is 31 ms. final[k] = measured[k] + measured[k + mean] + measured[k + 2 * mean] + …, so the difference of two of
-- its counts is what was measured. The list that it sorts latencies into has one count for each microsecond.
ffi.cdef("typedef struct { uint64_t count, limit, min, max, data[]; } recorded;")

local function percentiles(summary, latency, shares)
  local list, each = ffi.cast("recorded **", latency)[0], math.floor(summary.requests / connections)
  local first, last, found = tonumber(list.min), tonumber(list.max), {}
  if each == 0 or first ~= latency.min or last ~= latency.max then
    for i, share in ipairs(shares) do found[i] = latency:percentile(share) end  -- another release of wrk
    return found
  end
  local mean, total = math.floor(summary.duration / each), 0
  local function measured(k)
    local count = tonumber(list.data[k])
    if k > mean and k + mean <= last then count = count - tonumber(list.data[k + mean]) end
    return count
  end
  for k = first, last do total = total + measured(k) end
  local passed, k = 0, first - 1
  for i, share in ipairs(shares) do  -- ascending; nearest rank
    while passed < math.ceil(total * share / 100) and k < last do
      k = k + 1
      passed = passed + measured(k)
    end
    found[i] = k
  end
  return found
end

function done(summary, latency, requests)
  local e, counted = summary.errors, 0
  for _, thread in ipairs(threads) do counted = counted + thread:get("answers") end
  local p50, p90, p99 = unpack(percentiles(summary, latency, {50, 90, 99}))
  io.write(string.format(
    '\n%s{"counted": %d, "requests": %d, "status": %d, "timeout": %d, ' ..
    '"connect": %d, "read": %d, "write": %d, ' ..
    '"p50": %.1f, "p90": %.1f, "p99": %.1f, "max": %.1f}\n',
    mark, counted, summary.requests, e.status, e.timeout, e.connect, e.read, e.write,
    p50, p90, p99, latency.max))
end
