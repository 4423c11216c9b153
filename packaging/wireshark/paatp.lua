-- Wireshark dissector of paatp's packets, protocol version 1 (docs/protocol.md). Wireshark 4.0 and later.
--
--   tshark -X lua_script:paatp.lua -r FILE              once
--   cp paatp.lua ~/.local/lib/wireshark/plugins/        always (`tshark -G folders` names the folder)
--
-- Packets are recognised by their UDP port (Preferences, Protocols, PAATP) and on other ports by magic, version and
-- check. The tables between the marks are written by `cargo xtask codegen`.

-- >>> names
local MAGIC, VERSION, DEFAULT_PORT = 0x5041, 1, 20545
local KINDS = {
    [1] = "DATA",
    [2] = "PULL",
    [8] = "ANSWER",
}
local STATUSES = {
    [0] = "OK",
    [1] = "NOT_YET",
    [2] = "BUSY",
    [3] = "STALE",
    [4] = "REJOIN",
    [5] = "ABORTED",
    [6] = "BAD_LENGTH",
    [7] = "CONFLICT",
    [8] = "OLD_ATTEMPT",
    [9] = "NOT_INCLUDED",
    [10] = "BAD_TAG",
}
local OPERATIONS = {
    [0] = "barrier",
    [1] = "exponents",
    [2] = "sum",
    [3] = "mean",
    [4] = "max",
    [5] = "min",
    [6] = "broadcast",
}
local TYPES = {
    [0] = "f32",
    [1] = "f16",
    [2] = "bf16",
    [3] = "i32",
}
local FLAGS = {
    [1] = "RESULT",
    [2] = "PARTIAL",
    [4] = "RETRANSMIT",
    [8] = "ECN_ECHO",
    [16] = "NON_FINITE",
    [32] = "PAYLOAD",
    [64] = "REDO",
    [128] = "ABOVE",
}
local REFUSALS = {
    [0] = "too_many_tags",
    [1] = "fragment",
    [2] = "truncated",
    [3] = "length_mismatch",
    [4] = "bad_magic",
    [5] = "bad_version",
    [6] = "bad_kind",
    [7] = "bad_header_check",
    [8] = "unknown_job",
    [9] = "unknown_worker",
    [10] = "foreign_address",
    [11] = "old_generation",
    [12] = "bad_lanes",
    [13] = "ahead",
    [14] = "behind",
    [15] = "old_attempt",
    [16] = "far_attempt",
    [17] = "too_many_attempts",
    [18] = "dead_rank_in_redo",
    [19] = "mismatch",
    [20] = "not_root",
    [21] = "conflict",
    [22] = "bad_tag",
    [23] = "lock_busy",
    [24] = "crowded",
}
local REFUSAL_SENTENCES = {
    [0] = "A frame carried more than two VLAN tags; it was passed to the stack unread.",
    [1] = "The first fragment of an IP datagram to our port; datagrams must fit the MTU.",
    [2] = "A datagram to our port was shorter than a header.",
    [3] = "The lengths told by frame, IP, UDP and header disagree.",
    [4] = "A datagram to our port did not begin with our magic number.",
    [5] = "The packet speaks another version of the protocol.",
    [6] = "The packet is no request, or of an unknown kind or operation.",
    [7] = "The header failed its check: bits were flipped on the way.",
    [8] = "No such job on this node.",
    [9] = "The job has no rank of this number.",
    [10] = "The source address is not the one registered for this rank.",
    [11] = "The packet belongs to another generation of the job, or its rank was removed; its sender must join again.",
    [12] = "The number of lanes is not a multiple of 32, or more than the job's slots hold.",
    [13] = "The chunk is further ahead than the ring is long: some rank has not acknowledged enough (BUSY).",
    [14] = "Every rank has acknowledged this chunk already (STALE).",
    [15] = "The chunk is being redone and this contribution belongs to an earlier attempt.",
    [16] = "The packet asks for an attempt beyond the next one.",
    [17] = "The chunk failed its check in every attempt; the job is aborted.",
    [18] = "A redo needs the contribution of a rank that has left; the job is aborted.",
    [19] = "Ranks disagree on operation, type, lanes or exponent of a chunk; the job is aborted.",
    [20] = "A rank that is not the root of a broadcast sent a payload.",
    [21] = "A partial sum overlaps with contributions that the slot already holds.",
    [22] = "The payload failed its checksum; it was not added, or the addition was undone.",
    [23] = "The slot stayed locked for too long; the packet was dropped for its sender to repeat.",
    [24] = "The pool has no free slot at the places that the chunk may take (BUSY).",
}
-- <<< names

