// Handling of errors (end the run, record, or skip the instruction), and the description of a deadlock.
#include "engine.hpp"

namespace warpcheck {
namespace {

constexpr uint64_t kAftermath = 100000;     // warp instructions that may run to find the race behind an undefined value

}  // namespace

SimError Engine::named(const UnitError& error) {
    static const Check checks[] = {Check::UnknownInstruction, Check::IllegalInstruction, Check::Misaligned, Check::OutOfBounds};
    SimError result(checks[int(error.fault)], error.what());
    result.fatal = error.fault == Fault::Unsupported;
    return result;
}

void Engine::annotate(SimError& error) const {
    const bool everywhere = error.check == Check::Deadlock || (error.check == Check::Divergent && !error.others.empty());
    if (error.place.row < 0 && error.place.cta < 0 && !everywhere) error.place = current_;
}

void Engine::stop(Check check, const std::string& message) const {
    SimError error(check, message);
    error.fatal = true;
    throw error;
}

void Engine::note(Check check, const std::string& message) {
    if (findings_.told(check) && !findings_.again(check, current_.row, -1)) note(SimError(check, message));
}

void Engine::note(SimError error) {
    annotate(error);
    findings_.note(std::move(error));
}

// Skips an operation that failed, or ends the run.
void Engine::skip(SimError error) {
    annotate(error);
    if (!findings_.goes_on(error)) throw error;
    findings_.note(std::move(error));
}

// Skips an instruction. Its destination registers keep their values; a predicate becomes true, so that a wait ends.
Next Engine::skip(Exec& x, const SimError& error) {
    skip(error);
    x.f.wait = Wait::None;
    for (uint32_t i = 0; i < x.in.ndst; ++i) {
        if (!x.has_dst(i)) continue;
        if (x.op(i).bits == 1) *x.dst(i) |= x.mask;
        x.set_valid(i, ~0u);
    }
    effect();
    return Next::Advance;
}

Next Engine::attempt(Warp& w, Fragment& f, const Instr& in) {
    try {
        return execute(w, f, in);
    } catch (const SimError& error) {
        Exec x{w, f, in, program_.operands.data() + in.first, f.mask, program_.constants.data()};
        return skip(x, error);
    } catch (const UnitError& error) {
        Exec x{w, f, in, program_.operands.data() + in.first, f.mask, program_.constants.data()};
        return skip(x, named(error));
    }
}

// Searches for the race behind an undefined value. If the value was read too early, its writer has not run yet, and the
// race between the two is the better finding. So the reader stops, and the others continue for a while. Throws the race
// if one is found.
void Engine::look_for_race() {
    const uint64_t end = executed + kAftermath;
    bool more = true;
    for (int found = 0; more && executed < end && found < 1000; ++found) {
        if (running_)
            for (Fragment& f : running_->fragments) f.wait = Wait::Failed;
        if (advancing_) {
            advancing_->next = 0;
            advancing_->steps.clear();
        }
        running_ = nullptr;
        advancing_ = nullptr;
        try {
            while (more && executed < end) more = step();
        } catch (SimError& later) {
            if (later.check >= Check::Race && later.check < Check::BarrierLeftover && later.check != Check::CoResidency) {
                annotate(later);
                throw;
            }
            more = later.check == Check::Uninitialized;
        } catch (UnitError&) {
            more = false;
        }
    }
}

void Engine::deadlock() {
    SimError error(Check::Deadlock, "");
    bool divergent = false;
    bool starved = false;
    uint32_t count = 0;
    for (Warp* w : warps_) {
        for (Fragment& f : w->fragments) {
            ++count;
            std::string text = "waits";
            std::vector<std::pair<std::string, Place>> hints;
            const uint32_t pc = f.wait == Wait::Poll ? f.last.pc : f.pc;
            const Place place = place_of(*w, f, int32_t(pc));
            const Instr& in = program_.code[pc];
            if ((f.wait == Wait::None || f.wait == Wait::Poll) && (in.op == Op::mbar_try_wait || in.op == Op::mbar_test_wait)) f.wait = Wait::Mbarrier;
            if ((f.wait == Wait::Mbarrier || f.timed_out) && f.bar_cta) {
                const auto found = f.bar_cta->barriers.find(f.bar_offset);
                if (found != f.bar_cta->barriers.end()) {
                    const Mbarrier& bar = found->second;
                    if (error.barrier.empty()) error.barrier = program_.barrier(f.bar_offset);
                    text = "waits on " + program_.barrier(f.bar_offset) + " of CTA " + std::to_string(f.bar_cta->linear) + " for the end of phase " +
                           std::to_string(f.bar_phase) + ": " + std::to_string(bar.pending) + " of " + std::to_string(bar.expected) + " arrivals missing";
                    if (bar.tx) text += bar.tx > 0 ? ", " + std::to_string(bar.tx) + " expected bytes have not come" : ", " + std::to_string(-bar.tx) + " more bytes came than were expected";
                    if (bar.last_arrival.row >= 0) hints.push_back({"  its last arrival", bar.last_arrival});
                    hints.push_back({"  it was initialised", bar.init});
                }
            } else if (f.wait == Wait::Named) {
                Exec x{*w, f, in, program_.operands.data() + in.first, f.mask, program_.constants.data()};
                const uint32_t id = uint32_t(x.value(0, x.first_lane()));
                const NamedBarrier& bar = w->cta->named[id & 15];
                text = "waits at barrier " + std::to_string(id) + ": " + std::to_string(bar.arrived) + " of " +
                       std::to_string(bar.expected ? bar.expected : alive_threads(*w->cta)) + " threads have arrived";
            } else if (f.wait == Wait::ClusterBarrier) {
                text = "waits at the cluster barrier: " + std::to_string(w->cta->cluster->arrived) + " of " + std::to_string(w->cta->cluster->alive_lanes) + " threads have arrived";
            } else if (f.wait == Wait::Converge) {
                text = "waits for the other lanes of its warp at a .sync or .aligned instruction";
                divergent |= w->fragments.size() > 1 && std::all_of(w->fragments.begin(), w->fragments.end(), [](const Fragment& g) { return g.wait == Wait::Converge; });
            } else if (f.wait == Wait::Registers) {
                // A warp that has not executed its setmaxnreg yet may still release registers; then the deadlock has
                // another cause.
                const auto& all = w->cta->warps;
                starved |= std::none_of(all.begin(), all.end(), [](const auto& other) {
                    return other->alive && !other->register_changes && other->fragments.front().wait != Wait::Registers;
                });
                const uint32_t wanted = uint32_t(in.as<mod::Registers>().registers);
                text = "waits for registers: setmaxnreg.inc from " + std::to_string(w->registers) + " to " + std::to_string(wanted) + " needs " +
                       std::to_string((wanted - w->registers) * 32) + ", the CTA's pool has " + std::to_string(w->cta->pool_registers);
            } else if (f.wait == Wait::TmemAlloc) {
                text = "waits for free TMEM columns";
            } else if (f.wait == Wait::Warpgroup) {
                text = "waits for the other warps of its warpgroup to issue their wgmma";
            } else {
                text = "polls " + memory_name(f.last.address) + ", which nobody changes";
            }
            if (error.others.size() < 96) {
                error.others.push_back({text, place});
                for (auto& h : hints) error.others.push_back(h);
            }
        }
    }
    SimError named(divergent ? Check::Divergent : starved ? Check::RegisterFile : Check::Deadlock,
                   divergent ? "lanes of a warp wait at different .sync or .aligned instructions"
                   : starved ? "the warps ask for more registers than the CTA was launched with, and nobody gives any back"
                             : "nothing can run any more; " + std::to_string(count) + " warps or parts of warps wait");
    named.others = error.others;
    named.barrier = error.barrier;
    named.fatal = true;
    throw named;
}

}  // namespace warpcheck
