// Fetch, guard predicates, convergence, control flow and warp-wide instructions.
#include "engine.hpp"
#include "lanes.hpp"

namespace warpcheck {

// Joins fragments that have reached the same instruction.
void Engine::merge(Warp& w) {
    auto& fs = w.fragments;
    for (size_t i = 0; i < fs.size(); ++i) {
        for (size_t j = i + 1; j < fs.size();) {
            const bool free = (fs[i].wait == Wait::None || fs[i].wait == Wait::Converge) && (fs[j].wait == Wait::None || fs[j].wait == Wait::Converge);
            if (free && fs[i].pc == fs[j].pc) {
                fs[i].mask |= fs[j].mask;
                fs[i].wait = Wait::None;
                fs[i].timed_out = false;
                fs.erase(fs.begin() + long(j));
            } else {
                ++j;
            }
        }
    }
}

void Engine::settle_load(Warp& w, int32_t id) {
    auto& ops = w.tmem_ops[0];
    for (size_t i = 0; i < ops.size();) {
        const AsyncPtr op = ops[i];
        if (id >= 0 && std::find(op->registers.begin(), op->registers.end(), id) == op->registers.end()) {
            ++i;
            continue;
        }
        force(*op);
        for (int32_t r : op->registers) w.in_flight[size_t(r)] = 0;
        if (!op->registers.empty()) --w.pending_loads;
        op->registers.clear();
        if (id >= 0 && config_.check_letter) continue;     // a strict reading of the ISA orders only the use of the register
        join_completed(w, *op);
        ops.erase(ops.begin() + long(i));
    }
}

// Completes the tcgen05.ld operations whose registers an instruction uses. Such a use waits for the load (ISA
// 9.7.16.6.4.5, register dependencies), which has then read its cells. id -1, a wait instruction, completes all loads
// of the warp. A use of registers of a pending wgmma is an error.
void Engine::settle_registers(Warp& w, const Instr& in) {
    const Operand* ops = program_.operands.data() + in.first;
    for (uint32_t i = 0; i < in.count; ++i) {
        if (ops[i].kind != Operand::Reg) continue;
        const uint8_t state = w.in_flight[size_t(ops[i].id)];
        if (state == 1) {
            settle_load(w, ops[i].id);
        } else if (state == 2 && in.op != Op::wgmma && config_.check_poison) {
            note(Check::WgmmaWait, std::string(i < in.ndst ? "a write to" : "a read of") +
                                          " a register that a wgmma in flight owns: wgmma.wait_group must come first");
        }
    }
}

// Returns true if all members of a .sync instruction have arrived; otherwise the fragment waits.
bool Engine::converged(Exec& x, uint32_t members) {
    members &= x.w.alive;
    if ((x.f.mask & members) == members) return true;
    x.f.wait = Wait::Converge;
    return false;
}

void Engine::exit_lanes(Warp& w, uint32_t mask) {
    w.alive &= ~mask;
    w.clock.alive = w.alive;
    Cta& cta = *w.cta;
    cta.cluster->alive_lanes -= uint32_t(__builtin_popcount(mask));
    // Lanes that exit after arriving at the cluster barrier are counted neither as arrived nor as alive.
    const uint32_t arrived = uint32_t(w.cluster_arrivals) & mask;
    for (uint32_t m = arrived; m; m &= m - 1)
        if (w.cluster_phase[__builtin_ctz(m)] == cta.cluster->phase) --cta.cluster->arrived;
    w.cluster_arrivals &= ~uint64_t(mask);
    // A .sync or .aligned instruction waits for lanes that have not exited (ISA 9.7.13.1): some may have all they need.
    for (Fragment& f : w.fragments)
        if (f.wait == Wait::Converge) f.wait = Wait::None;
    effect();
    if (!w.alive) {
        if (races_.enabled) {
            cta.last.join(w.clock.order);
            w.clock.add_held(cta.last, kWarp, false);
            cta.last.seen.set(w.clock.slot, w.clock.epoch);
        }
        --cta.alive_warps;
        check_named_barriers(cta);
    }
    check_cluster_barrier(*cta.cluster);
}

Next Engine::branch(Exec& x, uint32_t taken) {
    Fragment& f = x.f;
    const uint32_t target = uint32_t(x.in.as<mod::Branch>().target);
    if (taken == f.mask) {
        f.pc = target;
    } else if (taken == 0) {
        ++f.pc;
    } else {
        Fragment other;
        other.mask = taken;
        other.pc = target;
        f.mask &= ~taken;
        ++f.pc;
        x.w.fragments.push_back(other);     // invalidates f
    }
    return Next::Jumped;
}

void Engine::warp_op(Exec& x) {
    const Instr& in = x.in;
    const uint32_t mask = x.mask;
    auto set_pred = [&](uint32_t i, uint32_t lanes) {
        if (x.has_dst(i)) *x.dst(i) = (*x.dst(i) & ~mask) | (lanes & mask);
        x.set_valid(i, ~0u);
    };
    if (mask == x.w.alive && in.op <= Op::redux && in.op != Op::activemask && in.op != Op::elect) races_.meet_lanes(x.w.clock);
    switch (in.op) {
        case Op::shfl: {
            uint32_t values[32], inside = 0, valid = 0;
            const uint32_t source_valid = x.valid(0);
            const ShuffleMode mode = in.as<mod::Shuffle>().mode;
            for_lanes(mask, [&](int l) {
                const uint32_t b = x.src(1)[l] & 31, c = x.src(2)[l];
                const uint32_t clamp = c & 31, segment = c >> 8 & 31;
                const uint32_t max_lane = (uint32_t(l) & segment) | (clamp & ~segment), min_lane = uint32_t(l) & segment;
                int j;
                bool p;
                switch (mode) {
                    case ShuffleMode::Up: j = l - int(b); p = j >= int(max_lane); break;
                    case ShuffleMode::Down: j = l + int(b); p = j <= int(max_lane); break;
                    case ShuffleMode::Butterfly: j = l ^ int(b); p = j <= int(max_lane); break;
                    default: j = int(min_lane | (b & ~segment)); p = j <= int(max_lane);
                }
                if (!p) j = l;
                inside |= uint32_t(p) << l;
                values[l] = x.src(0)[j];
                // A shuffle from a lane that does not take part gives an undefined value.
                valid |= uint32_t((source_valid >> j & 1) && (mask >> j & 1)) << l;
            });
            if (x.has_dst(0)) for_lanes(mask, [&](int l) { x.dst(0)[l] = values[l]; });
            x.set_valid(0, valid);
            set_pred(1, inside);
            break;
        }
        case Op::vote: case Op::ballot: {
            if (mask & ~x.valid(0) && config_.check_poison) note(Check::Uninitialized, "a vote on a predicate that was never defined");
            const uint32_t p = x.pred(0) & mask;
            if (in.op == Op::ballot) {
                for_lanes(mask, [&](int l) { x.dst()[l] = p; });
                x.set_valid(0, ~0u);
            } else {
                const VoteMode mode = in.as<mod::Vote>().mode;
                const bool r = mode == VoteMode::All ? p == mask : mode == VoteMode::Any ? p != 0 : p == mask || p == 0;
                set_pred(0, r ? ~0u : 0);
            }
            break;
        }
        case Op::match_any: case Op::match_all: {
            uint32_t same[32], all = ~0u;
            for_lanes(mask, [&](int l) {
                same[l] = 0;
                for_lanes(mask, [&](int k) { same[l] |= uint32_t(x.value(0, k) == x.value(0, l)) << k; });
                all &= same[l] == mask ? ~0u : 0;
            });
            if (x.has_dst(0)) for_lanes(mask, [&](int l) { x.dst()[l] = in.op == Op::match_any ? same[l] : all ? mask : 0; });
            x.set_valid(0, x.valid(0));
            set_pred(1, all);
            break;
        }
        case Op::activemask:
            for_lanes(mask, [&](int l) { x.dst()[l] = mask; });
            x.set_valid(0, ~0u);
            break;
        case Op::elect: {
            const uint32_t leader = uint32_t(__builtin_ctz(mask));
            if (x.has_dst(0)) for_lanes(mask, [&](int l) { x.dst(0)[l] = leader; });
            x.set_valid(0, ~0u);
            set_pred(1, 1u << leader);
            break;
        }
        case Op::redux: {
            const mod::Redux& m = in.as<mod::Redux>();
            uint32_t r = x.src(0)[x.first_lane()];
            bool first = true;
            for_lanes(mask, [&](int l) {
                const uint32_t v = in.type == Type::f32 && m.abs ? x.src(0)[l] & 0x7FFFFFFF : x.src(0)[l];
                if (first) { first = false; r = v; return; }
                switch (m.operation) {
                    case ReduceOp::Add: r += v; break;
                    case ReduceOp::Min: case ReduceOp::Max: r = extreme_bits(in.type, m.operation == ReduceOp::Min, m.nan, r, v); break;
                    case ReduceOp::And: r &= v; break;
                    case ReduceOp::Or: r |= v; break;
                    default: r ^= v;
                }
            });
            const bool valid = (x.valid(0) & mask) == mask;
            for_lanes(mask, [&](int l) { x.dst()[l] = r; });
            x.set_valid(0, valid ? ~0u : 0);
            break;
        }
        case Op::warpsync: races_.sync_lanes(x.w.clock); break;
        case Op::clock: {
            const Timer timer = in.as<mod::Time>().timer;
            const uint64_t t = timer >= Timer::Global ? time_ * 32 : time_;
            for_lanes(mask, [&](int l) {
                if (x.op(0).bits == 64) put<uint64_t>(x.dst(), l, t);
                else x.dst()[l] = uint32_t(timer == Timer::ClockHigh || timer == Timer::GlobalHigh ? t >> 32 : t);
            });
            x.set_valid(0, ~0u);
            break;
        }
        default: break;
    }
}

// setmaxnreg moves registers between the warp and its CTA's pool (ISA 9.7.19.5). All warps of a warpgroup must execute
// the same instruction. Kernels that run correctly on chips violate both parts: different counts in one warpgroup are
// reported by default, different instructions only with `letter`, because a chip moves each warp's registers
// separately.
Next Engine::set_registers(Exec& x) {
    Warp& w = x.w;
    Cta& cta = *w.cta;
    const bool grows = x.in.as<mod::Registers>().grows;
    const uint32_t named = uint32_t(x.in.as<mod::Registers>().registers), have = w.registers;
    // Without .maxnreg a warp may start with more registers than setmaxnreg.inc names: flash-attn-4 does so with 168 and
    // 128. It keeps them.
    const uint32_t wanted = grows && !program_.max_registers ? std::max(named, have) : named;
    const std::string text = std::string("setmaxnreg.") + (grows ? "inc" : "dec") + " to " + std::to_string(named);
    if (named % 8 || named < 24 || named > 256) fail(Check::IllegalInstruction, text + ": not a multiple of 8 in 24..256");
    if (grows ? wanted < have : wanted > have) fail(Check::IllegalInstruction, text + " but the warp has " + std::to_string(have));
    if (grows && (wanted - have) * 32 > cta.pool_registers) {
        // ptxas ignores all setmaxnreg of a kernel with neither .maxnreg nor .minnctapersm (C7508), so none of them waits.
        if (!program_.moves_registers) return Next::Advance;
        // Blocks until other warps release enough.
        x.f.wait = Wait::Registers;
        x.f.poll_epoch = epoch_;
        return Next::Stay;
    }
    auto& changes = cta.register_changes[w.index / 4];
    if (changes.size() <= w.register_changes) changes.push_back({current_.row, named, 0, current_});
    RegisterChange& change = changes[w.register_changes++];
    ++change.warps;
    if (change.registers != named || (config_.check_letter && change.row != current_.row)) {
        SimError error(change.registers != named ? Check::RegisterCount : Check::RegisterPlace, text + (change.registers != named
                           ? " but another warp of the warpgroup set " + std::to_string(change.registers)
                           : " at another instruction than another warp of the warpgroup; by the letter all must execute the same one"));
        error.others.push_back({"the other warp", change.first});
        note(error);
    }
    if (grows) cta.pool_registers -= (wanted - have) * 32;
    else cta.pool_registers += (have - wanted) * 32;
    w.registers = wanted;
    effect();
    return Next::Advance;
}

// With `letter`, all warps of a warpgroup must have executed the same number of setmaxnreg when they end.
void Engine::check_register_changes(const Cta& cta) {
    for (const auto& [group, changes] : cta.register_changes) {
        const uint32_t warps = std::min<uint32_t>(4, uint32_t(cta.warps.size()) - 4 * group);
        for (const RegisterChange& change : changes) {
            if (change.warps == warps) continue;
            SimError error(Check::RegisterPlace, "setmaxnreg to " + std::to_string(change.registers) + " was executed by " + std::to_string(change.warps) +
                                                     " of the " + std::to_string(warps) + " warps of warpgroup " + std::to_string(group) +
                                                     " only; by the letter all must execute it");
            error.place = change.first;
            findings_.note(std::move(error));
        }
    }
}

Next Engine::dispatch(Exec& x) {
    const Instr& in = x.in;
    const Op op = in.op;
    if (op <= Op::testp) {
        if (op >= Op::mov && op <= Op::unpack) {
            convert(x);
            return Next::Advance;
        }
        const bool known = op >= Op::fadd ? alu_float(x) : op >= Op::cvt ? convert(x) : alu_int(x);
        if (!known) stop(Check::UnknownInstruction, "this operation is not modelled for its type");
        if (op != Op::selp) {
            uint32_t valid = ~0u;
            for (uint32_t i = 0; i < x.sources(); ++i) valid &= x.valid(i);
            for (uint32_t i = 0; i < in.ndst; ++i) x.set_valid(i, valid);
        }
        return Next::Advance;
    }
    if (op >= Op::shfl && op <= Op::clock) {
        warp_op(x);
        return Next::Advance;
    }
    if (op >= Op::ld && op <= Op::tensormap_cp && op != Op::mma_sync && op != Op::st_async && op != Op::red_async) return memory(x);
    if (op >= Op::bar_sync && op <= Op::mbar_pending_count) return barrier(x);
    if (op == Op::mma_sync || op >= Op::tmem_alloc) return tensor(x);
    if (op == Op::st_async || op == Op::red_async || op >= Op::cp_async) return async_copy(x);
    switch (op) {
        case Op::setmaxnreg: return set_registers(x);
        case Op::trap: stop(Check::IllegalInstruction, "the kernel executed a trap");
        case Op::nop: case Op::nanosleep: return Next::Advance;
        default: stop(Check::UnknownInstruction, "this instruction is not modelled");
    }
}

Next Engine::execute(Warp& w, Fragment& f, const Instr& in) {
    Exec x{w, f, in, program_.operands.data() + in.first, f.mask, program_.constants.data()};
    if (w.pending_loads || program_.uses_wgmma) settle_registers(w, in);
    if (in.guard.kind != Operand::None) {
        const uint32_t p = *w.row(in.guard, x.constants) ^ (in.guard.negated ? ~0u : 0u);
        if (in.guard.kind == Operand::Reg && config_.check_poison) {
            if (f.mask & ~w.valid[size_t(in.guard.id)]) note(Check::Uninitialized, "control flow depends on a predicate that was never defined");
        }
        x.mask &= p;
    }
    if (in.op == Op::bra) return branch(x, x.mask);
    if (in.op == Op::brx) {
        uint32_t taken = 0;
        if (x.mask & ~x.valid(0) && config_.check_poison) note(Check::Uninitialized, "a branch index was never defined");
        for_lanes(x.mask, [&](int l) { taken |= uint32_t(x.value(0, l) == x.value(1, l)) << l; });
        return branch(x, taken);
    }
    if (in.op == Op::exit) {
        if (x.mask == 0) {
            ++f.pc;
            return Next::Jumped;
        }
        const uint32_t gone = x.mask;
        f.mask &= ~gone;
        if (f.mask) ++f.pc;
        exit_lanes(w, gone);
        return Next::Jumped;
    }
    if (x.mask == 0) return Next::Advance;
    if (in.sync || in.aligned) {
        uint32_t members = w.alive;
        if (!in.aligned && in.op != Op::setmaxnreg) {
            // Lanes may name different masks: the tiles of a warp do.
            for_lanes(x.mask, [&](int l) {
                if (!(x.value(x.sources() - 1, l) >> l & 1)) fail(Check::Divergent, "an executing lane is not in its own member mask");
            });
            members = uint32_t(x.value(x.sources() - 1, x.first_lane())) & w.alive;
        }
        if (x.mask == f.mask ? !converged(x, members) : (x.mask & members) != members) {
            if (x.mask == f.mask) return Next::Stay;
            fail(Check::Divergent, "a .sync or .aligned instruction is predicated off for part of its lanes");
        }
    }
    return dispatch(x);
}

}  // namespace warpcheck
