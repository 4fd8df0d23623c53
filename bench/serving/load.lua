-- Every picture to every path, in turn. Arguments: path=... and picture=..., any number of each, and one type=...

local requests, turn, media_type = {}, 0, nil

function init(arguments)
  local given = { path = {}, picture = {} }
  for _, argument in ipairs(arguments) do
    local kind, value = argument:match("^(%l+)=(.*)$")
    if kind == "type" then media_type = value else table.insert(given[kind], value) end
  end
  for _, picture in ipairs(given.picture) do
    local file = assert(io.open(picture, "rb"))
    local body = file:read("*a")
    file:close()
    for _, path in ipairs(given.path) do
      table.insert(requests, wrk.format("POST", path, { ["Content-Type"] = media_type }, body))
    end
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local errors = summary.errors
  local broken = errors.connect + errors.read + errors.write + errors.timeout
  local line = '{"answers": %d, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f, "refused": %d, "broken": %d}\n'
  local p50, p99 = latency:percentile(50) / 1000, latency:percentile(99) / 1000
  io.write(line:format(summary.requests, summary.duration / 1e6, p50, p99, errors.status, broken))
end
