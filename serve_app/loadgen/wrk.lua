-- The script of wrk. wrk.py sets folder, count, ramp, seconds, mark and wrk.headers above it.
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

function done(summary, latency, requests)
  local e, counted = summary.errors, 0
  for _, thread in ipairs(threads) do counted = counted + thread:get("answers") end
  io.write(string.format(
    '\n%s{"counted": %d, "requests": %d, "status": %d, "timeout": %d, ' ..
    '"connect": %d, "read": %d, "write": %d, ' ..
    '"p50": %.1f, "p90": %.1f, "p99": %.1f, "max": %.1f}\n',
    mark, counted, summary.requests, e.status, e.timeout, e.connect, e.read, e.write,
    latency:percentile(50), latency:percentile(90), latency:percentile(99), latency.max))
end
