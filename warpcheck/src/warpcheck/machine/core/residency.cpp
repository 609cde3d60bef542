// Residency of clusters, and the check for waits that depend on it. A cluster launch guarantees only that one cluster
// at a time is resident, in the order of their index; a cooperative launch guarantees that all are.
#include <utility>

#include "engine.hpp"

namespace warpcheck {
namespace {

bool is_global(uint64_t address) { return address && !(address & kWindowMask); }

uint64_t digest_of(const std::vector<uint32_t>& words, uint64_t digest) {
    for (const uint32_t word : words) digest = (digest ^ word) * 0x9E3779B97F4A7C15ull, digest ^= digest >> 32;
    return digest;
}

}  // namespace

void Engine::launch_ready_clusters() {
    const bool limited = config_.resident && !config_.cooperative;
    while (next_cluster_ < cluster_count_ && !(limited && clusters_.size() >= config_.resident) && place_cluster(next_cluster_)) ++next_cluster_;
}

// Name of the allocation and offset in it.
std::string Engine::memory_name(uint64_t address) const {
    if ((address & kWindowMask) == kSharedBase) return "shared memory at " + hex(uint32_t(address));
    if (!is_global(address)) return "memory";
    const Region* region = region_below(address);
    if (!region || address >= region->base + region->bytes) return "global memory at " + hex(address);
    return (region->name.empty() ? "the allocation at " + hex(region->base) : region->name) + " + " + std::to_string(address - region->base);
}

// The same for an address, in hexadecimal where it is in no allocation: host addresses change from run to run.
std::string Engine::address_name(uint64_t address) const {
    return is_global(address) && is_allocated(address, 1) ? memory_name(address) : hex(address);
}

// Called when nothing can run and some warps poll global memory: a CTA that has not started might change it. Records
// the observations of the polling warps and starts the next cluster, on SMs beyond the chip's if necessary. Returns
// false if there is none to start.
bool Engine::admit() {
    if (next_cluster_ >= cluster_count_) return false;
    bool any = false;
    for (Warp* w : warps_)
        for (Fragment& f : w->fragments) {
            if (f.wait != Wait::Poll || !is_global(f.last.address)) continue;
            any = true;
            if (!f.missed.bytes) f.missed = f.last, f.started = next_cluster_;
        }
    if (!any) return false;
    if (!place_cluster(next_cluster_)) {
        for (uint32_t i = 0; i < cluster_size_; ++i) {
            sms_.push_back(std::make_unique<Sm>());
            sms_.back()->id = uint32_t(sms_.size() - 1);
        }
        place_cluster(next_cluster_);
    }
    ++next_cluster_;
    effect();
    return true;
}

// Reports a poll whose value has changed after `admit`: it waited for a CTA that had not started.
void Engine::observe(Exec& x, const Look& look) {
    Fragment& f = x.f;
    if (!f.missed.bytes || !look.at(f.missed) || look.value == f.missed.value) return;
    f.missed = {};
    const uint64_t started = f.started, last = cluster_count_ - 1;
    const std::string one = cluster_size_ > 1 ? "cluster" : "CTA", whole = std::to_string(cluster_count_) + " " + one + "s";
    SimError error(Check::CoResidency, "CTA " + std::to_string(x.w.cta->linear) + " waits for " + memory_name(look.address) + ", which only " + one +
                                           (started == last ? " " + std::to_string(last) + " of " : "s " + std::to_string(started) + " to " + std::to_string(last) + " of ") +
                                           whole + " would change, which had not started");
    const Place writer = races_.writer(look.address, look.bytes, int32_t(x.w.cta->linear));
    if (writer.row >= 0) error.others.push_back({"it was changed by", writer});
    for (Warp* w : warps_)
        for (const Fragment& g : w->fragments)
            if (g.missed.bytes && error.others.size() < 32)
                error.others.push_back({"waits as well, for " + memory_name(g.missed.address), place_of(*w, g, int32_t(g.missed.pc))});
    note(std::move(error));
}

void Engine::begin_looks(Fragment& f, const Look& look) {
    if (f.poll_epoch != epoch_) f.looks.clear(), f.weak_count = 0;
    f.poll_epoch = epoch_;
    f.last = look;
}

// An instruction that reads the same values at the same address while nothing changes is polling; it waits until
// something changes, so that others run.
void Engine::poll(Exec& x, const Look& look) {
    Fragment& f = x.f;
    observe(x, look);
    begin_looks(f, look);
    f.weak_count = 0;       // this instruction may end the loop that weak loads are in
    for (Look& before : f.looks) {
        if (!before.at(look) || before.value != look.value) continue;
        if (++before.times >= kLooks) f.wait = Wait::Poll;
        return;
    }
    if (f.looks.size() == kKeptLooks) f.looks.clear();
    f.looks.push_back(look);
    f.looks.back().times = 1;
}

// The same for a weak load. It is polling if the warp comes back to it with the same registers while nothing changes:
// then the loop ends only if another thread writes.
void Engine::poll_weakly(Exec& x, const Look& look) {
    Fragment& f = x.f;
    observe(x, look);
    begin_looks(f, look);
    const uint32_t known = std::min(f.weak_count, uint32_t(f.weak_looks.size()));
    for (uint32_t i = 0; i < known; ++i) {
        Look& before = f.weak_looks[i];
        if (!before.at(look) || before.value != look.value) continue;
        const uint64_t registers = digest_of(x.w.valid, digest_of(x.w.regs, x.f.mask));
        ++before.times;
        const bool unchanged = std::exchange(before.registers, registers) == registers && before.times > 2;
        if (!unchanged && before.times < kWeakLooks) return;
        f.wait = Wait::Poll;
        if (config_.check_races)
            note(Check::WeakPoll, "a loop of weak loads waits for " + memory_name(look.address) + " to change; a weak load may be executed once");
        return;
    }
    Look& kept = f.weak_looks[f.weak_count++ % f.weak_looks.size()];
    kept = look;
    kept.times = 1;
}

}  // namespace warpcheck