local HEADER_BYTES, CHECKED_WORDS = 64, 15
local UNKNOWN_EXPONENT = 127
local UNBOUNDED = 63
local MODULUS = 4294967296
-- Lanes that are shown one by one; the rest is bytes.
local SHOWN_LANES = 8

local paatp = Proto("paatp", "PA-ATP all-reduce")

local function invert(names)
    local values = {}
    for value, name in pairs(names) do values[name] = value end
    return values
end

local FLAG = invert(FLAGS)
local KIND = invert(KINDS)
local STATUS = invert(STATUSES)
local OPERATION = invert(OPERATIONS)

-- Fields ----------------------------------------------------------------------------------------------------------

local f = {
    magic = ProtoField.uint16("paatp.magic", "Magic", base.HEX),
    version = ProtoField.uint8("paatp.version", "Version", base.DEC, nil, 0xF0),
    kind = ProtoField.uint8("paatp.kind", "Kind", base.DEC, KINDS, 0x0F),
    flags = ProtoField.uint8("paatp.flags", "Flags", base.HEX),
    job = ProtoField.uint16("paatp.job", "Job", base.DEC),
    worker = ProtoField.uint8("paatp.worker", "Worker (rank)", base.DEC),
    status = ProtoField.uint8("paatp.status", "Status", base.DEC, STATUSES),
    generation = ProtoField.uint32("paatp.generation", "Generation", base.HEX),
    seq = ProtoField.uint32("paatp.seq", "Seq (chunk contributed to)", base.DEC),
    want = ProtoField.uint32("paatp.want", "Want (chunk of the result)", base.DEC),
    min_ack = ProtoField.uint32("paatp.min_ack", "Lowest ack of the job (min_ack)", base.DEC),
    ack = ProtoField.uint32("paatp.ack", "Ack (results below have arrived)", base.DEC),
    p_min = ProtoField.uint32("paatp.p_min", "Lowest progress of the job (p_min)", base.DEC),
    progress = ProtoField.uint32("paatp.progress", "Progress (contributions below are acknowledged)", base.DEC),
    p_max = ProtoField.uint32("paatp.p_max", "Highest progress of the job (p_max)", base.DEC),
    token = ProtoField.uint32("paatp.token", "Token (number of the request)", base.DEC),
    bitmap = ProtoField.uint64("paatp.bitmap", "Bitmap", base.HEX),
    ranks = ProtoField.string("paatp.ranks", "Ranks in the bitmap"),
    tag = ProtoField.uint64("paatp.tag", "Tag (checksum and salts)", base.HEX),
    redo_seq = ProtoField.uint32("paatp.redo.seq", "Redo: chunk", base.DEC),
    redo_attempt = ProtoField.uint8("paatp.redo.attempt", "Redo: attempt", base.DEC),
    lanes = ProtoField.uint16("paatp.lanes", "Lanes", base.DEC),
    staleness = ProtoField.uint8("paatp.staleness", "Staleness", base.DEC, { [UNBOUNDED] = "unbounded" }, 0x3F),
    partial_mode = ProtoField.bool("paatp.mode.partial", "Chunks may be complete without all ranks", 8, nil, 0x40),
    contributors = ProtoField.uint8("paatp.contributors", "Contributors", base.DEC),
    exponent = ProtoField.int8("paatp.exponent", "Exponent", base.DEC),
    next_exponent = ProtoField.int8("paatp.next_exponent", "Next exponent", base.DEC),
    window = ProtoField.uint16("paatp.window", "Window granted (0: the job's)", base.DEC),
    root = ProtoField.uint8("paatp.root", "Root of the broadcast", base.DEC),
    fingerprint = ProtoField.uint8("paatp.fingerprint", "Fingerprint, half of", base.HEX),
    slowest = ProtoField.uint8("paatp.slowest", "Slowest rank", base.DEC),
    culprit = ProtoField.uint8("paatp.culprit", "Rank with NaN or infinity", base.DEC),
    gain = ProtoField.int8("paatp.gain", "Gain", base.DEC),
    attempt = ProtoField.uint8("paatp.attempt", "Attempt", base.DEC),
    reason = ProtoField.uint8("paatp.reason", "Reason of the abort", base.DEC, REFUSALS),
    everybody = ProtoField.bool("paatp.everybody", "Every rank is needed", 8, nil, 0x80),
    operation = ProtoField.uint8("paatp.operation", "Operation", base.DEC, OPERATIONS, 0x70),
    element = ProtoField.uint8("paatp.type", "Type", base.DEC, TYPES, 0x0F),
    epoch = ProtoField.uint8("paatp.epoch", "Epoch of the policy", base.DEC),
    check = ProtoField.uint32("paatp.check", "Header check", base.HEX),
    check_good = ProtoField.bool("paatp.check.good", "Header check is good"),
    lane = ProtoField.uint32("paatp.lane", "Lane", base.HEX),
    value = ProtoField.double("paatp.value", "Value"),
    payload = ProtoField.bytes("paatp.payload", "Payload"),
    answer_in = ProtoField.framenum("paatp.answer_in", "Answer in", base.NONE, frametype.RESPONSE),
    request_in = ProtoField.framenum("paatp.request_in", "Request in", base.NONE, frametype.REQUEST),
    time = ProtoField.relative_time("paatp.time", "Time since the request"),
    retransmission_of = ProtoField.framenum("paatp.retransmission_of", "Retransmission of", base.NONE,
        frametype.RETRANS_PREV),
}
local flag_fields = {}
for bit, name in pairs(FLAGS) do
    local field = ProtoField.bool("paatp.flags." .. name:lower(), name, 8, nil, bit)
    flag_fields[#flag_fields + 1] = { bit = bit, name = name, field = field }
end
table.sort(flag_fields, function(a, b) return a.bit < b.bit end)

local fields = {}
for _, field in pairs(f) do fields[#fields + 1] = field end
for _, flag in ipairs(flag_fields) do fields[#fields + 1] = flag.field end
paatp.fields = fields

local e = {
    bad_magic = ProtoExpert.new("paatp.bad_magic", "Not our magic number", expert.group.PROTOCOL,
        expert.severity.ERROR),
    bad_version = ProtoExpert.new("paatp.bad_version", "Another version of the protocol", expert.group.PROTOCOL,
        expert.severity.ERROR),
    bad_kind = ProtoExpert.new("paatp.bad_kind", "Unknown kind", expert.group.PROTOCOL, expert.severity.ERROR),
    bad_check = ProtoExpert.new("paatp.bad_check", "The header failed its check: bits were flipped on the way",
        expert.group.CHECKSUM, expert.severity.ERROR),
    short = ProtoExpert.new("paatp.short", "Shorter than a header", expert.group.PROTOCOL, expert.severity.ERROR),
    bad_length = ProtoExpert.new("paatp.bad_length", "The payload is not as long as the header says",
        expert.group.PROTOCOL, expert.severity.ERROR),
    aborted = ProtoExpert.new("paatp.aborted", "The job cannot go on", expert.group.RESPONSE_CODE,
        expert.severity.ERROR),
    rejoin = ProtoExpert.new("paatp.rejoin", "The generation is over, or the rank was removed",
        expert.group.RESPONSE_CODE, expert.severity.WARN),
    bad_tag = ProtoExpert.new("paatp.bad_tag", "The payload was damaged on its way to the aggregator",
        expert.group.CHECKSUM, expert.severity.WARN),
    busy = ProtoExpert.new("paatp.busy", "No room for the chunk yet", expert.group.RESPONSE_CODE,
        expert.severity.NOTE),
    retransmission = ProtoExpert.new("paatp.retransmission", "Sent before", expert.group.SEQUENCE,
        expert.severity.NOTE),
    redo = ProtoExpert.new("paatp.redo", "A chunk is being redone: its result failed its check",
        expert.group.SEQUENCE, expert.severity.WARN),
    non_finite = ProtoExpert.new("paatp.non_finite", "Values that cannot be reduced", expert.group.PROTOCOL,
        expert.severity.WARN),
    ecn = ProtoExpert.new("paatp.ecn_echo", "The request met congestion", expert.group.SEQUENCE,
        expert.severity.NOTE),
}
local experts = {}
for _, item in pairs(e) do experts[#experts + 1] = item end
paatp.experts = experts

paatp.prefs.port = Pref.uint("First UDP port", DEFAULT_PORT, "What `paatp run` calls --port")
paatp.prefs.ports = Pref.uint("Number of UDP ports", 1, "What `paatp run` calls --ports")
paatp.prefs.world = Pref.uint("Ranks of the job", 0,
    "Shows the values that lanes of sums and means stand for, which depends on it; 0: do not")

-- What earlier packets said ---------------------------------------------------------------------------------------

-- Requests by job, generation, rank and token: { request, time, answer }.
local exchanges = {}
-- First DATA by job, generation, rank, seq and attempt: { frame, token }.
local contributions = {}
-- Operation byte by job, generation and seq.
local operations = {}

function paatp.init()
    exchanges, contributions, operations = {}, {}, {}
end

-- Numbers ---------------------------------------------------------------------------------------------------------

-- As `header_check` of paatp-common/src/tag.rs: a weighted sum of the words before the check.
local function computed_check(tvb)
    local sum, sums = 0, 0
    for word = 0, CHECKED_WORDS - 1 do
        sum = (sum + tvb(word * 4, 4):uint()) % MODULUS
        sums = (sums + sum) % MODULUS
    end
    return (2 * sums - sum) % MODULUS
end

local function has(flags, name)
    return math.floor(flags / FLAG[name]) % 2 == 1
end

-- "0-3, 5" for a bitmap of ranks.
local function ranks_of(range)
    local parts, first = {}, nil
    for rank = 0, 64 do
        local set = rank < 64 and range:bitfield(63 - rank, 1) == 1
        if set and not first then
            first = rank
        elseif not set and first then
            local last = rank - 1
            parts[#parts + 1] = first == last and tostring(first) or (first .. "-" .. last)
            first = nil
        end
    end
    return #parts > 0 and table.concat(parts, ", ") or "none"
end

-- What a lane of a sum or mean stands for (docs/numerics.md); nil where that cannot be known.
local function value_of(lane, contributors, exponent, operation_byte)
    local world = paatp.prefs.world
    if world < 1 or world > 64 or not operation_byte or exponent == UNKNOWN_EXPONENT then return nil end
    local operation = OPERATIONS[math.floor(operation_byte / 16) % 8]
    if operation ~= "sum" and operation ~= "mean" then return nil end
    local bias = math.floor(2 ^ 31 / world)
    local bits = 0
    while 2 ^ (bits + 1) <= bias do bits = bits + 1 end
    local number = (lane - contributors * bias) % MODULUS
    if number >= MODULUS / 2 then number = number - MODULUS end
    local value = TYPES[operation_byte % 16] == "i32" and number or number * 2 ^ (exponent + 1 - bits)
    return operation == "mean" and value / contributors or value
end

-- Dissection ------------------------------------------------------------------------------------------------------

local function add_flags(tree, tvb, flags)
    local names = {}
    for _, flag in ipairs(flag_fields) do
        if has(flags, flag.name) then names[#names + 1] = flag.name end
    end
    local item = tree:add(f.flags, tvb(3, 1))
    if #names > 0 then item:append_text(" (" .. table.concat(names, ", ") .. ")") end
    for _, flag in ipairs(flag_fields) do item:add(flag.field, tvb(3, 1)) end
    return item, names
end

-- The middle of the header, which both directions have.
local function add_common(tree, tvb)
    tree:add(f.job, tvb(4, 2))
    tree:add(f.worker, tvb(6, 1))
end

local function add_bitmap(tree, tvb)
    local item = tree:add(f.bitmap, tvb(32, 8))
    local ranks = ranks_of(tvb(32, 8))
    item:append_text(" (ranks " .. ranks .. ")")
    item:add(f.ranks, tvb(32, 8), ranks):set_generated()
    return ranks
end

local function add_exponents(tree, tvb)
    tree:add(f.exponent, tvb(52, 1))
    local item = tree:add(f.next_exponent, tvb(53, 1))
    if tvb(53, 1):int() == UNKNOWN_EXPONENT then item:append_text(" (unknown)") end
end

local function add_request(tree, tvb, h)
    tree:add(f.generation, tvb(8, 4))
    tree:add(f.seq, tvb(12, 4))
    tree:add(f.want, tvb(16, 4))
    tree:add(f.ack, tvb(20, 4))
    tree:add(f.progress, tvb(24, 4))
    tree:add(f.token, tvb(28, 4))
    add_bitmap(tree, tvb)
    tree:add(f.tag, tvb(40, 8))
    tree:add(f.lanes, tvb(48, 2))
    tree:add(f.contributors, tvb(51, 1))
    add_exponents(tree, tvb)
    if h.operation == OPERATION.exponents then
        tree:add(f.fingerprint, tvb(56, 1))
    elseif h.operation == OPERATION.broadcast then
        tree:add(f.root, tvb(56, 1))
    end
    tree:add(f.attempt, tvb(58, 1))
    tree:add(f.everybody, tvb(59, 1))
    tree:add(f.operation, tvb(59, 1))
    tree:add(f.element, tvb(59, 1))
end

-- Everything after the status of a REJOIN is the request's own, and means nothing.
local function add_answer(tree, tvb, h)
    local item = tree:add(f.status, tvb(7, 1))
    tree:add(f.generation, tvb(8, 4))
    tree:add(f.seq, tvb(12, 4))
    if h.status == STATUS.REJOIN then
        tree:add(f.token, tvb(28, 4))
        item:add_proto_expert_info(e.rejoin)
        return
    end
    tree:add(h.result and f.want or f.min_ack, tvb(16, 4))
    tree:add(f.p_min, tvb(20, 4))
    tree:add(f.p_max, tvb(24, 4))
    tree:add(f.token, tvb(28, 4))
    local ranks = add_bitmap(tree, tvb)
    if h.result then
        tree:add(f.tag, tvb(40, 8))
    elseif h.redo then
        tree:add(f.redo_seq, tvb(40, 4))
        tree:add(f.redo_attempt, tvb(47, 1))
    end
    tree:add(f.lanes, tvb(48, 2))
    tree:add(f.staleness, tvb(50, 1))
    tree:add(f.partial_mode, tvb(50, 1))
    if h.result then
        tree:add(f.contributors, tvb(51, 1))
        add_exponents(tree, tvb)
    end
    tree:add(f.window, tvb(54, 2))
    tree:add(h.non_finite and f.culprit or f.slowest, tvb(56, 1))
    tree:add(f.gain, tvb(57, 1))
    if h.status == STATUS.ABORTED and not h.result then
        local reason = tvb(58, 1):uint()
        tree:add(f.reason, tvb(58, 1))
        item:add_proto_expert_info(e.aborted,
            (REFUSAL_SENTENCES[reason] or "An unknown reason.") .. " Other side: ranks " .. ranks)
    else
        tree:add(f.attempt, tvb(58, 1))
    end
    tree:add(f.epoch, tvb(59, 1))
    if h.status == STATUS.BAD_TAG then item:add_proto_expert_info(e.bad_tag) end
    if h.status == STATUS.BUSY then item:add_proto_expert_info(e.busy) end
end

local function add_check(tree, tvb)
    local computed = computed_check(tvb)
    local good = computed == tvb(60, 4):uint()
    local item = tree:add(f.check, tvb(60, 4))
    item:append_text(good and " (good)" or string.format(" (bad: 0x%08x would be right)", computed))
    item:add(f.check_good, tvb(60, 4), good):set_generated()
    if not good then item:add_proto_expert_info(e.bad_check) end
    return good
end

local function add_payload(tree, tvb, h)
    local announced = h.payload and h.lanes * 4 or 0
    local reported = tvb:reported_len() - HEADER_BYTES
    local captured = tvb:len() - HEADER_BYTES
    if announced ~= reported then
        tree:add_proto_expert_info(e.bad_length,
            string.format("The header announces %d bytes of payload, there are %d", announced, reported))
    end
    if captured <= 0 then return end
    local item = tree:add(f.payload, tvb(HEADER_BYTES, captured))
    item:set_text(string.format("Payload: %d bytes, %d lanes%s", reported, math.floor(reported / 4),
        captured < reported and string.format(" (%d bytes captured)", captured) or ""))
    -- A pull's payload is padding.
    if h.kind == KIND.PULL then return end
    for lane = 0, math.min(SHOWN_LANES, math.floor(captured / 4)) - 1 do
        local range = tvb(HEADER_BYTES + lane * 4, 4)
        local shown = item:add(f.lane, range)
        local value = value_of(range:uint(), h.contributors, h.exponent, h.operation_byte)
        if value then
            shown:append_text(string.format(" (%.9g)", value))
            shown:add(f.value, range, value):set_generated()
        end
    end
end

-- Links requests and answers, and contributions with what they repeat.
local function add_links(tree, tvb, pinfo, h)
    local sender = table.concat({ h.job, h.generation, h.worker }, ":")
    local key = sender .. ":" .. h.token
    local exchange = exchanges[key]
    if h.kind == KIND.ANSWER then
        if not exchange then return end
        if not pinfo.visited and not exchange.answer then exchange.answer = pinfo.number end
        tree:add(f.request_in, tvb(28, 4), exchange.request):set_generated()
        local since = pinfo.abs_ts - exchange.time
        local seconds = math.floor(since)
        tree:add(f.time, tvb(28, 4), NSTime.new(seconds, math.floor((since - seconds) * 1e9 + 0.5))):set_generated()
        return
    end
    -- A duplicate made by the network has the token of the first; a new life of a token is a new request.
    if not pinfo.visited and (not exchange or exchange.kind ~= h.kind or exchange.seq ~= h.seq) then
        exchange = { request = pinfo.number, time = pinfo.abs_ts, kind = h.kind, seq = h.seq }
        exchanges[key] = exchange
    end
    if exchange and exchange.answer then
        tree:add(f.answer_in, tvb(28, 4), exchange.answer):set_generated()
    end
    if h.kind ~= KIND.DATA then return end
    -- A redo sends the same bytes under the next attempt.
    local chunk = sender .. ":" .. h.seq
    if not contributions[chunk] then contributions[chunk] = { frame = pinfo.number, token = h.token } end
    operations[h.job .. ":" .. h.generation .. ":" .. h.seq] = h.operation_byte
    -- What the network doubled has the same token.
    local first = contributions[chunk]
    if first.frame < pinfo.number and first.token ~= h.token then
        tree:add(f.retransmission_of, tvb(12, 4), first.frame):set_generated()
    end
end

local function summary(h, names)
    local text = string.format("%s job %d rank %d", KINDS[h.kind] or "unknown kind", h.job, h.worker)
    if h.kind == KIND.DATA then
        text = text .. string.format(" seq %d want %d", h.seq, h.want)
    elseif h.kind == KIND.PULL then
        text = text .. string.format(" want %d", h.want)
    elseif h.kind == KIND.ANSWER then
        text = text .. string.format(" seq %d %s", h.seq, STATUSES[h.status] or ("status " .. h.status))
        if h.result then text = text .. string.format(", result of %d", h.want) end
    end
    if h.kind ~= KIND.ANSWER and h.operation then
        text = text .. " " .. (OPERATIONS[h.operation] or "unknown operation")
    end
    if h.payload then text = text .. string.format(", %d lanes", h.lanes) end
    local more = {}
    for _, name in ipairs(names) do
        if name ~= "RESULT" and name ~= "PAYLOAD" then more[#more + 1] = name end
    end
    return #more > 0 and text .. " [" .. table.concat(more, ", ") .. "]" or text
end

local function read(tvb)
    local flags = tvb(3, 1):uint()
    local h = {
        kind = tvb(2, 1):bitfield(4, 4), flags = flags, job = tvb(4, 2):uint(), worker = tvb(6, 1):uint(),
        status = tvb(7, 1):uint(), generation = tvb(8, 4):uint(), seq = tvb(12, 4):uint(), want = tvb(16, 4):uint(),
        token = tvb(28, 4):uint(), lanes = tvb(48, 2):uint(), contributors = tvb(51, 1):uint(),
        exponent = tvb(52, 1):int(), attempt = tvb(58, 1):uint(), payload = has(flags, "PAYLOAD"),
    }
    h.answer = h.kind == KIND.ANSWER
    h.result = h.answer and has(flags, "RESULT")
    h.redo = h.answer and not h.result and has(flags, "REDO")
    h.non_finite = has(flags, "NON_FINITE")
    if h.answer then
        h.operation_byte = operations[h.job .. ":" .. h.generation .. ":" .. h.want]
    else
        h.operation_byte = tvb(59, 1):uint()
        h.operation = tvb(59, 1):bitfield(1, 3)
    end
    return h
end

function paatp.dissector(tvb, pinfo, tree)
    pinfo.cols.protocol = "PAATP"
    local root = tree:add(paatp, tvb())
    if tvb:reported_len() < HEADER_BYTES then
        root:add_proto_expert_info(e.short)
        pinfo.cols.info = string.format("shorter than a header (%d bytes)", tvb:reported_len())
        return tvb:len()
    end
    -- What a snapshot length cut off raises an error of Wireshark's own, which says so.
    local magic = root:add(f.magic, tvb(0, 2))
    local version = root:add(f.version, tvb(2, 1))
    local kind = root:add(f.kind, tvb(2, 1))
    if tvb(0, 2):uint() ~= MAGIC then magic:add_proto_expert_info(e.bad_magic) end
    if tvb(2, 1):bitfield(0, 4) ~= VERSION then version:add_proto_expert_info(e.bad_version) end

    local h = read(tvb)
    if not KINDS[h.kind] then kind:add_proto_expert_info(e.bad_kind) end
    local flags, names = add_flags(root, tvb, h.flags)
    add_common(root, tvb)
    if h.answer then add_answer(root, tvb, h) else add_request(root, tvb, h) end
    local good = add_check(root, tvb)
    if not h.answer and has(h.flags, "RETRANSMIT") then flags:add_proto_expert_info(e.retransmission) end
    if h.redo then flags:add_proto_expert_info(e.redo) end
    if h.non_finite then flags:add_proto_expert_info(e.non_finite) end
    if h.answer and has(h.flags, "ECN_ECHO") then flags:add_proto_expert_info(e.ecn) end
    -- A damaged header is linked to nothing, and nothing is believed of its lengths.
    if good then
        add_links(root, tvb, pinfo, h)
        add_payload(root, tvb, h)
    end

    local line = summary(h, names)
    root:append_text(", " .. line)
    pinfo.cols.info = good and line or ("damaged header: " .. line)
    return tvb:len()
end

-- Registration ----------------------------------------------------------------------------------------------------

local udp_ports = DissectorTable.get("udp.port")
local registered

local function register()
    if registered then udp_ports:remove(registered, paatp) end
    local last = math.min(paatp.prefs.port + math.max(paatp.prefs.ports, 1) - 1, 65535)
    registered = paatp.prefs.port .. "-" .. last
    udp_ports:add(registered, paatp)
end

function paatp.prefs_changed()
    register()
end

local function looks_like_ours(tvb, pinfo, tree)
    if tvb:len() < HEADER_BYTES or tvb(0, 2):uint() ~= MAGIC or tvb(2, 1):bitfield(0, 4) ~= VERSION
        or computed_check(tvb) ~= tvb(60, 4):uint() then
        return false
    end
    paatp.dissector(tvb, pinfo, tree)
    return true
end

register()
paatp:register_heuristic("udp", looks_like_ours)
