// Record of a warp for the clock model: the executed instructions in order, and the values that determine the time of
// barriers, copies, products and memory accesses. Launches record only on request.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace warpcheck {

// Kinds of events, with the meaning of their values a - f. `cta` is a CTA's number in the grid, `barrier` an offset in
// its shared window.
enum class Timed : int64_t {
    Init,       // cta, barrier, arrivals of a phase
    Arrive,     // cta, barrier, arrivals, bytes to expect
    Wait,       // cta, barrier, phases that must be complete
    Load,       // TMA or bulk copy: cta filled, cta and barrier signalled, bytes, global address, pieces; negative
                // pieces: another destination of the same multicast
    Store,      // TMA or bulk copy: lane, 1 for a reduction, bytes, global address, pieces
    Put,        // shared memory to another CTA's: cta filled, cta and barrier signalled, bytes
    Product,    // tcgen05.mma: M, N, K of the whole operation, CTA group, 1 if A is in tensor memory, kind
    Commit,     // tcgen05.commit: cta, barrier
    Named,      // barrier's number, threads (0: all)
    Shared,     // ld, st, atom on shared memory: bytes, passes over the banks, cta
    Global,     // ld, st, atom, cp.async on global memory: bytes, sectors of 32 bytes, first address, 0 load 1 store 2 atomic;
                // of cp.async: lines of 128 bytes, summed over the quarters of the warp
    Cancel,     // clusterlaunchcontrol.try_cancel: cta and barrier signalled
    CopyArrive, // cp.async.mbarrier.arrive: cta, barrier, arrivals, arrivals that it adds to those of the phase
    TensorCopy, // tcgen05.cp: bytes that each CTA copies
    Box,        // of the TMA load or store that follows: rows, rows cut by the tensor's edge, those cut within a sector of
                // 32 bytes, sectors in global memory, bytes inside the tensor, sectors of which a part is inside
};

struct TimedEvent {
    int64_t at;         // index among the instructions that the warp executed
    int64_t kind;
    int64_t value[6];
};

struct WarpRecord {
    struct Run { uint32_t row, count; };    // consecutive rows
    uint32_t cta = 0, warp = 0, sm = 0;
    uint32_t executed = 0;
    std::vector<Run> runs;
    std::vector<TimedEvent> events;

    void execute(uint32_t row) {
        ++executed;
        if (!runs.empty() && runs.back().row + runs.back().count == row) ++runs.back().count;
        else runs.push_back({row, 1});
    }
    // Adds an event of the current instruction.
    void note(Timed kind, int64_t a = 0, int64_t b = 0, int64_t c = 0, int64_t d = 0, int64_t e = 0, int64_t f = 0) {
        events.push_back({int64_t(executed), int64_t(kind), {a, b, c, d, e, f}});
    }
    // Arrivals of several lanes at a barrier are one event. `more`: bytes, or added arrivals.
    void arrive(Timed kind, int64_t cta, int64_t barrier, int64_t count, int64_t more) {
        if (!events.empty()) {
            TimedEvent& last = events.back();
            if (last.at == int64_t(executed) && last.kind == int64_t(kind) && last.value[0] == cta && last.value[1] == barrier) {
                last.value[2] += count;
                last.value[3] += more;
                return;
            }
        }
        note(kind, cta, barrier, count, more);
    }
};

// Cost of one memory access, computed from the lanes' addresses.
class Coalescer {
public:
    void add(uint64_t address, uint32_t bytes) {
        if (!bytes_) first_ = address;
        bytes_ += bytes;
        for (uint64_t a = address & ~uint64_t(3); a < address + bytes; a += 4) words_.push_back(a >> 2);
    }
    bool empty() const { return bytes_ == 0; }
    int64_t bytes() const { return bytes_; }
    int64_t first() const { return int64_t(first_); }
    int64_t sectors() { return distinct(3); }
    int64_t lines() { return distinct(5); }
    // Each bank serves one word per pass; lanes that read the same word share it.
    int64_t passes() {
        distinct(0);
        uint32_t used[32] = {}, most = 0;
        for (uint64_t word : words_) most = std::max(most, ++used[word % 32]);
        return most;
    }

private:
    int64_t distinct(int shift) {
        std::sort(words_.begin(), words_.end());
        if (shift == 0) {
            words_.erase(std::unique(words_.begin(), words_.end()), words_.end());
            return int64_t(words_.size());
        }
        int64_t n = 0;
        uint64_t last = ~uint64_t(0);
        for (uint64_t word : words_)
            if (word >> shift != last) last = word >> shift, ++n;
        return n;
    }
    std::vector<uint64_t> words_;
    int64_t bytes_ = 0;
    uint64_t first_ = 0;
};

}  // namespace warpcheck
