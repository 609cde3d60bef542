// Execution of tcgen05.mma and mma.sync. PTX ISA 9.7.14, 9.7.16.
#include "engine.hpp"
#include "lanes.hpp"
#include "mma_sync.hpp"
#include "tmem.hpp"
#include "umma.hpp"

namespace warpcheck {
namespace {

// Bits of N and M in the instruction descriptor, the same for all kinds.
constexpr uint32_t kShapeBits = 0x3Fu << 17 | 0x1Fu << 24;
constexpr uint32_t kMostRegisters = 32;     // 32-bit registers per thread of mma.sync: m16n8k16 of binary64

}  // namespace

// Checks races and poison of a matrix operation's operands. If `poison` is given, it is set where results become
// undefined: [0] an undefined operand in shared memory; [1 + lane + 128 * cta] a lane of an operand in TMEM.
void Engine::check_operands(const AsyncOp& op, Cta* const* ctas, const Footprint& footprint, std::vector<uint8_t>* poison) {
    for (const SharedRange& r : footprint.shared) {
        Cta& cta = *ctas[r.cta];
        if (r.offset < kSharedReserved || r.offset + r.bytes > cta.shared.size())
            fail(Check::OutOfBounds, "a matrix operand covers shared bytes " + hex(r.offset) + "+" + hex(r.bytes) + ", outside the CTA's shared memory");
        if (!poison || r.write || !config_.check_poison) continue;
        if (!Cta::defined(cta.shadow.data() + r.offset, r.bytes)) (*poison)[0] = 1;
    }
    for (const bool write : {false, true}) races_.shared(agent(op, write), ctas, footprint.shared, write);
    for (const TmemRect& r : footprint.tmem) {
        Cta& cta = *ctas[r.cta];
        check_tmem(cta, r);
        races_.tmem(agent(op, r.write), *cta.sm, r, r.write ? kWrite : 0);
    }
}

void Engine::umma(Exec& x) {
    const mod::Umma& m = x.in.as<mod::Umma>();
    for (uint32_t i = 0; i < 5; ++i)
        if (x.mask & ~x.valid(i) && config_.check_poison) note(Check::Uninitialized, "an operand of tcgen05.mma was never given a value");
    for_lanes(x.mask, [&](int l) {
        UmmaOp u{};
        u.kind = m.kind;
        u.cta_group = uint8_t(m.group);
        u.a_in_tmem = m.a_in_tmem;
        u.weight_stationary = m.stationary;
        u.scale_vector = uint8_t(m.scale_vector);
        u.scale_d = uint8_t(m.scale_d);
        u.d_tmem = uint32_t(x.value(0, l) + uint64_t(m.d_offset));
        if (u.a_in_tmem) u.a_tmem = uint32_t(x.value(1, l) + uint64_t(m.a_offset));
        else u.a_desc = x.value(1, l);
        u.b_desc = x.value(2, l);
        u.idesc = uint32_t(x.value(3, l));
        u.accumulate = x.pred(4) >> l & 1;
        if (x.has(5)) u.scale_a_tmem = uint32_t(x.value(5, l)), u.scale_b_tmem = uint32_t(x.value(6, l));
        if (m.lanes)
            for (uint32_t i = 0; 7 + i < x.sources() && i < 8; ++i) u.disable_lane[i] = uint32_t(x.value(7 + i, l));
        Cta& cta = *x.w.cta;
        std::array<Cta*, 2> ctas = {&cta, &cta};
        if (u.cta_group == 2) {
            if ((cta.rank | 1) >= cta.cluster->ctas.size()) fail(Check::IllegalInstruction, "cta_group::2 without a peer CTA");
            ctas = {cta.cluster->ctas[cta.rank & ~1u].get(), cta.cluster->ctas[cta.rank | 1].get()};
        }
        counters.mma_flops += umma_flops(u);
        if (x.w.timed) {
            const InstrDesc d = decode_instr_desc(u);
            x.w.timed->note(Timed::Product, d.m, d.n, d.k, u.cta_group, u.a_in_tmem, int64_t(u.kind));
        }
        AsyncPtr op = make_tensor_op(x, "tcgen05.mma", l, TensorKind::Mma, u.cta_group, {u.d_tmem, u.idesc & kShapeBits});
        AsyncOp* self = op.get();
        op->steps.push_back([this, self, u, ctas] {
            Footprint footprint;
            umma_footprint(u, footprint);
            for (const SharedRange& r : footprint.shared) count_bytes("mma_shared", r.bytes);
            std::vector<uint8_t> poison(257, 0);
            check_operands(*self, ctas.data(), footprint, &poison);
            // A rectangle that is read but not written is an operand. Its undefined cells make the results of their
            // lanes undefined.
            std::vector<TmemRect> results;
            for (const TmemRect& r : footprint.tmem)
                if (r.write) results.push_back(r);
            for (const TmemRect& r : footprint.tmem) {
                if (r.write) continue;
                bool accumulator = false;
                for (const TmemRect& d : results) accumulator |= d.cta == r.cta && d.column == r.column && d.lane == r.lane && d.columns == r.columns;
                if (accumulator) continue;
                for (uint32_t lane = r.lane; lane < uint32_t(r.lane + r.lanes); ++lane)
                    if (std::memchr(ctas[r.cta]->sm->tmem_valid.data() + lane * kTmemColumns + r.column, 0, r.columns)) poison[1 + lane + 128 * r.cta] = 1;
            }
            const CtaMemory memories[2] = {memory_of(*ctas[0]), memory_of(*ctas[1])};
            umma_execute(u, memories);
            for (const TmemRect& r : results)
                for (uint32_t lane = r.lane; lane < uint32_t(r.lane + r.lanes); ++lane) {
                    if (u.disable_lane[r.cta * 4 + lane / 32] >> (lane % 32) & 1) continue;
                    const bool bad = poison[0] || poison[1 + lane + 128 * r.cta];
                    uint8_t* v = ctas[r.cta]->sm->tmem_valid.data() + lane * kTmemColumns + r.column;
                    if (bad || !u.accumulate) std::memset(v, !bad, r.columns);
                }
        });
        submit(op);
    });
}

void Engine::umma_commit(Exec& x) {
    const mod::UmmaCommit& m = x.in.as<mod::UmmaCommit>();
    for_lanes(x.mask, [&](int l) {
        uint32_t offset;
        Cta& home = shared_cta(x.w, m.space == Space::Generic ? Space::Generic : Space::SharedCluster, x.value(0, l) + uint64_t(m.offset), offset);
        std::vector<Cta*> targets = {&home};
        if (x.has(1)) {
            targets.clear();
            const uint32_t mask = uint32_t(x.value(1, l));
            for (auto& c : x.w.cta->cluster->ctas)
                if (mask >> c->rank & 1) targets.push_back(c.get());
        }
        if (x.w.timed)
            for (const Cta* cta : targets) x.w.timed->note(Timed::Commit, cta->linear, offset);
        AsyncPtr op = make_tensor_op(x, "tcgen05.commit", l, TensorKind::Commit, uint32_t(m.group));
        AsyncOp* self = op.get();
        op->steps.push_back([this, self, targets, offset] {
            for (Cta* cta : targets) arrive_committed(*cta, offset, *self);
        });
        submit(op);
    });
}

void Engine::mma_sync(Exec& x) {
    const Instr& in = x.in;
    const mod::MmaSync& m = in.as<mod::MmaSync>();
    MmaSyncOp op{};
    op.m = uint16_t(m.m), op.n = uint16_t(m.n), op.k = uint16_t(m.k);
    op.d_type = m.d_type, op.a_type = m.a_type, op.b_type = m.b_type, op.c_type = m.c_type;
    op.saturate = m.satfinite;
    op.containers = m.containers;
    op.arch = config_.arch;
    op.scale_vector = uint8_t(m.scale_vector);
    op.scale_type = m.scale_type;
    if (m.a_columns || m.b_rows) stop(Check::UnknownInstruction, "mma.sync with A column-major or B row-major");
    const uint32_t na = uint32_t(m.a_registers), nb = uint32_t(m.b_registers), nc = uint32_t(m.c_registers), nd = in.ndst;
    const uint32_t scales = na + nb + nc;       // first operand of the scales: data, byte and thread of A, then of B
    MmaScales scale[2];
    for (uint32_t i = 0; op.scale_vector && i < 2; ++i)
        scale[i] = {x.src(scales + 3 * i), uint16_t(x.value(scales + 3 * i + 1, 0)), uint16_t(x.value(scales + 3 * i + 2, 0))};
    const uint32_t* sources[kMostRegisters];
    uint32_t* results[kMostRegisters] = {};
    if (op.d_type == MmaType::F64) {
        // binary64 registers are split into the two words that the unit expects.
        uint32_t words[kMostRegisters][32], sums[kMostRegisters][32];
        for (uint32_t i = 0; i < 2 * (na + nb + nc); ++i) {
            for (int l = 0; l < 32; ++l) words[i][l] = x.src(i / 2)[2 * l + int(i % 2)];
            sources[i] = words[i];
        }
        for (uint32_t i = 0; i < 2 * nd; ++i) results[i] = sums[i];
        mma_sync_execute(op, sources, sources + 2 * na, sources + 2 * (na + nb), results);
        for (uint32_t i = 0; i < 2 * nd; ++i)
            for (int l = 0; l < 32; ++l) x.dst(i / 2)[2 * l + int(i % 2)] = sums[i][l];
    } else {
        for (uint32_t i = 0; i < na + nb + nc; ++i) sources[i] = x.src(i);
        for (uint32_t i = 0; i < nd; ++i) results[i] = x.dst(i);
        mma_sync_execute(op, sources, sources + na, sources + na + nb, results, scale[0], scale[1]);
    }
    counters.mma_flops += 2ull * op.m * op.n * op.k;
    // Undefined values: row l / 4 (and + 8) of A and C, column l / 4 of B. Of a scale, only the threads that supply
    // factors count.
    uint32_t a_bad[2] = {}, b_bad = 0;
    bool any = false;
    const uint32_t row_pairs = op.m == 16 ? 2 : 1;
    for (uint32_t i = 0; i < na; ++i) a_bad[i % row_pairs] |= ~x.valid(i);
    for (uint32_t i = 0; i < nb; ++i) b_bad |= ~x.valid(na + i);
    for (uint32_t row = 0; op.scale_vector && row < op.m; ++row) a_bad[row / 8] |= ~x.valid(scales) & 1u << scale[0].thread_of_row(row);
    for (uint32_t column = 0; op.scale_vector && column < 8; ++column) b_bad |= ~x.valid(scales + 3) & 1u << scale[1].thread_of_column(column);
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
        x.set_valid(i, valid);
    }
}

Next Engine::tensor(Exec& x) {
    switch (x.in.op) {
        case Op::tmem_alloc: return tmem_alloc(x);
        case Op::tmem_dealloc: tmem_dealloc(x); break;
        case Op::tmem_relinquish: x.w.cta->relinquished = true; break;
        case Op::tmem_ld: case Op::tmem_st: tmem_ld_st(x); break;
        case Op::tmem_wait: {
            if (!x.in.as<mod::TmemWait>().stores) {
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
        case Op::tmem_fence: races_.tensor_fence(x.w.clock, x.in.as<mod::TmemFence>().after, x.mask); break;
        case Op::tmem_cp: case Op::tmem_shift: tmem_copy_shift(x); break;
        case Op::umma: umma(x); break;
        case Op::umma_commit: umma_commit(x); break;
        case Op::mma_sync: mma_sync(x); break;
        default: return wgmma(x);
    }
    return Next::Advance;
}

}  // namespace warpcheck
