// Names of the checks, and the record and collection of findings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "place.hpp"

namespace warpcheck {

// The names are those of warpcheck/src/warpcheck/findings.py.
// clang-format off
#define WARPCHECK_CHECKS(X) \
    X(Deadlock, "deadlock") X(Livelock, "livelock") X(UnknownInstruction, "unknown-instruction") X(LaunchRefused, "launch-refused") \
    X(RegisterFile, "register-file") X(Divergent, "divergent") X(OutOfBounds, "out-of-bounds") X(Misaligned, "misaligned") \
    X(Uninitialized, "uninitialized") X(Unwritten, "unwritten") X(BarrierMisuse, "barrier-misuse") X(TmemMisuse, "tmem-misuse") \
    X(IllegalInstruction, "illegal-instruction") \
    X(Race, "race") X(LaneRace, "lane-race") X(ProxyFence, "proxy-fence") X(TensormapFence, "tensormap-fence") \
    X(BarrierInitFence, "barrier-init-fence") X(WgmmaFence, "wgmma-fence") X(WgmmaWait, "wgmma-wait") \
    X(GridDependency, "grid-dependency") X(CtaEnd, "cta-end") X(CoResidency, "co-residency") X(WeakPoll, "weak-poll") \
    X(EarlyPhase, "early-phase") X(LappedWait, "lapped-wait") \
    X(CpAsyncProxy, "cp-async-proxy") X(RelaxedArrival, "relaxed-arrival") X(CopyArrival, "copy-arrival") \
    X(BarrierInitLanes, "barrier-init-lanes") X(TensorFence, "tensor-fence") X(WaitScope, "wait-scope") \
    X(TmemQuarter, "tmem-quarter") X(MmaOrder, "mma-order") X(RegisterCount, "setmaxnreg-count") X(RegisterPlace, "setmaxnreg-place") \
    X(EqualWrites, "equal-writes") \
    X(BarrierLeftover, "barrier-leftover") X(StoreLeftover, "store-leftover") X(TmemLeftover, "tmem-leftover")
// clang-format on

enum class Check : uint8_t {
#define X(name, text) name,
    WARPCHECK_CHECKS(X)
#undef X
        count
};

// Error of a kernel. `fatal`: the run cannot continue after it. `barrier`: name of the mbarrier that the finding
// concerns.
struct SimError : std::runtime_error {
    Check check;
    Place place;
    std::vector<std::pair<std::string, Place>> others;
    std::string barrier;
    bool fatal = false;
    SimError(Check c, const std::string& message) : std::runtime_error(message), check(c) {}
};

// Findings of the same check at the same instructions are one, with a count. `equal`: all racing writes left the bytes
// unchanged.
struct Finding {
    SimError error;
    uint64_t count = 1;
    bool equal = false;
};

class Findings {
public:
    bool collect = false;       // record findings and continue, instead of throwing the first
    uint64_t off = 0;           // bit mask of the checks that are not reported
    bool undefined = false;     // a recorded finding left values that the kernel did not compute

    bool told(Check check) const { return !(off >> int(check) & 1); }
    // True if the run continues after the error.
    bool goes_on(const SimError& error) const { return !error.fatal && (collect || !told(error.check)); }
    // Counts a finding that is known already. Returns false if it is new.
    bool again(Check check, int32_t row, int32_t other, bool equal = false) {
        if (!collect) return false;
        const auto known = index_.find(key(check, row, other));
        if (known == index_.end()) return false;
        Finding& finding = all_[known->second];
        ++finding.count;
        finding.equal &= equal;
        return true;
    }
    // Throws, records or drops a finding. `equal`: a race of writes that changed nothing.
    void note(SimError error, bool equal = false) {
        const Check check = error.check;
        if (equal) error.check = Check::EqualWrites;
        if (!told(error.check)) return;
        if (!collect || error.fatal) throw error;
        const int32_t other = error.others.empty() ? -1 : error.others.front().second.row;
        if (again(check, error.place.row, other, equal)) return;
        error.check = check;
        undefined |= check < Check::Race;
        index_[key(check, error.place.row, other)] = all_.size();
        all_.push_back({error, 1, equal});
    }
    // All findings, in the order of their first occurrence.
    std::vector<Finding> all() const {
        std::vector<Finding> named = all_;
        for (Finding& finding : named)
            if (finding.equal) finding.error.check = Check::EqualWrites;
        return named;
    }

private:
    using Key = std::tuple<Check, int32_t, int32_t>;        // the instruction rows of the two places
    // The order of two racing accesses depends on the schedule, so the key of a race ignores it.
    static Key key(Check check, int32_t row, int32_t other) {
        return check == Check::Race ? Key(check, std::min(row, other), std::max(row, other)) : Key(check, row, other);
    }

    std::vector<Finding> all_;
    std::map<Key, size_t> index_;
};

}  // namespace warpcheck
