// Handling of errors: end the run, record, or skip the instruction.
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
    const bool everywhere = error.check == Check::Deadlock || error.check == Check::Livelock || (error.check == Check::Divergent && !error.others.empty());
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
            if (later.check >= Check::Race && later.check < Check::BarrierLeftover &&
                !(later.check >= Check::CoResidency && later.check <= Check::LappedWait)) {
                annotate(later);
                throw;
            }
            more = later.check == Check::Uninitialized;
        } catch (UnitError&) {
            more = false;
        }
    }
}

}  // namespace warpcheck
