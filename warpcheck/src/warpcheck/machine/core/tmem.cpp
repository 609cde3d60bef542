// Execution of tensor memory instructions: allocation, loads and stores, copies and shifts. PTX ISA 9.7.16.
#include <utility>

#include "engine.hpp"
#include "lanes.hpp"
#include "tmem.hpp"

namespace warpcheck {
namespace {

// First aligned run of columns that is free on an SM, and on its peer if there is one; -1 if there is none.
int32_t find_columns(const Sm& sm, const Sm* peer, uint32_t columns) {
    for (uint32_t start = 0; start + columns <= kTmemColumns; start += columns) {
        bool free = true;
        for (uint32_t c = start; c < start + columns; ++c) free &= !sm.tmem_taken[c] && !(peer && peer->tmem_taken[c]);
        if (free) return int32_t(start);
    }
    return -1;
}

// Allocates columns. Their cells are undefined.
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
        if (!sm.races.empty()) sm.races.forget(first, columns);
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
    const mod::TmemAlloc& m = x.in.as<mod::TmemAlloc>();
    const uint32_t columns = uint32_t(x.value(1, x.first_lane()));
    if (columns < 32 || columns > kTmemColumns || (columns & (columns - 1)))
        fail(Check::TmemMisuse, "tcgen05.alloc of " + std::to_string(columns) + " columns: expected a power of two in 32..512");
    if (cta.relinquished) fail(Check::TmemMisuse, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    Cta* peer = nullptr;
    if (m.group == 2) {       // collective: both CTAs of the pair get the same columns, after both have executed it
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
    const uint64_t address = x.value(0, x.first_lane()) + uint64_t(m.offset);
    const Span s = resolve(x.w, m.space, address, 4, x.first_lane());
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
    if (races_.enabled && config_.check_leftovers) {    // all uses must be ordered before the deallocation
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
    const mod::TmemMove& m = x.in.as<mod::TmemMove>();
    TmemAccess access{m.shape, uint16_t(m.repeat), m.pack16, uint32_t(x.value(0, x.first_lane()) + uint64_t(m.offset)), uint32_t(m.split)};
    for_lanes(x.mask, [&](int l) {
        if (x.value(0, l) != x.value(0, x.first_lane())) fail(Check::IllegalInstruction, "the TMEM address differs among the lanes of the warp");
    });
    const uint32_t quarter = w.index % 4 * 32;
    if (quarter && TmemAddress(access.taddr).lane < 32) {   // chips take the quarter of the lanes from the warp's index
        if (config_.check_tmem)
            note(Check::TmemQuarter, "the address names TMEM lanes of warp 0 of the warpgroup, of which this is warp " +
                                         std::to_string(w.index % 4));
        access.taddr += quarter << 16;
    }
    auto rects = std::make_shared<std::vector<TmemRect>>();
    tmem_footprint(access, !is_load, *rects);
    for (const TmemRect& r : *rects) {
        check_tmem(*w.cta, r);
        if (config_.check_tmem && (r.lane < quarter || r.lane + r.lanes > quarter + 32))
            note(Check::TmemMisuse, "warp " + std::to_string(w.index) + " may access TMEM lanes " + std::to_string(quarter) + ".." +
                                   std::to_string(quarter + 31) + ", not " + std::to_string(r.lane) + ".." + std::to_string(r.lane + r.lanes - 1));
    }
    const uint32_t n = tmem_registers(access);
    if (n + m.reduces != (is_load ? x.in.ndst : x.sources() - 1)) fail(Check::IllegalInstruction, "the number of registers does not fit the shape");
    AsyncPtr op = make_op(x, is_load ? "tcgen05.ld" : "tcgen05.st");
    AsyncOp* self = op.get();
    count_bytes(is_load ? "tmem_load" : "tmem_store", uint64_t(n) * 128);
    if (is_load) {
        std::vector<Operand> regs(x.ops, x.ops + n + m.reduces);
        for (const Operand& o : regs) {
            if (o.kind != Operand::Reg) continue;
            op->registers.push_back(o.id);
            w.in_flight[size_t(o.id)] = 1;
            w.valid[size_t(o.id)] = 0;
        }
        if (!op->registers.empty()) ++w.pending_loads;
        op->steps.push_back([this, self, &w, access, regs, rects, n, m, type = x.in.type] {
            Sm& sm = *w.cta->sm;
            bool all = true;
            for (const TmemRect& r : *rects) {
                races_.tmem(agent(*self, false), sm, r, 0);
                for (uint32_t lane = r.lane; lane < uint32_t(r.lane + r.lanes); ++lane)
                    all &= !std::memchr(sm.tmem_valid.data() + lane * kTmemColumns + r.column, 0, r.columns);
            }
            std::vector<uint32_t> sink(32);
            std::vector<uint32_t*> pointers;
            for (const Operand& o : regs) pointers.push_back(o.kind == Operand::Reg ? w.regs.data() + o.offset : sink.data());
            tmem_load(access, sm.tmem.data(), pointers.data());
            uint32_t all_valid = ~0u;
            for (uint32_t r = 0; r < n; ++r) {
                uint32_t valid = ~0u;
                if (!all)
                    for (uint32_t t = 0; t < 32; ++t) {
                        const TmemCell cell = tmem_cell(access, r, t);
                        const uint8_t* v = sm.tmem_valid.data() + cell.lane * kTmemColumns + cell.column;
                        if (!v[0] || (access.pack16 && !v[1])) valid &= ~(1u << t);
                    }
                all_valid &= valid;
                if (regs[r].kind == Operand::Reg) w.valid[size_t(regs[r].id)] = valid;
            }
            if (m.reduces) {
                const auto value = [&](uint32_t r, int t) { return type == Type::f32 && m.abs ? pointers[r][t] & 0x7FFFFFFF : pointers[r][t]; };
                for (int t = 0; t < 32; ++t) {
                    uint32_t found = value(0, t);
                    for (uint32_t r = 1; r < n; ++r) found = extreme_bits(type, m.operation == ReduceOp::Min, m.nan, found, value(r, t));
                    pointers[n][t] = found;
                }
                if (regs[n].kind == Operand::Reg) w.valid[size_t(regs[n].id)] = all_valid;
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

void Engine::tmem_copy_shift(Exec& x) {
    const Instr& in = x.in;
    const bool copy = in.op == Op::tmem_cp;
    const uint32_t group = uint32_t(copy ? in.as<mod::TmemCopy>().group : in.as<mod::TmemShift>().group);
    for_lanes(x.mask, [&](int l) {
        Cta& cta = *x.w.cta;
        std::array<Cta*, 2> ctas = {&cta, &cta};
        if (group == 2) ctas = {cta.cluster->ctas.at(cta.rank & ~1u).get(), cta.cluster->ctas.at(cta.rank | 1).get()};
        const uint32_t address = uint32_t(x.value(0, l) + uint64_t(copy ? in.as<mod::TmemCopy>().offset : in.as<mod::TmemShift>().offset));
        AsyncPtr op = copy ? make_tensor_op(x, "tcgen05.cp", l, TensorKind::Copy, group)
                                           : make_tensor_op(x, "tcgen05.shift", l, TensorKind::Shift, group);
        AsyncOp* self = op.get();
        TmemCopyOp c{};
        TmemShiftOp s{uint8_t(group), address};
        if (copy) c = {in.as<mod::TmemCopy>().shape, in.as<mod::TmemCopy>().format, uint8_t(group), address, x.value(1, l)};
        if (copy && x.w.timed) {
            const detail::TmemCopyPlan plan = detail::tmem_copy_plan(c.shape);
            x.w.timed->note(Timed::TensorCopy, 16 * plan.rows * plan.chunks);
        }
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

}  // namespace warpcheck
