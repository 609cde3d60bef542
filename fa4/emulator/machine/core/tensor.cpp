// Tensor cores: tcgen05, wgmma and mma.sync. PTX ISA 9.7.14 - 9.7.16.
#include <utility>

#include "engine.hpp"
#include "lanes.hpp"
#include "mma_sync.hpp"
#include "tmem.hpp"
#include "umma.hpp"
#include "wgmma.hpp"

namespace fa4 {
namespace {

// N and M in the instruction descriptor, whatever the kind.
constexpr uint32_t kShapeBits = 0x3Fu << 17 | 0x1Fu << 24;

uint64_t warpgroup_key(const Cta& cta, uint32_t group) { return uint64_t(1) << 62 | uint64_t(cta.linear) << 8 | group; }

CtaMemory memory_of(Cta& cta) {
    return {cta.shared.data(), uint32_t(cta.shared.size()), cta.sm->tmem.empty() ? nullptr : cta.sm->tmem.data()};
}

// The first aligned run of columns that is free on an SM, and on its peer's where there is one; -1 if there is none.
int32_t find_columns(const Sm& sm, const Sm* peer, uint32_t columns) {
    for (uint32_t start = 0; start + columns <= kTmemColumns; start += columns) {
        bool free = true;
        for (uint32_t c = start; c < start + columns; ++c) free &= !sm.tmem_taken[c] && !(peer && peer->tmem_taken[c]);
        if (free) return int32_t(start);
    }
    return -1;
}

// Fresh columns hold poison.
void take_columns(Cta& cta, uint32_t start, uint32_t columns) {
    Sm& sm = *cta.sm;
    cta.tmem_allocations[start] = columns;
    if (sm.tmem.empty()) {
        sm.tmem.resize(kTmemLanes * kTmemColumns, 0xFFFFFFFFu);
        sm.tmem_valid.resize(kTmemLanes * kTmemColumns, 0);
    }
    for (uint32_t c = start; c < start + columns; ++c) sm.tmem_owner[c] = &cta, sm.tmem_taken[c] = true;
    for (uint32_t lane = 0; lane < kTmemLanes; ++lane) {
        const size_t first = lane * kTmemColumns + start;
        std::fill_n(sm.tmem.begin() + long(first), columns, 0xFFFFFFFFu);
        std::fill_n(sm.tmem_valid.begin() + long(first), columns, 0);
        if (!sm.races.cells.empty()) std::fill_n(sm.races.cells.begin() + long(first), columns, Cell<4>());
    }
}

}  // namespace

void Engine::check_tmem(const Cta& cta, const TmemRect& r) {
    if (!config_.check_tmem) return;
    if (r.lane + r.lanes > kTmemLanes || r.column + r.columns > kTmemColumns)
        fail(Check::TmemMisuse, "TMEM lanes " + std::to_string(r.lane) + "+" + std::to_string(r.lanes) + ", columns " + std::to_string(r.column) +
                               "+" + std::to_string(r.columns) + " lie outside tensor memory");
    for (uint32_t c = r.column; c < uint32_t(r.column + r.columns); ++c)
        if (cta.sm->tmem_owner[c] != &cta) {
            const std::string text = "TMEM column " + std::to_string(c) + " is not allocated to this CTA (accessed: columns " +
                                     std::to_string(r.column) + ".." + std::to_string(r.column + r.columns - 1) + ")";
            if (cta.sm->tmem.empty()) fail(Check::TmemMisuse, text);
            note(Check::TmemMisuse, text);
            return;
        }
}

Next Engine::tmem_alloc(Exec& x) {
    Cta& cta = *x.w.cta;
    if (!config_.has_tmem) stop(Check::UnknownInstruction, "this chip has no tensor memory");
    const uint32_t columns = uint32_t(x.value(1, x.first_lane()));
    if (columns < 32 || columns > kTmemColumns || (columns & (columns - 1)))
        fail(Check::TmemMisuse, "tcgen05.alloc of " + std::to_string(columns) + " columns: expected a power of two in 32..512");
    if (cta.relinquished) fail(Check::TmemMisuse, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    Cta* peer = nullptr;
    if (x.in.m[0] == 2) {       // collective: both CTAs of the pair get the same columns, once both have come
        if ((cta.rank ^ 1) >= cta.cluster->ctas.size()) fail(Check::TmemMisuse, "cta_group::2 without a peer CTA");
        peer = cta.cluster->ctas[cta.rank ^ 1].get();
    }
    int32_t start = std::exchange(cta.tmem_granted, -1);
    if (start < 0 && (!peer || peer->tmem_request == columns)) {
        start = find_columns(*cta.sm, peer ? peer->sm : nullptr, columns);
        if (start >= 0) {
            take_columns(cta, uint32_t(start), columns);
            if (peer) {
                take_columns(*peer, uint32_t(start), columns);
                peer->tmem_granted = start;
                peer->tmem_request = 0;
            }
        }
    }
    if (start < 0) {
        uint32_t held = columns;
        for (auto& a : cta.tmem_allocations) held += a.second;
        if (cta.sm->ctas == 1 && held > kTmemColumns)
            fail(Check::TmemMisuse, "tcgen05.alloc of " + std::to_string(columns) + " columns while the CTA already holds " + std::to_string(held - columns));
        if (peer) cta.tmem_request = columns;
        x.f.wait = Wait::TmemAlloc;
        x.f.poll_epoch = epoch_;
        return Next::Stay;
    }
    const uint64_t address = x.value(0, x.first_lane()) + uint64_t(x.in.m[1]);
    const Span s = resolve(x.w, x.in.m[2] ? Space(x.in.m[2]) : Space::Generic, address, 4, x.first_lane());
    shared_write_check(s, 4);
    races_.shared(agent_of(x.w, current_.row), *s.cta, s.offset, 4, kWrite);
    std::memcpy(s.data, &start, 4);
    std::memset(s.shadow, Cta::kValid, 4);
    effect();
    return Next::Advance;
}

void Engine::tmem_dealloc(Exec& x) {
    Cta& cta = *x.w.cta;
    const uint32_t column = TmemAddress(uint32_t(x.value(0, 0))).column, columns = uint32_t(x.value(1, 0));
    const auto found = cta.tmem_allocations.find(column);
    if (found == cta.tmem_allocations.end() || found->second != columns)
        fail(Check::TmemMisuse, "tcgen05.dealloc of columns " + std::to_string(column) + "+" + std::to_string(columns) + ", which is no allocation of this CTA");
    if (races_.enabled && config_.check_leftovers) {    // all uses must be over
        drain(cta);
        races_.end_of_tmem(agent_of(x.w, current_.row), *cta.sm, {0, kTmemLanes, uint16_t(column), uint16_t(columns), 0, true});
    }
    cta.tmem_allocations.erase(found);
    for (uint32_t c = column; c < column + columns; ++c) cta.sm->tmem_taken[c] = false;
    effect();
}

void Engine::tmem_ld_st(Exec& x) {
    Warp& w = x.w;
    const bool is_load = x.in.op == Op::tmem_ld;
    if (x.mask & ~x.valid(0) && config_.check_poison) note(Check::Uninitialized, "the TMEM address was never given a value");
    TmemAccess access{TmemShape(x.in.m[0]), uint16_t(x.in.m[1]), bool(x.in.m[2]), uint32_t(x.value(0, x.first_lane()) + uint64_t(x.in.m[3])), uint32_t(x.in.m[4])};
    for_lanes(x.mask, [&](int l) {
        if (x.value(0, l) != x.value(0, x.first_lane())) fail(Check::IllegalInstruction, "the TMEM address differs among the lanes of the warp");
    });
    auto rects = std::make_shared<std::vector<TmemRect>>();
    tmem_footprint(access, !is_load, *rects);
    for (const TmemRect& r : *rects) {
        check_tmem(*w.cta, r);
        const uint32_t quarter = w.index % 4 * 32;
        if (config_.check_tmem && (r.lane < quarter || r.lane + r.lanes > quarter + 32))
            note(Check::TmemMisuse, "warp " + std::to_string(w.index) + " may access TMEM lanes " + std::to_string(quarter) + ".." +
                                   std::to_string(quarter + 31) + ", not " + std::to_string(r.lane) + ".." + std::to_string(r.lane + r.lanes - 1));
    }
    const uint32_t n = tmem_registers(access);
    if (n != (is_load ? x.in.ndst : x.sources() - 1)) fail(Check::IllegalInstruction, "the number of registers does not fit the shape");
    AsyncPtr op = make_op(x, is_load ? "tcgen05.ld" : "tcgen05.st");
    AsyncOp* self = op.get();
    count_bytes(is_load ? "tmem_load" : "tmem_store", uint64_t(n) * 128);
    if (is_load) {
        std::vector<Operand> regs(x.ops, x.ops + n);
        for (const Operand& o : regs) {
            if (o.kind != Operand::Reg) continue;
            op->registers.push_back(o.id);
            w.in_flight[size_t(o.id)] = 1;
            w.valid[size_t(o.id)] = 0;
        }
        if (!op->registers.empty()) ++w.pending_loads;
        op->steps.push_back([this, self, &w, access, regs, rects] {
            Sm& sm = *w.cta->sm;
            bool all = true;
            for (const TmemRect& r : *rects) {
                races_.tmem(agent(*self, false), sm, r, 0);
                for (uint32_t lane = r.lane; lane < uint32_t(r.lane + r.lanes); ++lane)
                    for (uint32_t c = r.column; c < uint32_t(r.column + r.columns); ++c) all &= sm.tmem_valid[lane * kTmemColumns + c] != 0;
            }
            std::vector<uint32_t> sink(32);
            std::vector<uint32_t*> pointers;
            for (const Operand& o : regs) pointers.push_back(o.kind == Operand::Reg ? w.regs.data() + o.offset : sink.data());
            tmem_load(access, sm.tmem.data(), pointers.data());
            for (uint32_t r = 0; r < regs.size(); ++r) {
                if (regs[r].kind != Operand::Reg) continue;
                uint32_t valid = ~0u;
                if (!all)
                    for (uint32_t t = 0; t < 32; ++t) {
                        const TmemCell cell = tmem_cell(access, r, t);
                        const uint8_t* v = sm.tmem_valid.data() + cell.lane * kTmemColumns + cell.column;
                        if (!v[0] || (access.pack16 && !v[1])) valid &= ~(1u << t);
                    }
                w.valid[size_t(regs[r].id)] = valid;
            }
        });
    } else {
        auto values = std::make_shared<std::vector<uint32_t>>(32 * n);
        auto valid = std::make_shared<std::vector<uint32_t>>(n);
        for (uint32_t r = 0; r < n; ++r) {
            std::memcpy(values->data() + 32 * r, x.src(1 + r), 128);
            (*valid)[r] = x.valid(1 + r);
        }
        op->steps.push_back([this, self, &w, access, values, valid, rects, n] {
            Sm& sm = *w.cta->sm;
            for (const TmemRect& r : *rects) races_.tmem(agent(*self, true), sm, r, kWrite);
            std::vector<const uint32_t*> pointers;
            for (uint32_t r = 0; r < n; ++r) pointers.push_back(values->data() + 32 * r);
            tmem_store(access, sm.tmem.data(), pointers.data());
            for (uint32_t r = 0; r < n; ++r)
                for (uint32_t t = 0; t < 32; ++t) {
                    const TmemCell cell = tmem_cell(access, r, t);
                    uint8_t* v = sm.tmem_valid.data() + cell.lane * kTmemColumns + cell.column;
                    v[0] = (*valid)[r] >> t & 1;
                    if (access.pack16) v[1] = v[0];
                }
        });
    }
    w.tmem_ops[is_load ? 0 : 1].push_back(op);
    submit(op);
}

// Races and poison of a matrix operation's operands. `poison` collects, when given, what makes whole results undefined:
// [0] any shared operand; [1 + lane + 128 * cta] a lane of an operand in TMEM.
void Engine::check_operands(const AsyncOp& op, Cta* const* ctas, const Footprint& footprint, std::vector<uint8_t>* poison) {
    for (const SharedRange& r : footprint.shared) {
        Cta& cta = *ctas[r.cta];
        if (r.offset < kSharedReserved || r.offset + r.bytes > cta.shared.size())
            fail(Check::OutOfBounds, "a matrix operand covers shared bytes " + hex(r.offset) + "+" + hex(r.bytes) + ", outside the CTA's shared memory");
        races_.shared(agent(op, r.write), cta, r.offset, r.bytes, r.write ? kWrite : 0);
        if (!poison || r.write || !config_.check_poison) continue;
        const uint8_t* v = cta.shadow.data() + r.offset;
        for (uint32_t i = 0; i < r.bytes; ++i)
            if (!(v[i] & Cta::kValid)) {
                (*poison)[0] = 1;
                break;
            }
    }
    for (const TmemRect& r : footprint.tmem) {
        Cta& cta = *ctas[r.cta];
        check_tmem(cta, r);
        races_.tmem(agent(op, r.write), *cta.sm, r, r.write ? kWrite : 0);
    }
}

void Engine::umma(Exec& x) {
    const Instr& in = x.in;
    for (uint32_t i = 0; i < 5; ++i)
        if (x.mask & ~x.valid(i) && config_.check_poison) note(Check::Uninitialized, "an operand of tcgen05.mma was never given a value");
    for_lanes(x.mask, [&](int l) {
        UmmaOp u{};
        u.kind = MmaKind(in.m[1]);
        u.cta_group = uint8_t(in.m[0]);
        u.a_in_tmem = in.m[2] & 1;
        u.weight_stationary = in.m[2] & 2;
        u.scale_vector = uint8_t(in.m[3]);
        u.scale_d = in.m[4] < 0 ? 0 : uint8_t(in.m[4]);
        u.d_tmem = uint32_t(x.value(0, l) + uint64_t(in.m[5]));
        if (u.a_in_tmem) u.a_tmem = uint32_t(x.value(1, l) + uint64_t(in.m[6]));
        else u.a_desc = x.value(1, l);
        u.b_desc = x.value(2, l);
        u.idesc = uint32_t(x.value(3, l));
        u.accumulate = x.pred(4) >> l & 1;
        if (x.has(5)) u.scale_a_tmem = uint32_t(x.value(5, l)), u.scale_b_tmem = uint32_t(x.value(6, l));
        if (in.m[2] & 4)
            for (uint32_t i = 0; 7 + i < x.sources() && i < 8; ++i) u.disable_lane[i] = uint32_t(x.value(7 + i, l));
        Cta& cta = *x.w.cta;
        std::array<Cta*, 2> ctas = {&cta, &cta};
        if (u.cta_group == 2) {
            if ((cta.rank | 1) >= cta.cluster->ctas.size()) fail(Check::IllegalInstruction, "cta_group::2 without a peer CTA");
            ctas = {cta.cluster->ctas[cta.rank & ~1u].get(), cta.cluster->ctas[cta.rank | 1].get()};
        }
        counters.mma_flops += umma_flops(u);
        AsyncPtr op = make_tensor_op(x, "tcgen05.mma", l, TensorKind::Mma, u.cta_group, {u.d_tmem, u.idesc & kShapeBits});
        AsyncOp* self = op.get();
        op->steps.push_back([this, self, u, ctas] {
            Footprint footprint;
            umma_footprint(u, footprint);
            for (const SharedRange& r : footprint.shared) count_bytes("mma_shared", r.bytes);
            std::vector<uint8_t> poison(257, 0);
            check_operands(*self, ctas.data(), footprint, &poison);
            // A read rectangle that no write rectangle covers is an operand; its poison spoils its lanes.
            std::vector<TmemRect> results;
            for (const TmemRect& r : footprint.tmem)
                if (r.write) results.push_back(r);
            for (const TmemRect& r : footprint.tmem) {
                if (r.write) continue;
                bool accumulator = false;
                for (const TmemRect& d : results) accumulator |= d.cta == r.cta && d.column == r.column && d.lane == r.lane && d.columns == r.columns;
                if (accumulator) continue;
                for (uint32_t lane = r.lane; lane < uint32_t(r.lane + r.lanes); ++lane)
                    for (uint32_t c = r.column; c < uint32_t(r.column + r.columns); ++c)
                        if (!ctas[r.cta]->sm->tmem_valid[lane * kTmemColumns + c]) poison[1 + lane + 128 * r.cta] = 1;
            }
            const CtaMemory memories[2] = {memory_of(*ctas[0]), memory_of(*ctas[1])};
            umma_execute(u, memories);
            for (const TmemRect& r : results)
                for (uint32_t lane = r.lane; lane < uint32_t(r.lane + r.lanes); ++lane) {
                    if (u.disable_lane[r.cta * 4 + lane / 32] >> (lane % 32) & 1) continue;
                    const bool bad = poison[0] || poison[1 + lane + 128 * r.cta];
                    uint8_t* v = ctas[r.cta]->sm->tmem_valid.data() + lane * kTmemColumns + r.column;
                    for (uint32_t c = 0; c < r.columns; ++c) v[c] = !bad && (!u.accumulate || v[c]);
                }
        });
        submit(op);
    });
}

void Engine::umma_commit(Exec& x) {
    const Instr& in = x.in;
    for_lanes(x.mask, [&](int l) {
        uint32_t offset;
        Cta& home = shared_cta(x.w, in.m[2] ? Space::SharedCluster : Space::Generic, x.value(0, l) + uint64_t(in.m[1]), offset);
        std::vector<Cta*> targets = {&home};
        if (x.has(1)) {
            targets.clear();
            const uint32_t mask = uint32_t(x.value(1, l));
            for (auto& c : x.w.cta->cluster->ctas)
                if (mask >> c->rank & 1) targets.push_back(c.get());
        }
        AsyncPtr op = make_tensor_op(x, "tcgen05.commit", l, TensorKind::Commit, uint32_t(in.m[0]));
        AsyncOp* self = op.get();
        op->steps.push_back([this, self, targets, offset] {
            for (Cta* cta : targets) arrive(*cta, offset, *self);
        });
        submit(op);
    });
}

void Engine::tmem_copy_shift(Exec& x) {
    const Instr& in = x.in;
    for_lanes(x.mask, [&](int l) {
        Cta& cta = *x.w.cta;
        std::array<Cta*, 2> ctas = {&cta, &cta};
        if (in.m[0] == 2) ctas = {cta.cluster->ctas.at(cta.rank & ~1u).get(), cta.cluster->ctas.at(cta.rank | 1).get()};
        const uint32_t address = uint32_t(x.value(0, l) + uint64_t(in.m[1]));
        AsyncPtr op = in.op == Op::tmem_cp ? make_tensor_op(x, "tcgen05.cp", l, TensorKind::Copy, uint32_t(in.m[0]))
                                           : make_tensor_op(x, "tcgen05.shift", l, TensorKind::Shift, uint32_t(in.m[0]));
        AsyncOp* self = op.get();
        const bool copy = in.op == Op::tmem_cp;
        TmemCopyOp c{};
        TmemShiftOp s{uint8_t(in.m[0]), address};
        if (copy) c = {TmemCopyShape(in.m[2]), TmemCopyFormat(in.m[3]), uint8_t(in.m[0]), address, x.value(1, l)};
        op->steps.push_back([this, self, copy, c, s, ctas] {
            Footprint footprint;
            copy ? tmem_copy_footprint(c, footprint) : tmem_shift_footprint(s, footprint);
            std::vector<uint8_t> poison(257, 0);
            check_operands(*self, ctas.data(), footprint, &poison);
            const CtaMemory memories[2] = {memory_of(*ctas[0]), memory_of(*ctas[1])};
            copy ? tmem_copy_execute(c, memories) : tmem_shift_execute(s, memories);
            for (const TmemRect& r : footprint.tmem)
                for (uint32_t lane = r.lane; r.write && lane < uint32_t(r.lane + r.lanes); ++lane)
                    std::memset(ctas[r.cta]->sm->tmem_valid.data() + lane * kTmemColumns + r.column, poison[0] ? 0 : 1, r.columns);
        });
        submit(op);
    });
}

void Engine::mma_sync(Exec& x) {
    const Instr& in = x.in;
    const auto type = [&](int i) { return MmaType(in.m[3] >> (8 * i) & 0xFF); };
    MmaSyncOp op{};
    op.m = uint16_t(in.m[0]), op.n = uint16_t(in.m[1]), op.k = uint16_t(in.m[2]);
    op.d_type = type(0), op.a_type = type(1), op.b_type = type(2), op.c_type = type(3);
    op.saturate = in.m[4] & 1;
    op.containers = in.m[4] & 8;
    op.arch = config_.arch;
    if (in.m[4] & 6) stop(Check::UnknownInstruction, "mma.sync with A column-major or B row-major");
    const uint32_t na = in.m[5] & 0xFF, nb = in.m[5] >> 8 & 0xFF, nc = in.m[5] >> 16 & 0xFF, nd = in.ndst;
    const bool wide = op.d_type == MmaType::F64;
    // binary64 registers are split into the two words that the unit expects.
    std::vector<std::array<uint32_t, 32>> words;
    words.reserve(2 * (na + nb + nc + nd));
    auto gather = [&](uint32_t first, uint32_t n) {
        std::vector<const uint32_t*> rows;
        for (uint32_t i = 0; i < n; ++i) {
            if (!wide) {
                rows.push_back(x.src(first + i));
                continue;
            }
            for (int h = 0; h < 2; ++h) {
                words.emplace_back();
                for (int l = 0; l < 32; ++l) words.back()[size_t(l)] = x.src(first + i)[2 * l + h];
                rows.push_back(words.back().data());
            }
        }
        return rows;
    };
    const auto a = gather(0, na), b = gather(na, nb), c = gather(na + nb, nc);
    std::vector<std::array<uint32_t, 32>> results(wide ? 2 * nd : nd);
    std::vector<uint32_t*> d;
    for (auto& r : results) d.push_back(r.data());
    mma_sync_execute(op, a.data(), b.data(), c.data(), d.data());
    counters.mma_flops += 2ull * op.m * op.n * op.k;
    // Poison: row l / 4 (and + 8) of A and C, column l / 4 of B.
    uint32_t a_bad[2] = {}, b_bad = 0;
    bool any = false;
    const uint32_t row_pairs = op.m == 16 ? 2 : 1;
    for (uint32_t i = 0; i < na; ++i) a_bad[i % row_pairs] |= ~x.valid(i);
    for (uint32_t i = 0; i < nb; ++i) b_bad |= ~x.valid(na + i);
    any = a_bad[0] || a_bad[1] || b_bad;
    for (uint32_t i = 0; i < nd; ++i) {
        uint32_t valid = nc == nd ? x.valid(na + nb + i) : ~0u;
        if (any) {
            const uint32_t half = row_pairs == 2 ? (nd == 4 ? i / 2 : i % 2) : 0;
            for (uint32_t l = 0; l < 32; ++l) {
                const uint32_t quad = 0xFu << (l / 4 * 4);
                const uint32_t columns = 0xFFu << (l % 4 * 8);
                if ((a_bad[half] & quad) || (b_bad & columns)) valid &= ~(1u << l);
            }
        }
        if (wide) for (int l = 0; l < 32; ++l) x.dst(i)[2 * l] = results[2 * i][size_t(l)], x.dst(i)[2 * l + 1] = results[2 * i + 1][size_t(l)];
        else std::memcpy(x.dst(i), results[i].data(), 128);
        x.set_valid(i, valid);
    }
}

Next Engine::wgmma(Exec& x) {
    const Instr& in = x.in;
    Warp& w = x.w;
    Cta& cta = *w.cta;
    const uint32_t group = w.index / 4;
    switch (in.op) {
        case Op::wgmma_fence: ++w.fence_epoch; return Next::Advance;
        case Op::wgmma_commit:
            w.wgmma_groups.push_back(std::move(w.wgmma_open));
            w.wgmma_open.clear();
            return Next::Advance;
        case Op::wgmma_wait: {
            const size_t keep = size_t(in.m[0]);
            for (size_t i = 0; i + keep < w.wgmma_groups.size(); ++i)
                for (AsyncPtr& op : w.wgmma_groups[i])
                    if (op->steps.empty() && op->next == 0 && op->registers.empty()) {      // not issued by all warps yet
                        x.f.wait = Wait::Warpgroup;
                        x.f.poll_epoch = epoch_;
                        return Next::Stay;
                    }
            while (w.wgmma_groups.size() > keep) {
                for (AsyncPtr& op : w.wgmma_groups.front()) {
                    force(*op);
                    join_completed(w, *op);
                    for (int32_t id : op->registers) w.in_flight[size_t(id)] = 0;
                }
                w.wgmma_groups.pop_front();
            }
            for (auto& g : w.wgmma_groups)
                for (AsyncPtr& op : g)
                    for (int32_t id : op->registers) w.in_flight[size_t(id)] = 2;
            for (AsyncPtr& op : w.wgmma_open)
                for (int32_t id : op->registers) w.in_flight[size_t(id)] = 2;
            return Next::Advance;
        }
        default: break;
    }
    const bool a_in_registers = in.m[2] & 1;
    const uint32_t nd = in.ndst, na = a_in_registers ? x.sources() - 2 : 1;
    if (cta.warpgroups.size() <= group) {
        cta.warpgroups.resize(group + 1);
        cta.warpgroup_base.resize(group + 1, 0);
    }
    auto& open = cta.warpgroups[group];
    const uint32_t number = w.wgmma_issued++ - cta.warpgroup_base[group];
    while (open.size() <= number) open.push_back(std::make_shared<WgmmaSlot>());
    const std::shared_ptr<WgmmaSlot> slot = open[number];
    if (!slot->op) {
        slot->op = make_op(x, "wgmma", warpgroup_key(cta, group));
        slot->row = current_.row;
        slot->a_desc = x.value(0, 0);
        slot->b_desc = x.value(na, 0);
        slot->accumulate = x.pred(na + 1) & 1;
    } else {
        if (slot->row != current_.row) fail(Check::Divergent, "the warps of a warpgroup execute different wgmma instructions");
        if (races_.enabled) races_.release(w.clock, slot->op->order, x.mask);
    }
    for (uint32_t i = 0; i < na + 2; ++i)
        if (!a_in_registers || i >= na)
            if (~x.valid(i) && config_.check_poison) note(Check::Uninitialized, "an operand of wgmma was never given a value");
    // Registers written since the last wgmma.fence are not visible to the tensor core.
    const auto fenced = [&](const Operand& o) {
        if (o.kind == Operand::Reg && w.written_at[size_t(o.id)] == w.fence_epoch && config_.check_races)
            note(Check::WgmmaFence, "a register of wgmma was written after the last wgmma.fence; needs wgmma.fence between");
    };
    for (uint32_t i = 0; i < nd; ++i) {
        fenced(x.op(i));
        w.in_flight[size_t(x.op(i).id)] = 2;
    }
    for (uint32_t i = 0; a_in_registers && i < na; ++i) {
        fenced(x.source(i));
        if (x.source(i).kind == Operand::Reg) w.in_flight[size_t(x.source(i).id)] = 2;
    }
    slot->warps[w.index % 4] = &w;
    w.wgmma_open.push_back(slot->op);
    if (++slot->issued < 4) return Next::Advance;
    open.pop_front();
    ++cta.warpgroup_base[group];

    WgmmaOp g{};
    const auto type = [&](int i) { return MmaType(in.m[1] >> (8 * i) & 0xFF); };
    g.d_type = type(0), g.a_type = type(1), g.b_type = type(2);
    g.n = uint16_t(in.m[0]);
    g.a_in_registers = a_in_registers;
    g.accumulate = slot->accumulate;
    g.negate_a = in.m[2] & 2, g.negate_b = in.m[2] & 4;
    g.mn_major_a = in.m[2] & 8, g.mn_major_b = in.m[2] & 16;
    g.saturate = in.m[2] & 32;
    g.a_desc = slot->a_desc, g.b_desc = slot->b_desc;
    counters.mma_flops += 2ull * 64 * g.n * wgmma_k(g);
    std::vector<Operand> operands(x.ops, x.ops + in.count);
    AsyncPtr op = slot->op;
    AsyncOp* self = op.get();
    for (uint32_t i = 0; i < nd + (a_in_registers ? na : 0); ++i)
        if (operands[i].kind == Operand::Reg) op->registers.push_back(operands[i].id);
    op->steps.push_back([this, self, slot, g, operands, nd, na, &cta] {
        Footprint footprint;
        wgmma_footprint(g, footprint.shared);
        Cta* ctas[2] = {&cta, &cta};
        std::vector<uint8_t> poison(257, 0);
        check_operands(*self, ctas, footprint, &poison);
        std::vector<uint32_t*> d;
        std::vector<const uint32_t*> a(16, nullptr);
        for (uint32_t k = 0; k < 4; ++k) {
            Warp& warp = *slot->warps[k];
            for (uint32_t i = 0; i < nd; ++i) d.push_back(warp.regs.data() + operands[i].offset);
            for (uint32_t i = 0; g.a_in_registers && i < na; ++i) a[k * 4 + i] = warp.row(operands[nd + i], program_.constants.data());
        }
        wgmma_execute(g, memory_of(cta), a.data(), d.data());
        for (uint32_t k = 0; k < 4; ++k) {
            Warp& warp = *slot->warps[k];
            uint32_t a_bad[2] = {};
            for (uint32_t i = 0; g.a_in_registers && i < na; ++i)
                if (operands[nd + i].kind == Operand::Reg) a_bad[i & 1] |= ~warp.valid[size_t(operands[nd + i].id)];
            for (uint32_t i = 0; i < nd; ++i) {
                uint32_t valid = poison[0] ? 0 : ~0u;
                if (g.accumulate) valid &= warp.valid[size_t(operands[i].id)];
                const uint32_t bad = a_bad[g.d_type == MmaType::F16 ? i & 1 : i / 2 & 1];
                for (uint32_t l = 0; bad && l < 32; ++l)
                    if (bad & 0xFu << (l / 4 * 4)) valid &= ~(1u << l);
                warp.valid[size_t(operands[i].id)] = valid;
            }
        }
    });
    submit(op);
    return Next::Advance;
}

Next Engine::tensor(Exec& x) {
    switch (x.in.op) {
        case Op::tmem_alloc: return tmem_alloc(x);
        case Op::tmem_dealloc: tmem_dealloc(x); break;
        case Op::tmem_relinquish: x.w.cta->relinquished = true; break;
        case Op::tmem_ld: case Op::tmem_st: tmem_ld_st(x); break;
        case Op::tmem_wait: {
            if (x.in.m[0] == 0) {
                settle_load(x.w, -1);
                break;
            }
            for (AsyncPtr& op : x.w.tmem_ops[1]) {
                force(*op);
                join_completed(x.w, *op);
            }
            x.w.tmem_ops[1].clear();
            break;
        }
        case Op::tmem_fence: races_.tensor_fence(x.w.clock, x.in.m[0]); break;
        case Op::tmem_cp: case Op::tmem_shift: tmem_copy_shift(x); break;
        case Op::umma: umma(x); break;
        case Op::umma_commit: umma_commit(x); break;
        case Op::mma_sync: mma_sync(x); break;
        default: return wgmma(x);
    }
    return Next::Advance;
}

}  // namespace fa4
