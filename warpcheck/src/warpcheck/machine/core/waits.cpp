// Ends of a launch that does not end by itself: deadlock and livelock, with the waits of all warps.
#include "engine.hpp"

namespace warpcheck {
namespace {

constexpr size_t kListed = 96;              // waits that a finding lists
constexpr uint64_t kGoesOn = 1 << 24;       // warp instructions that a run may execute after an undefined value
constexpr uint64_t kUnchanged = 1 << 25;    // warp instructions that a run may execute while nothing changes
constexpr uint64_t kClocked = 64;           // steps between two looks at the clock

bool waits_for_barrier(Op op) { return op == Op::mbar_try_wait || op == Op::mbar_test_wait; }

std::string of(uint64_t count, uint64_t all) { return std::to_string(count) + " of " + std::to_string(all); }

}  // namespace

// Description of what a fragment waits for. A fragment that runs has no hints.
Waiting Engine::waiting(const Warp& w, const Fragment& f) const {
    Waiting told;
    const bool polled = f.wait == Wait::Poll || (f.wait == Wait::None && f.last.pc != Look::kNone && f.poll_epoch == epoch_);
    const uint32_t pc = polled ? f.last.pc : f.pc;
    const Instr& in = program_.code[pc];
    told.place = place_of(w, f, int32_t(pc));
    const bool at_barrier = f.wait == Wait::Mbarrier || f.timed_out || ((polled || f.wait == Wait::None) && waits_for_barrier(in.op));
    const Mbarrier* bar = nullptr;
    if (at_barrier && f.bar_cta) {
        const auto found = f.bar_cta->barriers.find(f.bar_offset);
        if (found != f.bar_cta->barriers.end()) bar = &found->second;
    }
    if (bar) {
        told.barrier = program_.barrier(f.bar_offset);
        told.text = "waits on " + told.barrier + " of CTA " + std::to_string(f.bar_cta->linear) + " for the end of phase " +
                    std::to_string(f.bar_phase) + ": " + of(uint64_t(bar->pending), bar->expected) + " arrivals missing";
        if (bar->tx) told.text += bar->tx > 0 ? ", " + std::to_string(bar->tx) + " expected bytes have not come"
                                              : ", " + std::to_string(-bar->tx) + " more bytes came than were expected";
        if (bar->last_arrival.row >= 0) told.hints.push_back({"  its last arrival", bar->last_arrival});
        told.hints.push_back({"  it was initialised", bar->init});
    } else if (f.wait == Wait::Named) {
        const Operand* const id_at = program_.operands.data() + in.first + in.ndst;
        const uint32_t id = w.row(*id_at, program_.constants.data())[__builtin_ctz(f.mask)];
        const NamedBarrier& named = w.cta->named[id & 15];
        told.text = "waits at barrier " + std::to_string(id) + ": " + of(named.arrived, named.expected ? named.expected : alive_threads(*w.cta)) +
                    " threads have arrived";
    } else if (f.wait == Wait::ClusterBarrier) {
        told.text = "waits at the cluster barrier: " + of(w.cta->cluster->arrived, w.cta->cluster->alive_lanes) + " threads have arrived";
    } else if (f.wait == Wait::Converge) {
        told.text = "waits for the other lanes of its warp at a .sync or .aligned instruction";
    } else if (f.wait == Wait::Registers) {
        const uint32_t wanted = uint32_t(in.as<mod::Registers>().registers);
        told.text = "waits for registers: setmaxnreg.inc from " + std::to_string(w.registers) + " to " + std::to_string(wanted) + " needs " +
                    std::to_string((wanted - w.registers) * 32) + ", the CTA's pool has " + std::to_string(w.cta->pool_registers);
    } else if (f.wait == Wait::TmemAlloc) {
        told.text = "waits for free TMEM columns";
    } else if (f.wait == Wait::Warpgroup) {
        told.text = "waits for the other warps of its warpgroup to issue their wgmma";
    } else if (f.wait == Wait::Failed) {
        told.text = "has stopped after an error";
    } else if (polled) {
        told.text = "polls " + memory_name(f.last.address) + ", which nobody changes";
    } else {
        told.text = "runs";
        if (f.last.pc != Look::kNone && f.last.address) told.text += "; it polled " + memory_name(f.last.address);
    }
    return told;
}

// Adds the waits of all warps to an error that ends the launch.
void Engine::add_waits(SimError& error) const {
    for (const Warp* w : warps_)
        for (const Fragment& f : w->fragments) {
            Waiting told = waiting(*w, f);
            if (error.barrier.empty()) error.barrier = told.barrier;
            if (error.others.size() >= kListed) continue;
            error.others.push_back({told.text, told.place});
            error.others.insert(error.others.end(), told.hints.begin(), told.hints.end());
        }
}

// True if a warp waits for registers that no warp can give back. A warp that has not executed its setmaxnreg yet may
// still release registers; then the deadlock has another cause.
bool Engine::starves(const Warp& w) const {
    const auto& all = w.cta->warps;
    return w.fragments.front().wait == Wait::Registers && std::none_of(all.begin(), all.end(), [](const auto& other) {
               return other->alive && !other->register_changes && other->fragments.front().wait != Wait::Registers;
           });
}

void Engine::deadlock() {
    size_t count = 0;
    bool divergent = false, starved = false;
    for (const Warp* w : warps_) {
        const auto& fs = w->fragments;
        count += fs.size();
        divergent |= fs.size() > 1 && std::all_of(fs.begin(), fs.end(), [](const Fragment& f) { return f.wait == Wait::Converge; });
        starved |= !fs.empty() && starves(*w);
    }
    SimError error(divergent ? Check::Divergent : starved ? Check::RegisterFile : Check::Deadlock,
                   divergent ? "lanes of a warp wait at different .sync or .aligned instructions"
                   : starved ? "the warps ask for more registers than the CTA was launched with, and nobody gives any back"
                             : "nothing can run any more; " + std::to_string(count) + " warps or parts of warps wait");
    add_waits(error);
    error.fatal = true;
    throw error;
}

void Engine::livelock(const std::string& message) const {
    SimError error(Check::Livelock, message);
    add_waits(error);
    error.fatal = true;
    throw error;
}

// Ends a launch that is over its budget, and calls `tick` from time to time.
void Engine::watch() {
    const auto executes = [&](uint64_t count, const char* rest) {
        livelock("the kernel did not end within " + std::to_string(count) + " warp instructions" + rest);
    };
    if (config_.max_instructions && executed > config_.max_instructions) executes(config_.max_instructions, "");
    if (executed > changed_at_ + kUnchanged) executes(kUnchanged, " in which nothing changed");
    if (findings_.undefined && !undefined_since_) undefined_since_ = executed;
    if (undefined_since_ && executed > undefined_since_ + kGoesOn) executes(kGoesOn, " after a finding that leaves undefined values");
    if (++steps_ % kClocked) return;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
    if (config_.max_seconds > 0 && seconds > config_.max_seconds) {
        std::ostringstream text;
        text << "the kernel did not end within " << config_.max_seconds << " s; it executed " << executed << " warp instructions";
        livelock(text.str());
    }
    if (tick) tick(seconds, next_cluster_ - clusters_.size(), cluster_count_);
}

}  // namespace warpcheck
