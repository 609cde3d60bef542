// Execution of mbarrier instructions, named barriers and the cluster barrier. PTX ISA 9.7.13.1 - 9.7.13.3, 9.7.13.15.
#include "engine.hpp"
#include "lanes.hpp"

namespace warpcheck {
namespace {

constexpr int64_t kMaxTx = (1 << 20) - 1;

}  // namespace

Mbarrier& Engine::mbarrier(Cta& cta, uint32_t offset) {
    const auto found = cta.barriers.find(offset);
    if (found == cta.barriers.end()) {
        if (offset % 8) fail(Check::Misaligned, "mbarrier address " + hex(offset) + " is not a multiple of 8");
        SimError error(Check::BarrierMisuse, "there is no initialised mbarrier at shared address " + hex(offset) + " of CTA " + std::to_string(cta.linear));
        error.barrier = program_.barrier(offset);
        throw error;
    }
    return found->second;
}

void Engine::note_arriver(Mbarrier& bar, const Place& who) {
    const std::pair<int32_t, int32_t> warp(who.cta, who.warp);
    if (std::find(bar.arrivers.begin(), bar.arrivers.end(), warp) == bar.arrivers.end()) bar.arrivers.push_back(warp);
}

void Engine::finish_phase(Cta& cta, uint32_t offset, Mbarrier& bar) {
    if (bar.pending != 0 || bar.tx != 0) return;
    if (races_.enabled) check_phase(cta, offset, bar);
    ++bar.phase;
    bar.pending = bar.expected;
    bar.release[bar.phase & 1].clear();
    bar.remote[bar.phase & 1] = {};
    bar.remote_narrow[bar.phase & 1] = false;
    for (auto& c : cta.cluster->ctas)
        for (auto& w : c->warps)
            for (Fragment& f : w->fragments)
                if (f.wait == Wait::Mbarrier && f.bar_cta == &cta && f.bar_offset == offset && bar.phase > f.bar_phase) f.wait = Wait::None;
}

void Engine::arrive(Cta& cta, uint32_t offset, uint32_t count, int64_t expect, const Order& from, const Place& who, bool drop) {
    Mbarrier& bar = mbarrier(cta, offset);
    if (int64_t(count) > bar.pending) {
        SimError error(Check::BarrierMisuse, program_.barrier(offset) + ": " + std::to_string(count) + " arrivals but only " +
                                            std::to_string(bar.pending) + " of " + std::to_string(bar.expected) + " are still expected in phase " +
                                            std::to_string(bar.phase) + (bar.tx ? " (which waits for " + std::to_string(bar.tx) + " more bytes)" : ""));
        error.others.push_back({"the barrier was initialised", bar.init});
        error.others.push_back({"the previous arrival", bar.last_arrival});
        error.barrier = program_.barrier(offset);
        throw error;
    }
    bar.tx += expect;
    if (bar.tx > kMaxTx) fail(Check::BarrierMisuse, program_.barrier(offset) + ": the tx-count " + std::to_string(bar.tx) + " exceeds its range");
    if (races_.enabled) {
        bar.release[bar.phase & 1].join(from);
        note_arrival(bar, from);
        if (expect) note_expected(bar, expect, from);
    }
    bar.pending -= count;
    if (drop) bar.expected -= count;
    bar.last_arrival = who;
    bar.last_arrival_phase = bar.phase;
    note_arriver(bar, who);
    effect();
    finish_phase(cta, offset, bar);
}

// `from`: the order that the bytes give; `after`: what had been executed before.
void Engine::complete_tx(Cta& cta, uint32_t offset, int64_t bytes, const Order& from, const Order& after) {
    Mbarrier& bar = mbarrier(cta, offset);
    bar.tx -= bytes;
    if (bar.tx < -kMaxTx) fail(Check::BarrierMisuse, program_.barrier(offset) + ": the tx-count " + std::to_string(bar.tx) + " exceeds its range");
    if (races_.enabled) {
        bar.release[bar.phase & 1].join(from);
        bar.release[bar.phase & 1].join_executed(after);
        note_completed(bar, bytes, after);
    }
    effect();
    finish_phase(cta, offset, bar);
}

// complete_tx and arrive by an asynchronous operation.
void Engine::complete_tx(Cta& cta, uint32_t offset, int64_t bytes, const AsyncOp& op, const Order& from) {
    races_.barrier_use(agent(op, true), mbarrier(cta, offset).born, op.cta != &cta);
    note_arriver(mbarrier(cta, offset), op.place);
    complete_tx(cta, offset, bytes, from, op.order);
}

void Engine::arrive(Cta& cta, uint32_t offset, const AsyncOp& op, const Order& from) {
    races_.barrier_use(agent(op, true), mbarrier(cta, offset).born, op.cta != &cta);
    arrive(cta, offset, 1, 0, from, op.place);
}

// Arrival of tcgen05.commit. It releases tensor memory without a fence.
void Engine::arrive_committed(Cta& cta, uint32_t offset, const AsyncOp& op) {
    Order order = completion(op);
    if (races_.enabled) {
        order.via[kTensorReleased].join(order.via[kTensor]);
        order.via[kTensorReleased].set(op.write_slot, op.write_epoch);
        if (&cta != op.cta)
            cta.arrivals[uint64_t(op.write_slot) << 5] = {
                op.write_slot, op.write_epoch, op.place.row, int16_t(op.place.warp), 0xF, kWrite | kAtomic | kAsync, -1};
    }
    arrive(cta, offset, op, order);
}

// Reports each mbarrier of an ended CTA whose current phase has arrivals or bytes but is incomplete.
void Engine::check_barriers_left(const Cta& cta) {
    for (const auto& [offset, bar] : cta.barriers) {
        if (bar.pending == int64_t(bar.expected) && bar.tx == 0) continue;
        SimError error(Check::BarrierLeftover, "CTA " + std::to_string(cta.linear) + " ends in the middle of phase " + std::to_string(bar.phase) +
                                            " of " + program_.barrier(offset) + ": " + std::to_string(bar.pending) + " of " +
                                            std::to_string(bar.expected) + " arrivals and " + std::to_string(bar.tx) + " bytes never came");
        error.place.cta = int32_t(cta.linear);
        error.others.push_back({"the barrier was initialised", bar.init});
        error.others.push_back({"its last arrival", bar.last_arrival});
        error.barrier = program_.barrier(offset);
        findings_.note(std::move(error));
    }
}

Next Engine::mbar_wait(Exec& x) {
    const Instr& in = x.in;
    Fragment& f = x.f;
    uint32_t result = 0;
    bool parked = false;
    const Cta* waited = nullptr;    // recorded for the clock model: the last lane's barrier whose phase is complete
    uint32_t waited_offset = 0;
    uint64_t waited_phases = 0;
    const mod::Mbarrier& m = in.as<mod::Mbarrier>();
    const bool parity_form = m.parity;
    for_lanes(x.mask, [&](int l) {
        uint32_t offset;
        Cta& cta = shared_cta(x.w, m.space, x.value(0, l) + uint64_t(m.offset), offset);
        Mbarrier& bar = mbarrier(cta, offset);
        races_.barrier_use(agent_of(x.w, current_.row), bar.born, &cta != x.w.cta);
        const uint64_t v = x.value(1, l);
        uint64_t wanted;    // number of the phase that must be complete
        bool complete;
        if (parity_form) {
            complete = (bar.phase & 1) != (v & 1);
            wanted = bar.phase;     // an incomplete phase is the current one
        } else {
            wanted = v >> 32;
            complete = bar.phase > wanted;
        }
        if (complete) {
            result |= 1u << l;
            waited = &cta, waited_offset = offset, waited_phases = parity_form ? bar.phase : wanted + 1;
            if (races_.enabled && bar.phase > 0) {
                const uint64_t done = parity_form ? bar.phase - 1 : wanted;
                if (m.strong) races_.acquire(x.w.clock, bar.release[done & 1], x.acquirers(l));
                else races_.acquire_relaxed(x.w.clock, bar.release[done & 1], x.acquirers(l));
                if (m.strong && config_.check_letter) check_scope(bar, offset, done, m.scope == Scope::Cta);
            }
            if (races_.enabled && parity_form) note_waited(bar, x.w);
        } else if (!parked) {
            parked = true;
            f.bar_cta = &cta;
            f.bar_offset = offset;
            f.bar_phase = wanted;
        }
    });
    // A try_wait may suspend or return false at once; the scheduler sometimes makes it return false. For the clock, a
    // test_wait suspends as well: how often a loop of them runs depends on the order of the emulation.
    if (!(result == x.mask) && (in.op == Op::mbar_try_wait || x.w.timed) && !f.timed_out) {
        const bool give_up = scheduler_->gives_up();
        if (!give_up) {
            f.wait = Wait::Mbarrier;
            return Next::Stay;
        }
    }
    if (in.op == Op::mbar_test_wait && result != x.mask) poll(x, {f.pc, 0, 0, result, 0});
    if (result != x.mask) f.weak_count = 0;     // this instruction may end the loop that weak loads are in
    if (x.w.timed && waited) x.w.timed->note(Timed::Wait, waited->linear, waited_offset, int64_t(waited_phases));
    f.timed_out = false;
    if (x.has_dst(0)) {
        *x.dst(0) = (*x.dst(0) & ~x.mask) | result;
        x.set_valid(0, ~0u);
    }
    return Next::Advance;
}

uint32_t Engine::alive_threads(const Cta& cta) const {
    uint32_t n = 0;
    for (const auto& w : cta.warps)
        if (w->alive) n += 32;
    return n;
}

void Engine::release_named(Cta& cta, uint32_t id) {
    NamedBarrier& bar = cta.named[id];
    for (const NamedBarrier::Waiter& waiter : bar.waiters) {
        Warp& w = *waiter.warp;
        for (Fragment& f : w.fragments) {
            if (f.wait != Wait::Named || f.pc != waiter.pc || !(f.mask & waiter.lanes)) continue;
            races_.acquire(w.clock, bar.release);
            const Instr& in = program_.code[f.pc];
            if (in.op == Op::bar_red) {
                Exec x{w, f, in, program_.operands.data() + in.first, f.mask, program_.constants.data()};
                const BarrierReduction reduction = in.as<mod::NamedBarrier>().reduction;
                if (reduction == BarrierReduction::Popc) for_lanes(x.mask, [&](int l) { x.dst()[l] = bar.reduce_popc; });
                else *x.dst() = (*x.dst() & ~x.mask) | ((reduction == BarrierReduction::And ? bar.reduce_and : bar.reduce_or) ? x.mask : 0);
                x.set_valid(0, ~0u);
            }
            f.wait = Wait::None;
            ++f.pc;
        }
    }
    bar = NamedBarrier();
    effect();
}

void Engine::check_named_barriers(Cta& cta) {
    for (uint32_t id = 0; id < 16; ++id) {
        NamedBarrier& bar = cta.named[id];
        if (bar.arrived && bar.expected == 0 && bar.arrived >= alive_threads(cta) && !bar.waiters.empty()) release_named(cta, id);
    }
}

Next Engine::named_barrier(Exec& x) {
    const Instr& in = x.in;
    Cta& cta = *x.w.cta;
    const int l = x.first_lane();
    const uint64_t id = x.value(0, l);
    if (id >= 16) fail(Check::BarrierMisuse, "there is no named barrier " + std::to_string(id));
    const uint32_t expected = x.has(1) ? uint32_t(x.value(1, l)) : 0;
    if (x.has(1) && (expected == 0 || expected % 32 || expected > 1024))
        fail(Check::BarrierMisuse, "barrier " + std::to_string(id) + ": the thread count " + std::to_string(expected) + " is not a multiple of 32 in 32..1024");
    NamedBarrier& bar = cta.named[id];
    if (bar.arrived && bar.expected != expected) {
        SimError error(Check::BarrierMisuse, "barrier " + std::to_string(id) + ": arrival with thread count " + std::to_string(expected) +
                                            " while others came with " + std::to_string(bar.expected) + " (0: all threads)");
        error.others.push_back({"the first arrival", bar.first});
        throw error;
    }
    if (!bar.arrived) bar.first = current_;
    if (x.w.timed) x.w.timed->note(Timed::Named, int64_t(id), expected);
    bar.expected = expected;
    races_.release(x.w.clock, bar.release, x.mask);
    // If all living lanes arrive together, the barrier counts the whole warp.
    const bool whole = x.mask == x.w.alive;
    bar.arrived += whole ? 32 : uint32_t(__builtin_popcount(x.mask));
    if (in.op == Op::bar_red) {
        const uint32_t p = x.pred(2) & x.mask;
        bar.reduce_popc += uint32_t(__builtin_popcount(p));
        bar.reduce_and &= p == x.mask;
        bar.reduce_or |= p != 0;
    }
    const uint32_t target = expected ? expected : alive_threads(cta);
    if (bar.arrived > target)
        note(Check::BarrierMisuse, "barrier " + std::to_string(id) + ": " + std::to_string(bar.arrived) + " threads arrived, expected " + std::to_string(target));
    if (in.op != Op::bar_arrive) {
        x.f.wait = Wait::Named;
        bar.waiters.push_back({&x.w, x.mask, x.f.pc});
    }
    effect();
    const bool complete = bar.arrived >= target;
    if (complete) release_named(cta, uint32_t(id));     // advances all waiters, including this fragment
    if (in.op == Op::bar_arrive) return Next::Advance;
    return complete ? Next::Jumped : Next::Stay;
}

void Engine::check_cluster_barrier(Cluster& cluster) {
    if (cluster.arrived == 0 || cluster.arrived < cluster.alive_lanes) return;
    cluster.arrived = 0;
    ++cluster.phase;
    cluster.release[cluster.phase & 1].clear();
    effect();
    for (auto& c : cluster.ctas)
        for (auto& w : c->warps)
            for (Fragment& f : w->fragments)
                if (f.wait == Wait::ClusterBarrier) f.wait = Wait::None;
}

Next Engine::cluster_barrier(Exec& x) {
    Warp& w = x.w;
    Cluster& cluster = *w.cta->cluster;
    const uint32_t waiting = uint32_t(w.cluster_arrivals);
    const bool strong = x.in.as<mod::ClusterBarrier>().strong;
    if (x.in.op == Op::cluster_arrive) {
        if (waiting & x.mask) fail(Check::BarrierMisuse, "barrier.cluster.arrive twice without barrier.cluster.wait between");
        w.cluster_arrivals |= x.mask;
        for_lanes(x.mask, [&](int l) { w.cluster_phase[l] = cluster.phase; });
        Order& release = cluster.release[cluster.phase & 1];
        if (strong) races_.release(w.clock, release, x.mask);
        else races_.release_relaxed(w.clock, release, x.mask);
        cluster.arrived += uint32_t(__builtin_popcount(x.mask));
        effect();
        check_cluster_barrier(cluster);
        return Next::Advance;
    }
    if ((waiting & x.mask) != x.mask) fail(Check::BarrierMisuse, "barrier.cluster.wait without barrier.cluster.arrive");
    const uint64_t mine = w.cluster_phase[x.first_lane()];
    if (cluster.phase <= mine) {
        x.f.wait = Wait::ClusterBarrier;
        return Next::Stay;
    }
    w.cluster_arrivals &= ~uint64_t(x.mask);
    if (strong) races_.acquire(w.clock, cluster.release[mine & 1]);
    else races_.acquire_relaxed(w.clock, cluster.release[mine & 1], kWarp);
    return Next::Advance;
}

// True if lanes that arrive in one instruction complete a phase before the last of them arrives. Later lanes then
// belong to the next phase, so their accesses must not be released into the completed one.
bool Engine::phase_ends_amid(Exec& x) {
    const mod::Mbarrier& m = x.in.as<mod::Mbarrier>();
    const uint64_t address = x.value(0, x.first_lane()) + uint64_t(m.offset);
    uint64_t arrivals = 0;
    for_lanes(x.mask, [&](int l) {
        if (x.value(0, l) + uint64_t(m.offset) == address) arrivals += m.expect_tx ? 1 : x.value(1, l);
    });
    uint32_t offset;
    Cta& cta = shared_cta(x.w, m.space, address, offset);
    const auto found = cta.barriers.find(offset);
    return found != cta.barriers.end() && int64_t(arrivals) > found->second.pending;
}

Next Engine::barrier(Exec& x) {
    const Instr& in = x.in;
    switch (in.op) {
        case Op::bar_sync: case Op::bar_arrive: case Op::bar_red: return named_barrier(x);
        case Op::cluster_arrive: case Op::cluster_wait: return cluster_barrier(x);
        case Op::mbar_pending_count:
            for_lanes(x.mask, [&](int l) { x.dst()[l] = uint32_t(x.value(0, l)); });
            x.set_valid(0, ~0u);
            return Next::Advance;
        default: break;
    }
    address_check(x, 0);
    if (in.op == Op::mbar_test_wait || in.op == Op::mbar_try_wait) return mbar_wait(x);
    const mod::Mbarrier& m = in.as<mod::Mbarrier>();
    Order order;
    const bool arrival = in.op == Op::mbar_arrive || in.op == Op::mbar_arrive_drop;
    const bool apart = arrival && m.strong && races_.enabled && phase_ends_amid(x);
    uint32_t epoch = x.w.clock.epoch;       // the epoch that the release publishes
    if (arrival && m.strong && !apart) races_.release(x.w.clock, order, x.mask);
    if (arrival && !m.strong) races_.release_relaxed(x.w.clock, order, x.mask);
    for_lanes(x.mask, [&](int l) {
        const uint64_t address = x.value(0, l) + uint64_t(m.offset);
        uint32_t offset;
        Cta& cta = shared_cta(x.w, m.space, address, offset);
        const uint64_t v = x.value(1, l);
        if (apart) {
            order.clear();
            epoch = x.w.clock.epoch;
            races_.release(x.w.clock, order, 1u << l);
        }
        if (arrival && &cta != x.w.cta && races_.enabled) {
            const uint32_t slot = x.w.clock.slot;
            cta.arrivals[uint64_t(slot) << 5 | uint32_t(l)] = {
                slot, epoch, current_.row, int16_t(x.w.index), 0xF, kWrite | kAtomic, int8_t(l)};
        }
        switch (in.op) {
            case Op::mbar_init: {
                const Span s = resolve(x.w, m.space, address, 8, l);
                if (offset % 8) fail(Check::Misaligned, "mbarrier address " + hex(offset) + " is not a multiple of 8");
                if (v < 1 || v > uint64_t(kMaxTx)) fail(Check::BarrierMisuse, "mbarrier.init with count " + std::to_string(v));
                if (cta.barriers.count(offset)) {
                    const Mbarrier& old = cta.barriers[offset];
                    // All lanes of one instruction initialise the barrier with the same count.
                    const bool by_lanes = old.init.row == current_.row && old.init.warp == current_.warp && old.init.cta == current_.cta &&
                                          old.expected == v && old.phase == 0 && old.pending == int64_t(v) && old.tx == 0;
                    SimError error(by_lanes ? Check::BarrierInitLanes : Check::BarrierMisuse, "mbarrier.init of a live barrier: " + program_.barrier(offset));
                    error.others.push_back({"it was initialised", old.init});
                    error.barrier = program_.barrier(offset);
                    note(error);
                    if (by_lanes) return;
                }
                Mbarrier bar;
                bar.expected = uint32_t(v);
                bar.pending = int64_t(v);
                bar.init = current_;
                Agent agent = agent_of(x.w, current_.row);
                agent.lane = int8_t(l);
                x.w.clock.touch(l, true);
                races_.shared(agent, cta, offset, 8, kWrite);
                bar.born = {agent.slot, agent.epoch, agent.row, agent.warp, 0xF, kWrite, agent.lane};
                cta.barriers[offset] = bar;
                if (x.w.timed) x.w.timed->note(Timed::Init, cta.linear, offset, int64_t(v));
                std::memset(s.shadow, Cta::kValid | Cta::kBarrier, 8);
                effect();
                break;
            }
            case Op::mbar_inval: {
                mbarrier(cta, offset);
                cta.barriers.erase(offset);
                std::memset(cta.shadow.data() + offset, 0, 8);
                races_.forget_shared(cta, offset, 8);
                effect();
                break;
            }
            case Op::mbar_expect_tx: {
                Mbarrier& bar = mbarrier(cta, offset);
                bar.tx += int64_t(v);
                if (races_.enabled) note_expect(bar, x.w, int64_t(v));
                if (x.w.timed) x.w.timed->arrive(Timed::Arrive, cta.linear, offset, 0, int64_t(v));
                effect();
                finish_phase(cta, offset, bar);
                break;
            }
            case Op::mbar_complete_tx: complete_tx(cta, offset, int64_t(v), order, executed_by(x.w)); break;
            default: {
                Mbarrier& bar = mbarrier(cta, offset);
                races_.barrier_use(agent_of(x.w, current_.row), bar.born, &cta != x.w.cta);
                const uint64_t token = bar.phase << 32 | uint32_t(bar.pending);
                if (!(x.valid(1) >> l & 1) && config_.check_poison) note(Check::Uninitialized, "the arrival count was never given a value");
                if (x.w.timed) x.w.timed->arrive(Timed::Arrive, cta.linear, offset, m.expect_tx ? 1 : int64_t(v), m.expect_tx ? int64_t(v) : 0);
                if (m.strong && &cta != x.w.cta) {
                    const size_t parity = bar.phase & 1;
                    bar.remote[parity] = current_;
                    bar.remote_narrow[parity] |= m.scope == Scope::Cta;
                }
                arrive(cta, offset, m.expect_tx ? 1 : uint32_t(v), m.expect_tx ? int64_t(v) : 0, order, current_, in.op == Op::mbar_arrive_drop);
                if (x.has_dst(0)) {
                    put<uint64_t>(x.dst(0), l, token);
                    x.w.valid[x.op(0).id] |= 1u << l;
                }
            }
        }
    });
    return Next::Advance;
}

}  // namespace warpcheck
