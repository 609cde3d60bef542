// Schedulers: they choose the next warp and its number of instructions, or the next asynchronous operation. They know
// who can run, but not what it does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

namespace warpcheck {

enum class Schedule : uint8_t { RoundRobin, Random, Adversarial };

// Warp that can run: its position among the resident warps, and its index in its CTA.
struct Candidate { size_t place; uint32_t warp; };

struct Turn {
    static constexpr size_t kNobody = ~size_t(0);
    size_t warp = kNobody;      // position of the warp that runs
    uint32_t quantum = 0;       // maximum number of instructions
    size_t pipe = kNobody;      // pipe whose first operation runs a step
    bool then_a_pipe = false;   // after the warp, a pipe runs a step, in round-robin order
};

class Scheduler {
public:
    explicit Scheduler(uint64_t seed) : random_(seed * 0x9E3779B97F4A7C15ull + 1) {}
    virtual ~Scheduler() = default;
    // `ready`: warps in the order of their positions; `pipes`: number of pipes with operations. At least one of both is
    // not empty.
    virtual Turn next(const std::vector<Candidate>& ready, size_t pipes) = 0;
    // For an instruction that may wait or return false at once: true if it returns.
    virtual bool gives_up() { return random_() % 8 == 0; }

    static std::unique_ptr<Scheduler> make(Schedule schedule, uint64_t seed, uint32_t warps_per_cta);

protected:
    std::mt19937_64 random_;
};

// Alternates a slice of a warp and a step of an operation.
class RoundRobin : public Scheduler {
public:
    using Scheduler::Scheduler;
    Turn next(const std::vector<Candidate>& ready, size_t) override {
        Turn turn;
        turn.then_a_pipe = true;
        if (ready.empty()) return turn;
        auto it = std::lower_bound(ready.begin(), ready.end(), cursor_, [](const Candidate& c, size_t place) { return c.place < place; });
        turn.warp = (it == ready.end() ? ready.front() : *it).place;
        turn.quantum = 64;
        cursor_ = turn.warp + 1;
        return turn;
    }
    bool gives_up() override { return false; }

private:
    size_t cursor_ = 0;
};

class Random : public Scheduler {
public:
    using Scheduler::Scheduler;
    Turn next(const std::vector<Candidate>& ready, size_t pipes) override {
        Turn turn;
        const size_t pick = random_() % (ready.size() + pipes);
        if (pick < ready.size()) {
            turn.warp = ready[pick].place;
            const uint32_t longest = random_() % 4 ? 16 : 256;
            turn.quantum = 1 + uint32_t(random_() % longest);
        } else {
            turn.pipe = pick - ready.size();
        }
        return turn;
    }
};

// Starves one warp of every CTA and favours another. Operations complete late or at once, oldest or newest first. A turn
// in kFairness goes to anybody, because a chip lets every resident warp run in the end.
class Adversarial : public Scheduler {
public:
    Adversarial(uint64_t seed, uint32_t warps_per_cta) : Scheduler(seed) {
        starved_ = uint32_t(random_() % warps_per_cta);
        favoured_ = uint32_t(random_() % warps_per_cta);
        late_ = random_() % 4 != 0;
        newest_first_ = random_() % 2;
    }
    Turn next(const std::vector<Candidate>& ready, size_t pipes) override {
        Turn turn;
        if (++turns_ % kFairness == 0) {
            const size_t pick = turns_ / kFairness % (ready.size() + pipes);
            if (pick < ready.size()) turn.warp = ready[pick].place, turn.quantum = kQuantum;
            else turn.pipe = pick - ready.size();
            return turn;
        }
        if (pipes && (ready.empty() || (!late_ && random_() % 4))) {
            turn.pipe = newest_first_ ? pipes - 1 : random_() % 8 ? 0 : random_() % pipes;
            return turn;
        }
        Candidate pick = ready[random_() % ready.size()];
        for (const Candidate& c : ready)
            if (c.warp == favoured_) pick = c;
        if (pick.warp == starved_) {
            const auto other = std::find_if(ready.begin(), ready.end(), [&](const Candidate& c) { return c.warp != starved_; });
            if (other != ready.end()) pick = *other;
        }
        turn.warp = pick.place;
        turn.quantum = kQuantum;
        return turn;
    }

private:
    static constexpr uint64_t kFairness = 1024;
    static constexpr uint32_t kQuantum = 512;
    uint64_t turns_ = 0;
    uint32_t starved_, favoured_;
    bool late_, newest_first_;
};

inline std::unique_ptr<Scheduler> Scheduler::make(Schedule schedule, uint64_t seed, uint32_t warps_per_cta) {
    switch (schedule) {
        case Schedule::RoundRobin: return std::make_unique<RoundRobin>(seed);
        case Schedule::Random: return std::make_unique<Random>(seed);
        default: return std::make_unique<Adversarial>(seed, warps_per_cta);
    }
}

}  // namespace warpcheck
