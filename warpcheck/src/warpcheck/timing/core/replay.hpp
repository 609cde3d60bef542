// Replay of the recorded warps of a few CTAs on a model of the chip: the issue time of every instruction, and the use
// of every unit. Cycles are double, because rates are fractional (bytes per cycle). replay.cpp holds the rules of the
// units; the chip's table gives the numbers.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "../../machine/core/recorder.hpp"

namespace warpcheck::timing {

using Cycles = double;
constexpr Cycles kNever = 1e300;
constexpr int kScoreboards = 64;

// Effect of an instruction beyond occupying its pipe, as far as its text determines it. The events of the record give
// the rest.
enum class Action : int64_t {
    None, TmemLoad, TmemStore, TmemWaitLoad, TmemWaitStore, BulkCommit, BulkWait, BulkWaitRead, Wgmma, WgmmaCommit, WgmmaWait,
    CopyCommit, CopyWait, Copy, ClusterArrive, ClusterWait, NamedSync, NamedArrive, TensorSync, Exit, Clock,
};

// A machine instruction of the issue model.
struct Slot {
    int64_t pipe, occupancy;    // pipe of the sub-partition, and cycles that it is occupied
    int64_t holds;              // register ports of the sub-partition, in 1/1000 cycles
    int64_t ordered;            // 1: issued only if the ports are free; 2: only if no mma.sync holds them; 0: takes them when it can
    int64_t stall;              // cycles until the warp may issue its next instruction
    int64_t wait;               // scoreboards that must be free, a bit each
    int64_t sets, reads;        // scoreboards that are freed by its result, and by the end of its reads
    int64_t latency;            // cycles from issue to result, unless a unit determines it
    int64_t read;               // cycles from issue until its operands may be overwritten
    int64_t instruction;        // PTX instruction that it belongs to, or -1
    int64_t carries;            // 1: performs the action and events of that instruction; 2: the same, under a predicate
    // Beside a wgmma, in 1/1000 cycles: time taken from the product, and additional occupancy of its own pipe.
    int64_t takes, slowed;
};

struct Instruction { int64_t action, first, second; };

// Block of consecutive PTX instructions, and the slots issued for it.
struct Block { int64_t begin, end, slot_begin, slot_end; };

struct Model {
    std::vector<Slot> slots;
    std::vector<Instruction> instructions;
    std::vector<Block> blocks;
    std::vector<int32_t> block_at;      // by instruction: index of the block that starts there, or -1
    std::vector<int32_t> sources;       // by row of the record: its instruction
    int64_t pipes = 0;
};

struct Step {
    uint32_t slot;
    uint32_t event, events;     // in the warp's record
};

struct WarpInput {
    uint32_t cta, warp, sm;
    std::vector<WarpRecord::Run> runs;
    std::vector<TimedEvent> events;
};

// A CTA: its SM, its cluster, and the CTA after which it starts in the same place (-1: at once).
struct CtaInput {
    int64_t number, sm, cluster, rank, after, threads;
};

// Numbers of the chip, with the names of chips.py.
struct Chip {
#define WARPCHECK_CHIP_NUMBERS(X) \
    X(launch) X(replace) X(mbarrier_arrive) X(mbarrier_wake) X(mbarrier_try) X(named_barrier) X(cluster_barrier) \
    X(mma_flops) X(mma_f16_sums) X(mma_8bit) X(mma_scaled) X(mma_scaled_4bit) X(mma_start_ss) X(mma_start_ts) X(mma_start_pair) X(mma_residual_pair) X(commit) X(wgmma_start) X(wgmma_start_ss) X(wgmma_tail) X(wgmma_overhead) \
    X(smem_bytes) X(smem_latency) X(tma_share) \
    X(tmem_bytes) X(tmem_load_latency) X(tmem_store_latency) X(tmem_stretch) \
    X(tma_latency) X(tma_bytes) X(box_sectors) X(tma_row) X(tma_cut_row) X(tma_cut_sector) X(tma_store_latency) X(tma_store_bytes) X(tma_store_cut_row) X(reduce_bytes) X(red_bytes) X(red_port_bytes) X(red_queue) X(red_burst) X(store_waits) X(copy_lines) X(copy_passes) X(store_read_bytes) X(store_share) \
    X(code_miss) X(l2_bytes) X(l2_own_bytes) X(gpcs) X(l2_latency) X(dram_bytes) X(dram_store_bytes) X(dram_add_bytes) X(dram_partial) X(dram_outside) X(dram_latency) X(dsmem_latency) X(dsmem_bytes) X(atomic_latency) X(cancel_latency)
#define X(name) double name = 0;
    WARPCHECK_CHIP_NUMBERS(X)
#undef X
};

struct Interval { int64_t track, sm, index, what; Cycles start, end; };
enum Track : int64_t { kTensorTrack, kLoadTrack, kStoreTrack, kWarpTrack, kWaitTrack };

struct Result {
    std::vector<Cycles> cta_start, cta_end;
    std::map<std::string, Cycles> busy;             // busy cycles of each unit, summed over the SMs
    std::vector<Cycles> pipe_busy;
    std::map<std::string, Cycles> waited;           // by warp and instruction: "warp instruction"
    std::vector<std::array<Cycles, 3>> products;    // start, end, FLOPs
    std::vector<Interval> intervals;
    std::vector<std::array<Cycles, 3>> clocks;      // CTA, warp, time at which the warp read its SM's clock
    int64_t issued = 0, untied_events = 0, untied_instructions = 0, instructions = 0, misses = 0, loads = 0;
    Cycles end = 0;
    std::string stuck;
};

// Global addresses from `begin` to `end`. `sharers`: number of SMs of the whole chip that read them at about the same
// time. `cold`: the first access comes from DRAM.
struct Range { int64_t begin, end; double sharers; bool cold; };

struct Options {
    bool timeline = false;
    bool cold = true;       // the first access to an address comes from DRAM
    std::vector<Range> ranges;
    Cycles limit = 0;
};

Result replay(const Model& model, const Chip& chip, const std::vector<WarpInput>& warps, const std::vector<CtaInput>& ctas, const Options& options);

}  // namespace warpcheck::timing
