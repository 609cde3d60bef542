// Execution of loads, stores, atomics and address instructions. PTX ISA 9.7.9, 9.7.13.5 - 9.7.13.6.
#include "engine.hpp"
#include "lanes.hpp"
#include "mma_sync.hpp"

namespace warpcheck {
namespace {

uint32_t element_bytes(Type t) {
    switch (t) {
        case Type::b8: case Type::u8: case Type::s8: return 1;
        case Type::b16: case Type::u16: case Type::s16: case Type::f16: case Type::bf16: return 2;
        case Type::b64: case Type::u64: case Type::s64: case Type::f64: case Type::f32x2: return 8;
        case Type::b128: return 16;
        default: return 4;
    }
}

template <class T>
T apply_integer(AtomicOp op, T old, T a, T b) {
    switch (op) {
        case AtomicOp::Add: return T(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(a));
        case AtomicOp::Min: return std::min(old, a);
        case AtomicOp::Max: return std::max(old, a);
        case AtomicOp::Inc: return old >= a ? T(0) : T(old + 1);
        case AtomicOp::Dec: return old == 0 || old > a ? a : T(old - 1);
        case AtomicOp::And: return T(old & a);
        case AtomicOp::Or: return T(old | a);
        case AtomicOp::Xor: return T(old ^ a);
        case AtomicOp::Exch: return a;
        default: return old == a ? b : old;
    }
}

float apply_float(AtomicOp op, float old, float a) {
    return op == AtomicOp::Add ? canonical(old + a) : op == AtomicOp::Min ? min_number(old, a, false) : max_number(old, a, false);
}

uint32_t apply_half(AtomicOp op, bool bf16, uint32_t old, uint32_t a) {
    if (bf16) return float_to_bf16(apply_float(op, bf16_to_float(uint16_t(old)), bf16_to_float(uint16_t(a))));
    return float_to_f16(apply_float(op, f16_to_float(uint16_t(old)), f16_to_float(uint16_t(a))));
}

constexpr uint64_t kNear = uint64_t(1) << 32;   // bytes: a miss that is farther has nothing to do with an allocation

std::string name_of(const Region& region) { return region.name.empty() ? hex(region.base) : region.name; }

// Unique number of a location in global memory or in the shared memory of a CTA.
uint64_t place_key(const Span& s) { return s.cta ? kSharedBase + (uint64_t(s.cta->linear) << 32) + s.offset : s.address; }

}  // namespace

// Value that an atomic operation leaves in memory. `b` is the swap value of cas.
uint64_t apply_atomic(Type type, AtomicOp op, uint64_t old, uint64_t a, uint64_t b) {
    switch (type) {
        case Type::s32: return uint32_t(apply_integer<int32_t>(op, int32_t(old), int32_t(a), int32_t(b)));
        case Type::u32: case Type::b32: return apply_integer<uint32_t>(op, uint32_t(old), uint32_t(a), uint32_t(b));
        case Type::s64: return uint64_t(apply_integer<int64_t>(op, int64_t(old), int64_t(a), int64_t(b)));
        case Type::b16: case Type::u16: return apply_integer<uint16_t>(op, uint16_t(old), uint16_t(a), uint16_t(b));
        case Type::f32: return op >= AtomicOp::Exch ? apply_integer<uint32_t>(op, uint32_t(old), uint32_t(a), uint32_t(b))
                                       : float_to_bits(apply_float(op, bits_to_float(uint32_t(old)), bits_to_float(uint32_t(a))));
        case Type::f64: return double_to_bits(bits_to_double(old) + bits_to_double(a));
        case Type::f16: case Type::bf16: return apply_half(op, type == Type::bf16, uint32_t(old), uint32_t(a));
        case Type::f16x2: case Type::bf16x2:
            return apply_half(op, type == Type::bf16x2, old & 0xFFFF, a & 0xFFFF) | apply_half(op, type == Type::bf16x2, old >> 16, a >> 16) << 16;
        default: return apply_integer<uint64_t>(op, old, a, b);
    }
}

Agent agent_of(const Warp& w, int32_t row) {
    return {&w.clock.order, w.clock.slot, w.clock.epoch, w.clock.self_from, row, int32_t(w.cta->linear), int16_t(w.index), false, kAnyLane, w.clock.synced, -1, &w.clock};
}

const Region* Engine::region_below(uint64_t address) const {
    auto it = std::upper_bound(config_.regions.begin(), config_.regions.end(), address,
                               [](uint64_t a, const Region& r) { return a < r.base; });
    return it == config_.regions.begin() ? nullptr : &*(it - 1);
}

bool Engine::is_allocated(uint64_t address, uint32_t bytes) const {
    const Region* below = region_below(address);
    return below && address + bytes <= below->base + below->bytes;
}

uint8_t* Engine::global_span(uint64_t address, uint32_t bytes) const {
    if (config_.check_bounds && !is_allocated(address, bytes)) {
        std::string text = std::to_string(bytes) + " bytes of global memory outside every allocation";
        const Region* const below = region_below(address);
        const Region* const above = below ? below + 1 : config_.regions.data();
        const bool has_above = above != config_.regions.data() + config_.regions.size() && above->base - address < kNear;
        const uint64_t over = below ? address + bytes - below->base - below->bytes : kNear;
        if (over < kNear && !(has_above && above->base - address < over))
            text += "; the nearest below is " + name_of(*below) + ", " + std::to_string(below->bytes) + " bytes, overrun by " + std::to_string(over);
        else if (has_above)
            text += "; the nearest above is " + name_of(*above) + ", which begins " + std::to_string(above->base - address) + " bytes later";
        else
            text += ", at " + hex(address) + ", far from all of them";
        fail(Check::OutOfBounds, text);
    }
    return on_host(address);
}

uint8_t* Engine::on_host(uint64_t address) const {
    const Region* const region = config_.moved ? region_below(address) : nullptr;
    return region && address < region->base + region->bytes ? region->data + (address - region->base) : reinterpret_cast<uint8_t*>(address);
}

Cta& Engine::shared_cta(const Warp& w, Space space, uint64_t address, uint32_t& offset) const {
    if (space == Space::Generic) {
        if ((address & kWindowMask) != kSharedBase) fail(Check::OutOfBounds, "address " + hex(address) + " is not in shared memory");
        address &= ~kWindowMask;
    }
    if ((address & kWindowMask) == kSharedBase) address &= ~kWindowMask;
    offset = uint32_t(address) & kSharedMask;
    const uint32_t rank = uint32_t(address) >> kRankShift;
    Cluster& cluster = *w.cta->cluster;
    if (rank >= cluster.ctas.size() || address >> 32)
        fail(Check::OutOfBounds, "shared address " + hex(address) + " names CTA rank " + std::to_string(rank) + " of a cluster of " +
                                std::to_string(cluster.ctas.size()));
    if (space == Space::Shared && rank != w.cta->rank)
        fail(Check::OutOfBounds, "shared::cta address " + hex(address) + " belongs to CTA rank " + std::to_string(rank) + ", not to " +
                                std::to_string(w.cta->rank));
    return *cluster.ctas[rank];
}

Span Engine::resolve(const Warp& w, Space space, uint64_t address, uint32_t bytes, int lane) const {
    Span s;
    if (space == Space::Generic) {
        const uint64_t window = address & kWindowMask;
        space = window == kSharedBase ? Space::SharedCluster : window == kParamBase ? Space::Param
              : window == kLocalBase ? Space::Local : Space::Global;
    }
    s.space = space;
    switch (space) {
        case Space::Global: case Space::Const:
            s.space = Space::Global;
            s.data = global_span(address, bytes);
            s.address = address;
            return s;
        case Space::Shared: case Space::SharedCluster: {
            Cta& cta = shared_cta(w, space, address, s.offset);
            if (s.offset < kSharedReserved || s.offset + bytes > cta.shared.size())
                fail(Check::OutOfBounds, "shared address " + hex(s.offset) + " (" + std::to_string(bytes) + " bytes) is outside the CTA's " +
                                        std::to_string(cta.shared.size() - kSharedReserved) + " bytes, which start at " + hex(kSharedReserved));
            s.space = Space::Shared;
            s.cta = &cta;
            s.data = cta.shared.data() + s.offset;
            s.shadow = cta.shadow.data() + s.offset;
            return s;
        }
        case Space::Param: {
            const uint64_t at = address & ~kWindowMask;
            if (at + bytes > config_.params.size()) fail(Check::OutOfBounds, "parameter byte " + std::to_string(at) + " is outside the parameters");
            s.data = const_cast<uint8_t*>(config_.params.data()) + at;
            return s;
        }
        default: {
            const uint64_t at = address & ~kWindowMask;
            if (at + bytes > program_.local_bytes) fail(Check::OutOfBounds, "local address " + std::to_string(at) + " is outside the thread's local memory");
            const size_t index = size_t(lane) * program_.local_bytes + at;
            s.data = const_cast<uint8_t*>(w.local.data()) + index;
            s.shadow = const_cast<uint8_t*>(w.local_valid.data()) + index;
            return s;
        }
    }
}

// Reports an undefined address. Returns the active lanes.
uint32_t Engine::address_check(Exec& x, uint32_t source) {
    const uint32_t bad = x.mask & ~x.valid(source);
    if (bad && config_.check_poison) note(Check::Uninitialized, "the address was never given a value");
    return x.mask;
}

void Engine::check_defined(const Span& s, uint32_t bytes, const char* what) {
    if (!s.shadow || !config_.check_poison) return;
    for (uint32_t i = 0; i < bytes; ++i)
        if (!(s.shadow[i] & Cta::kValid)) {
            note(Check::Uninitialized, std::string(what) + ": shared memory at " + hex(s.offset + i) + " was never written");
            return;
        }
}

void Engine::shared_write_check(const Span& s, uint32_t bytes) {
    if (!s.cta) return;
    for (uint32_t i = 0; i < bytes; i += 4)
        if (s.shadow[i] & Cta::kBarrier) {
            SimError error(Check::BarrierMisuse, "a write to " + hex(s.offset + i) + " overwrites a live mbarrier");
            error.barrier = program_.barrier((s.offset + i) & ~7u);
            throw error;
        }
}

// Shadow of what the lanes access in their own CTA's shared memory.
void Engine::prefetch_shadow(const Exec& x, Space space, int64_t offset, uint32_t bytes) const {
    if (!races_.enabled || (space != Space::Shared && space != Space::SharedCluster && space != Space::Generic)) return;
    for_lanes(x.mask, [&](int l) {
        const uint64_t address = x.value(0, l) + uint64_t(offset);
        if (space == Space::Generic && (address & kWindowMask) != kSharedBase) return;
        races_.prefetch(*x.w.cta, uint32_t(address) & kSharedMask, bytes);
    });
}

void Engine::load(Exec& x) {
    const Instr& in = x.in;
    const mod::Access& m = in.as<mod::Access>();
    const uint32_t n = uint32_t(m.count), size = element_bytes(in.type), bytes = n * size;
    const bool sign = in.type == Type::s8 || in.type == Type::s16 || in.type == Type::s32;
    address_check(x, 0);
    uint32_t valid[8];
    for (uint32_t& v : valid) v = ~0u;
    uint64_t seen = 14695981039346656037ull, where = 0, shared_bytes = 0, global_bytes = 0;
    const int semantics = int(m.semantics);
    Agent agent = agent_of(x.w, current_.row);
    prefetch_shadow(x, m.space, m.offset, bytes);
    for_lanes(x.mask, [&](int l) {
        const uint64_t address = x.value(0, l) + uint64_t(m.offset);
        if (address % bytes) fail(Check::Misaligned, "address " + address_name(address) + " is not a multiple of " + std::to_string(bytes));
        const Span s = resolve(x.w, m.space, address, bytes, l);
        if (s.cta) shared_bytes += bytes;
        else if (s.space == Space::Global) global_bytes += bytes;
        if (!where) where = place_key(s);
        if (races_.enabled) {
            agent.lane = int8_t(l);
            x.w.clock.touch(l, false);
            if (s.cta) races_.shared(agent, *s.cta, s.offset, bytes, semantics ? kAtomic : 0);
            else if (s.space == Space::Global) races_.global(agent, s.address, bytes, semantics ? kAtomic : 0);
            if (semantics) races_.flag_read(x.w.clock, place_key(s), semantics, int(m.scope), x.acquirers(l));
        }
        for (uint32_t i = 0; i < n; ++i) {
            if (!x.has_dst(i)) continue;
            const uint8_t* p = s.data + i * size;
            if (s.shadow && !Cta::defined(s.shadow + i * size, size)) valid[i] &= ~(1u << l);
            if (size == 16) {
                std::memcpy(x.dst(i) + 2 * l, p, 8);
                std::memcpy(x.dst(i) + 64 + 2 * l, p + 8, 8);
                for (int h = 0; h < 2; ++h) seen = (seen ^ get<uint64_t>(x.dst(i) + 64 * h, l)) * 1099511628211ull;
                continue;
            }
            uint64_t v = 0;
            std::memcpy(&v, p, size);
            seen = (seen ^ v) * 1099511628211ull;
            if (sign) v = uint64_t(int64_t(v << (64 - 8 * size)) >> (64 - 8 * size));
            if (x.op(i).bits == 64) put<uint64_t>(x.dst(i), l, v);
            else if (x.op(i).bits == 16) x.dst(i)[l] = uint32_t(v & 0xFFFF);
            else x.dst(i)[l] = uint32_t(v);
        }
    });
    for (uint32_t i = 0; i < n; ++i) x.set_valid(i, valid[i]);
    if (shared_bytes) counters.bytes["shared_load"] += shared_bytes;
    if (global_bytes) counters.bytes["global_load"] += global_bytes;
    const Look look{x.f.pc, 0, where, seen, bytes};
    if (semantics) poll(x, look);
    else if (global_bytes || shared_bytes) poll_weakly(x, look);
}

void Engine::store(Exec& x) {
    const Instr& in = x.in;
    const mod::Access& m = in.as<mod::Access>();
    const uint32_t n = uint32_t(m.count), size = element_bytes(in.type), bytes = n * size;
    address_check(x, 0);
    const int semantics = int(m.semantics);
    Agent agent = agent_of(x.w, current_.row);
    prefetch_shadow(x, m.space, m.offset, bytes);
    uint64_t shared_bytes = 0, global_bytes = 0;
    bool changed = false;
    for_lanes(x.mask, [&](int l) {
        const uint64_t address = x.value(0, l) + uint64_t(m.offset);
        if (address % bytes) fail(Check::Misaligned, "address " + address_name(address) + " is not a multiple of " + std::to_string(bytes));
        const Span s = resolve(x.w, m.space, address, bytes, l);
        shared_write_check(s, bytes);
        if (s.cta) shared_bytes += bytes;
        else if (s.space == Space::Global) global_bytes += bytes;
        else if (s.space == Space::Param) fail(Check::OutOfBounds, "a store to a kernel parameter");
        uint8_t raw[64];
        for (uint32_t i = 0; i < n; ++i) {
            if (size == 16) {
                std::memcpy(raw + 16 * i, x.src(1 + i) + 2 * l, 8);
                std::memcpy(raw + 16 * i + 8, x.src(1 + i) + 64 + 2 * l, 8);
            } else {
                const uint64_t v = x.value(1 + i, l);
                std::memcpy(raw + size * i, &v, size);
            }
        }
        if (races_.enabled) {
            const uint8_t kind = uint8_t(kWrite | (semantics ? kAtomic : 0));
            agent.lane = int8_t(l);
            x.w.clock.touch(l, true);
            if (s.cta) races_.shared(agent, *s.cta, s.offset, bytes, kind, {s.data, raw});
            else if (s.space == Space::Global) races_.global(agent, s.address, bytes, kind, {s.data, raw});
        }
        changed |= std::memcmp(s.data, raw, bytes) != 0;
        std::memcpy(s.data, raw, bytes);
        for (uint32_t i = 0; i < n; ++i) {
            const bool defined = x.valid(1 + i) >> l & 1;
            if (!defined && s.space == Space::Global && config_.check_poison)
                note(Check::Uninitialized, "a value that was never defined reaches global memory: " + address_name(s.address + i * size));
            if (s.shadow) std::memset(s.shadow + i * size, defined ? Cta::kValid : 0, size);
        }
    });
    if (semantics && races_.enabled)
        for_lanes(x.mask, [&](int l) {
            const Span s = resolve(x.w, m.space, x.value(0, l) + uint64_t(m.offset), bytes, l);
            races_.flag_write(x.w.clock, place_key(s), semantics, int(m.scope), 1u << l);
        });
    if (shared_bytes) counters.bytes["shared_store"] += shared_bytes;
    if (global_bytes) counters.bytes["global_store"] += global_bytes;
    if (changed) effect();
}

void Engine::atomic(Exec& x) {
    const Instr& in = x.in;
    const mod::Atomic& m = in.as<mod::Atomic>();
    const uint32_t n = uint32_t(m.count), size = element_bytes(in.type);
    const AtomicOp op = m.operation;
    const int semantics = int(m.semantics);
    const uint32_t per_element = op == AtomicOp::Cas ? 2 : 1;
    address_check(x, 0);
    prefetch_shadow(x, m.space, m.offset, n * size);
    bool changed = false;
    uint64_t seen = 14695981039346656037ull, where = 0;
    for_lanes(x.mask, [&](int l) {
        const uint64_t address = x.value(0, l) + uint64_t(m.offset);
        if (address % (n * size)) fail(Check::Misaligned, "address " + address_name(address) + " is not a multiple of " + std::to_string(n * size));
        const Span s = resolve(x.w, m.space, address, n * size, l);
        shared_write_check(s, n * size);
        const uint64_t key = place_key(s);
        if (!where) where = key;
        if (races_.enabled) {
            Agent agent = agent_of(x.w, current_.row);
            agent.lane = int8_t(l);
            x.w.clock.touch(l, true);
            if (s.cta) races_.shared(agent, *s.cta, s.offset, n * size, kWrite | kAtomic);
            else if (s.space == Space::Global) races_.global(agent, s.address, n * size, kWrite | kAtomic);
            if (in.op == Op::atom) races_.flag_read(x.w.clock, key, semantics, int(m.scope), x.acquirers(l));
            races_.flag_write(x.w.clock, key, semantics, int(m.scope), 1u << l);
        }
        for (uint32_t i = 0; i < n; ++i) {
            bool defined = true;
            for (uint32_t k = 0; k < per_element; ++k) defined &= (x.valid(1 + i * per_element + k) >> l) & 1;
            if (!defined && config_.check_poison) note(Check::Uninitialized, "an operand of an atomic operation was never defined");
            uint8_t* p = s.data + i * size;
            if (size == 16) {
                uint64_t old[2], a[2], b[2] = {};
                std::memcpy(old, p, 16);
                for (int h = 0; h < 2; ++h) {
                    a[h] = get<uint64_t>(x.src(1) + 64 * h, l);
                    if (op == AtomicOp::Cas) b[h] = get<uint64_t>(x.src(2) + 64 * h, l);
                    if (x.has_dst(0)) put<uint64_t>(x.dst(0) + 64 * h, l, old[h]);
                }
                const bool equal = old[0] == a[0] && old[1] == a[1];
                if (op == AtomicOp::Exch) std::memcpy(p, a, 16);
                else if (equal) std::memcpy(p, b, 16);
                changed |= op == AtomicOp::Exch || equal;
                for (const uint64_t half : old) seen = (seen ^ half) * 1099511628211ull;
                continue;
            }
            uint64_t old = 0;
            std::memcpy(&old, p, size);
            const uint64_t a = x.value(1 + i * per_element, l), b = per_element == 2 ? x.value(2 + i * 2, l) : 0;
            const uint64_t r = apply_atomic(in.type, op, old, a, b);
            std::memcpy(p, &r, size);
            changed |= std::memcmp(&old, &r, size) != 0;
            seen = (seen ^ old) * 1099511628211ull;
            if (i < in.ndst && x.has_dst(i)) {
                if (x.op(i).bits == 64) put<uint64_t>(x.dst(i), l, old);
                else x.dst(i)[l] = uint32_t(old);
            }
        }
    });
    for (uint32_t i = 0; i < in.ndst; ++i) x.set_valid(i, ~0u);
    counters.bytes["atomic"] += uint64_t(__builtin_popcount(x.mask)) * n * size;
    const Look look{x.f.pc, 0, where, seen, size};
    if (changed) effect();
    if (in.op == Op::atom) changed ? observe(x, look) : poll(x, look);
}

void Engine::matrix_fragment(Exec& x) {
    const Instr& in = x.in;
    const mod::Matrix& m = in.as<mod::Matrix>();
    const LdMatrixOp op{m.shape, uint8_t(m.count), m.trans};
    const uint32_t registers = ldmatrix_registers(op), rows = ldmatrix_rows(op);
    address_check(x, 0);
    uint8_t* pointers[32] = {};
    uint32_t row_valid = ~0u;
    const bool write = in.op == Op::stmatrix;
    Agent agent = agent_of(x.w, current_.row);
    agent.lane = kAllLanes;
    std::vector<SharedRange> ranges;
    Cta* home = nullptr;
    const auto touch = [&] {
        if (home) races_.shared(agent, &home, ranges, write);
        ranges.clear();
    };
    for (uint32_t t = 0; t < rows; ++t) {
        const uint64_t address = x.value(0, int(t)) + uint64_t(m.offset);
        if (address % kMatrixRowBytes) fail(Check::Misaligned, "row address " + hex(address) + " of thread " + std::to_string(t) + " is not a multiple of 16");
        const Span s = resolve(x.w, m.space, address, kMatrixRowBytes, int(t));
        if (!s.cta) fail(Check::OutOfBounds, "ldmatrix and stmatrix work on shared memory");
        if (write) shared_write_check(s, kMatrixRowBytes);
        if (s.cta != home) touch();
        home = s.cta;
        ranges.push_back({s.offset, kMatrixRowBytes, 0, write});
        pointers[t] = s.data;
        if (!write && !Cta::defined(s.shadow, kMatrixRowBytes)) row_valid &= ~(1u << t);
        if (write) std::memset(s.shadow, Cta::kValid, kMatrixRowBytes);
    }
    touch();
    counters.bytes[write ? "shared_store" : "shared_load"] += rows * kMatrixRowBytes;
    uint32_t* regs[16];
    if (write) {
        const uint32_t* sources[16];
        for (uint32_t i = 0; i < registers; ++i) sources[i] = x.src(1 + i);
        stmatrix_execute(op, pointers, sources);
        // If a lane's register is undefined, the row it writes becomes undefined: register i of lane l belongs to row l
        // / 4 of matrix i.
        for (uint32_t i = 0; i < registers; ++i) {
            const uint32_t bad = ~x.valid(1 + i);
            for (uint32_t l = 0; bad && l < 32; ++l) {
                if (!(bad >> l & 1)) continue;
                const uint32_t row = op.trans ? 2 * (l % 4) : l / 4;
                Span s = resolve(x.w, m.space, x.value(0, int((8 * i + row) % rows)) + uint64_t(m.offset), 16, 0);
                std::memset(s.shadow, 0, 16);
            }
        }
        effect();
        return;
    }
    for (uint32_t i = 0; i < registers; ++i) regs[i] = x.dst(i);
    ldmatrix_execute(op, pointers, regs);
    for (uint32_t i = 0; i < registers; ++i) {
        uint32_t valid = ~0u;
        if (row_valid != ~0u) {
            for (uint32_t l = 0; l < 32; ++l) {
                const bool plain = op.shape == MatrixShape::M8N8B16;
                const uint32_t first = 8 * i + (plain && !op.trans ? l / 4 : 2 * (l % 4));
                const bool good = plain ? (row_valid >> (first % 32) & 1) && (!op.trans || (row_valid >> ((first + 1) % 32) & 1)) : false;
                if (!good) valid &= ~(1u << l);
            }
        }
        x.set_valid(i, valid);
    }
}

// Records an access for the clock: bytes, sectors of global memory, and passes over the banks of shared memory.
void Engine::note_access(Exec& x) {
    const Instr& in = x.in;
    const bool matrix = in.op == Op::ldmatrix || in.op == Op::stmatrix;
    const bool atomic = in.op == Op::atom || in.op == Op::red;
    if (!matrix && !atomic && in.op != Op::ld && in.op != Op::st) return;
    Space space;
    int offset;
    uint32_t bytes, lanes = x.mask;
    if (matrix) {
        const mod::Matrix& m = in.as<mod::Matrix>();
        space = m.space, offset = m.offset, bytes = kMatrixRowBytes;
        lanes = uint32_t((uint64_t(1) << ldmatrix_rows({m.shape, uint8_t(m.count), m.trans})) - 1);
    } else {
        const auto access = [&](const auto& m) { space = m.space, offset = m.offset, bytes = uint32_t(m.count) * element_bytes(in.type); };
        if (atomic) access(in.as<mod::Atomic>());
        else access(in.as<mod::Access>());
    }
    Coalescer shared, global;
    int64_t home = x.w.cta->linear;
    for_lanes(lanes, [&](int l) {
        const uint64_t address = x.value(0, l) + uint64_t(offset);
        const Span s = resolve(x.w, space, address, bytes, l);
        if (s.cta) shared.add(s.offset, bytes), home = s.cta->linear;
        else if (s.space == Space::Global) global.add(s.address, bytes);
    });
    if (!shared.empty()) x.w.timed->note(Timed::Shared, shared.bytes(), shared.passes(), home);
    if (!global.empty()) x.w.timed->note(Timed::Global, global.bytes(), global.sectors(), global.first(), atomic ? 2 : in.op == Op::st);
}

Next Engine::memory(Exec& x) {
    if (x.w.timed) note_access(x);
    switch (x.in.op) {
        case Op::ld: load(x); break;
        case Op::st: store(x); break;
        case Op::atom: case Op::red: atomic(x); break;
        case Op::fence:
            if (x.in.as<mod::Fence>().barrier_init) races_.barrier_init_fence(x.w.clock);
            else races_.fence(x.w.clock, int(x.in.as<mod::Fence>().semantics), int(x.in.as<mod::Fence>().scope), x.mask);
            break;
        case Op::fence_proxy: {
            const mod::ProxyFence& m = x.in.as<mod::ProxyFence>();
            if (m.kind == ProxyKind::Async) races_.proxy_fence(x.w.clock, m.global, m.shared, x.mask);
            if (m.kind == ProxyKind::Tensormap) races_.tensormap_fence(x.w.clock, int(m.semantics), x.mask);
            break;
        }
        case Op::prefetch: case Op::nop: break;
        case Op::createpolicy:
            for_lanes(x.mask, [&](int l) { put<uint64_t>(x.dst(), l, 0x12F0000000000000ull); });
            x.set_valid(0, ~0u);
            break;
        case Op::mapa:
            for_lanes(x.mask, [&](int l) {
                // A rank outside the cluster is an error only when the address is used.
                const uint64_t a = x.value(0, l), rank = x.value(1, l) & 0xFF;
                const uint64_t moved = (a & ~uint64_t(0xFF000000u)) | rank << kRankShift;
                if (x.op(0).bits == 64) put<uint64_t>(x.dst(), l, moved);
                else x.dst()[l] = uint32_t(moved);
            });
            x.set_valid(0, x.valid(0) & x.valid(1));
            break;
        case Op::getctarank:
            for_lanes(x.mask, [&](int l) { x.dst()[l] = uint32_t(x.value(0, l) >> kRankShift & 0xFF); });
            x.set_valid(0, x.valid(0));
            break;
        case Op::ldmatrix: case Op::stmatrix: matrix_fragment(x); break;
        case Op::movmatrix:
            movmatrix_execute(x.src(0), x.dst());
            x.set_valid(0, x.valid(0) == ~0u ? ~0u : 0);
            break;
        case Op::st_bulk: {
            const Span s = resolve(x.w, Space::Generic, x.value(0, x.first_lane()) + uint64_t(x.in.as<mod::BulkFill>().offset), uint32_t(x.value(1, x.first_lane())), 0);
            const uint32_t bytes = uint32_t(x.value(1, x.first_lane()));
            shared_write_check(s, bytes);
            races_.shared(agent_of(x.w, current_.row), *s.cta, s.offset, bytes, kWrite);
            std::memset(s.data, 0, bytes);
            std::memset(s.shadow, Cta::kValid, bytes);
            effect();
            break;
        }
        case Op::tensormap_replace: {
            const mod::MapField& m = x.in.as<mod::MapField>();
            const int l = x.first_lane();
            const Span s = resolve(x.w, m.space, x.value(0, l) + uint64_t(m.offset), 128, l);
            tensormap_replace(s.data, m.field, uint32_t(m.ordinal), x.value(1, l));
            effect();
            break;
        }
        case Op::tensormap_cp: {
            const mod::MapCopy& m = x.in.as<mod::MapCopy>();
            const int l = x.first_lane();
            const uint32_t bytes = uint32_t(m.bytes);
            const Span to = resolve(x.w, Space::Generic, x.value(0, l) + uint64_t(m.to_offset), bytes, l);
            const uint64_t from_address = x.value(1, l) + uint64_t(m.from_offset);
            const Span from = resolve(x.w, from_address >> 32 ? Space::Generic : Space::Shared, from_address, bytes, l);
            std::memcpy(to.data, from.data, bytes);
            effect();
            break;
        }
        default: return Next::Stay;
    }
    return Next::Advance;
}

}  // namespace warpcheck
