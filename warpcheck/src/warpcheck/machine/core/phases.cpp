// Phases of mbarriers that end well in this order of events and not in others: predicted from what is ordered.
#include <utility>

#include "engine.hpp"

namespace warpcheck {

// What had been executed before the next instruction of a warp.
Order Engine::executed_by(const Warp& w) const {
    Order order;
    order.join_executed(w.clock.order);
    for (const Held& h : w.clock.held) order.join_executed(h.order);
    order.via[kExecuted].set(w.clock.slot, w.clock.epoch);
    return order;
}

// An expect_tx without arrival.
void Engine::note_expect(Mbarrier& bar, const Warp& w, int64_t bytes) {
    const int64_t others = bar.expected_tx - bar.completed_tx;
    note_expected(bar, bytes, executed_by(w));
    bar.expects.push_back({w.clock.slot, w.clock.epoch, current_, others});
}

// Bytes that are expected. `from`: what had been executed before.
void Engine::note_expected(Mbarrier& bar, int64_t bytes, const Order& from) {
    bar.expected_tx += bytes;
    for (ExpectTx& other : bar.expects)
        if (!from.after(other.slot, other.epoch)) other.others += bytes;
}

void Engine::note_completed(Mbarrier& bar, int64_t bytes, const Order& after) {
    bar.completed_tx += bytes;
    for (ExpectTx& other : bar.expects)
        if (!after.after(other.slot, other.epoch)) other.others -= bytes;
}

// The phase cannot end before an arrival, and so not before the expects that the arrival comes after.
void Engine::note_arrival(Mbarrier& bar, const Order& from) {
    auto& all = bar.expects;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const ExpectTx& a) { return from.after(a.slot, a.epoch); }), all.end());
}

void Engine::note_waited(Mbarrier& bar, const Warp& w) {
    for (ParityWait& known : bar.waits)
        if (known.slot == w.clock.slot) {
            known = {w.clock.slot, w.clock.epoch, current_};
            return;
        }
    bar.waits.push_back({w.clock.slot, w.clock.epoch, current_});
}

// Called when the current phase ends. An expect_tx that no arrival comes after may come too late, if the bytes of
// the others alone can end the phase. A wait by parity for the phase before that nothing in this phase comes after may
// be late as well: then it finds this phase complete, whose parity is the other one, and waits for the next.
void Engine::check_phase(const Cta& cta, uint32_t offset, Mbarrier& bar) {
    const auto tell = [&](Check check, const Place& place, const std::string& text, const char* sentence, const Place& other) {
        if (!findings_.told(check) || findings_.again(check, place.row, other.row)) return;
        SimError error(check, text);
        error.place = place;
        if (other.row >= 0) error.others.push_back({sentence, other});
        error.others.push_back({"the barrier was initialised", bar.init});
        error.barrier = program_.barrier(offset);
        findings_.note(std::move(error));
    };
    const std::string phase = "phase " + std::to_string(bar.phase) + " of " + program_.barrier(offset) + " of CTA " + std::to_string(cta.linear);
    for (const ExpectTx& late : std::exchange(bar.expects, {}))
        if (late.others == 0)
            tell(Check::EarlyPhase, late.place, phase + " may end before these bytes are expected: its arrivals and its other bytes do not depend on them",
                 "the last arrival", bar.last_arrival);
    bar.expected_tx = bar.completed_tx = 0;
    const Order& end = bar.release[bar.phase & 1];
    for (const ParityWait& wait : std::exchange(bar.waits, {}))
        if (!end.after(wait.slot, wait.epoch))
            tell(Check::LappedWait, wait.place, phase + " may end before this wait for the phase before it: nothing in the phase comes after the wait",
                 "the last arrival", bar.last_arrival);
}

// By the letter of the ISA, an arrival from another CTA hands memory over only if it and the wait have the scope of the
// cluster.
void Engine::check_scope(const Mbarrier& bar, uint32_t offset, uint64_t phase, bool narrow) {
    const Place& remote = bar.remote[phase & 1];
    if (remote.row < 0 || !(narrow || bar.remote_narrow[phase & 1])) return;
    if (!findings_.told(Check::WaitScope) || findings_.again(Check::WaitScope, current_.row, remote.row)) return;
    SimError error(Check::WaitScope, std::string(narrow ? "the wait" : "the arrival") + " on " + program_.barrier(offset) +
                                         " has the scope of its CTA, and another CTA arrives");
    error.others.push_back({"the arrival", remote});
    error.barrier = program_.barrier(offset);
    note(std::move(error));
}

}  // namespace warpcheck
