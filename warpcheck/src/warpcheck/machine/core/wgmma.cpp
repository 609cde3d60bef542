// Execution of wgmma, the matrix products of a warpgroup. PTX ISA 9.7.15.
#include "engine.hpp"
#include "wgmma.hpp"

namespace warpcheck {
namespace {

uint64_t warpgroup_key(const Cta& cta, uint32_t group) { return uint64_t(1) << 62 | uint64_t(cta.linear) << 8 | group; }

}  // namespace

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
            const size_t keep = size_t(in.as<mod::WgmmaWait>().keep);
            for (size_t i = 0; i + keep < w.wgmma_groups.size(); ++i)
                for (AsyncPtr& op : w.wgmma_groups[i])
                    if (op->steps.empty() && op->next == 0 && op->registers.empty()) {      // not yet issued by all warps
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
    const mod::Wgmma& m = in.as<mod::Wgmma>();
    const bool a_in_registers = m.a_in_registers;
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
    // The tensor core does not see registers that were written after the last wgmma.fence.
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
    g.d_type = m.d_type, g.a_type = m.a_type, g.b_type = m.b_type;
    g.n = uint16_t(m.n);
    g.a_in_registers = a_in_registers;
    g.accumulate = slot->accumulate;
    g.negate_a = m.negate_a, g.negate_b = m.negate_b;
    g.mn_major_a = m.a_mn_major, g.mn_major_b = m.b_mn_major;
    g.saturate = m.satfinite;
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

}  // namespace warpcheck
