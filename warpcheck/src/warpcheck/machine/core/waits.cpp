// Ends of a launch that does not end by itself: deadlock and livelock, with the waits of all warps.
#include <utility>

#include "engine.hpp"

namespace warpcheck {
namespace {

constexpr size_t kListed = 96;              // places that a finding lists
constexpr size_t kConsumers = 4;            // waits for the phase before that it lists
constexpr size_t kNamed = 8;                // warps with equal waits that it names
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
        const std::string rest = " for the end of phase " + std::to_string(f.bar_phase) + ": " + of(uint64_t(bar->pending), bar->expected) +
                                 " arrivals missing" +
                                 (!bar->tx ? "" : bar->tx > 0 ? ", " + std::to_string(bar->tx) + " expected bytes have not come"
                                                              : ", " + std::to_string(-bar->tx) + " more bytes came than were expected");
        told.text = "waits on " + told.barrier + " of CTA " + std::to_string(f.bar_cta->linear) + rest;
        told.like = told.barrier + rest;
        add_history(told, *bar, f);
    } else if (f.wait == Wait::Named) {
        const Operand* const id_at = program_.operands.data() + in.first + in.ndst;
        const uint32_t id = w.row(*id_at, program_.constants.data())[__builtin_ctz(f.mask)];
        const NamedBarrier& named = w.cta->named[id & 15];
        told.text = "waits at barrier " + std::to_string(id) + ": " + of(named.arrived, named.expected ? named.expected : alive_threads(*w.cta)) +
                    " threads have arrived";
        told.root = !waits_elsewhere(w, Wait::Named);
    } else if (f.wait == Wait::ClusterBarrier) {
        told.text = "waits at the cluster barrier: " + of(w.cta->cluster->arrived, w.cta->cluster->alive_lanes) + " threads have arrived";
        told.root = !waits_elsewhere(w, Wait::ClusterBarrier);
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
    if (told.like.empty()) told.like = told.text;
    return told;
}

// Tells what became of the phases of an mbarrier, and finds out whether others that arrive there wait themselves.
void Engine::add_history(Waiting& told, const Mbarrier& bar, const Fragment& f) const {
    for (const auto& [cta, warp] : bar.arrivers)
        told.root &= !waits(cta, warp) || (cta == told.place.cta && warp == told.place.warp);
    if (bar.last_arrival.row >= 0)
        told.hints.push_back({"  its last arrival, in phase " + std::to_string(bar.last_arrival_phase), bar.last_arrival});
    if (bar.phase > 0 && bar.phase == f.bar_phase)
        for (size_t i = 0; i < std::min(bar.waits.size(), kConsumers); ++i)
            told.hints.push_back({"  phase " + std::to_string(bar.phase - 1) + " was waited for", bar.waits[i].place});
    told.hints.push_back({"  it was initialised", bar.init});
}

bool Engine::waits(int32_t cta, int32_t warp) const {
    return std::any_of(warps_.begin(), warps_.end(), [&](const Warp* w) { return int32_t(w->cta->linear) == cta && int32_t(w->index) == warp; });
}

// True if a warp of the same CTA, or cluster, waits for something else than this kind of barrier.
bool Engine::waits_elsewhere(const Warp& w, Wait kind) const {
    return std::any_of(warps_.begin(), warps_.end(), [&](const Warp* other) {
        return (kind == Wait::Named ? other->cta == w.cta : other->cta->cluster == w.cta->cluster) &&
               std::any_of(other->fragments.begin(), other->fragments.end(), [&](const Fragment& f) { return f.wait != kind; });
    });
}

// Adds the waits of all warps to an error that ends the launch: equal ones once, and first those of which no waiting
// warp is known that would end them.
void Engine::add_waits(SimError& error) const {
    struct Group {
        Waiting first;
        std::vector<std::pair<uint32_t, uint32_t>> more;    // CTA and warp
    };
    std::vector<Group> groups;
    for (const Warp* w : warps_)
        for (const Fragment& f : w->fragments) {
            Waiting told = waiting(*w, f);
            const auto known = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
                return g.first.like == told.like && g.first.place.row == told.place.row && g.first.root == told.root;
            });
            if (known == groups.end()) groups.push_back({std::move(told), {}});
            else known->more.push_back({w->cta->linear, w->index});
        }
    std::stable_partition(groups.begin(), groups.end(), [](const Group& g) { return g.first.root; });
    for (const Group& group : groups) {
        if (error.barrier.empty()) error.barrier = group.first.barrier;
        if (error.others.size() >= kListed) break;
        error.others.push_back({group.first.text, group.first.place});
        error.others.insert(error.others.end(), group.first.hints.begin(), group.first.hints.end());
        if (group.more.empty()) continue;
        std::string text = "  and so " + std::string(group.more.size() == 1 ? "does " : "do ");
        for (size_t i = 0; i < group.more.size(); ++i) {
            if (i == kNamed) {
                text += ", and " + std::to_string(group.more.size() - i) + " more";
                break;
            }
            text += (i ? ", warp " : "warp ") + std::to_string(group.more[i].second) + " of CTA " + std::to_string(group.more[i].first);
        }
        error.others.push_back({text, {}});
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
