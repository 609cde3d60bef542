// One launch on the emulated chip. The engine runs warps and asynchronous operations in the order of a seeded schedule.
#pragma once

#include <chrono>
#include <functional>
#include <sstream>

#include "races.hpp"
#include "scheduler.hpp"
#include "state.hpp"
#include "tensormap.hpp"

namespace warpcheck {

struct TmaPiece;

// Range of global memory. data: where the host keeps its bytes; not at `base` if an order has memory of its own.
struct Region {
    uint64_t base, bytes;
    std::string name;
    uint8_t* data;
};

struct Config {
    uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
    bool explicit_cluster = false;
    uint32_t dynamic_shared = 0;
    std::vector<uint8_t> params;
    std::vector<Region> regions;    // sorted by base
    bool moved = false;             // the bytes of some region are not at its base
    std::vector<Output> outputs;
    uint32_t sms = 4;
    // Limits of the chip, from the table in chips.py.
    uint32_t shared_per_block = 0, shared_per_sm = 0, registers_per_sm = 0, threads_per_sm = 0, blocks_per_sm = 0;
    uint16_t arch = 0;              // 80 for sm_80; selects how mma.sync sums
    uint64_t seed = 0;
    Schedule schedule = Schedule::RoundRobin;
    bool check_bounds = true, check_poison = true, check_races = true, check_tmem = true;
    bool check_letter = false, check_leftovers = false;
    bool order_by_letter = false;   // tcgen05.mma are ordered only as ISA 9.7.16.6.2 requires
    bool collect = false;           // record findings and continue
    uint64_t off = 0;               // bit mask of checks that are not reported
    bool trace = false;
    bool timing = false;            // record what the clock model needs
    uint64_t max_instructions = 0;  // warp instructions that a launch may execute; 0: no limit
    double max_seconds = 0;         // that a launch may take; 0: no limit
    uint32_t resident = 0;          // clusters that are resident at a time; 0: as many as fit
    std::vector<uint64_t> clusters; // those that run, in the order of their starts; none: all
    bool cooperative = false;       // all CTAs are resident at once, otherwise the launch is refused
    bool overlaps = false;          // the previous grid may still run when this one starts
    std::shared_ptr<const Touched> before;      // memory of the previous grid; null: unknown, so all memory
};

// Asynchronous operation: a few steps, which run in order at times that the schedule chooses.
struct AsyncOp {
    const char* name = "";
    Place place;
    Cta* cta = nullptr;
    std::vector<std::function<void()>> steps;
    size_t next = 0;
    uint64_t pipe = 0;      // key of its pipe; 0: ordered with no other operation
    bool async_proxy = true;
    Order order;            // what the operation is ordered after
    uint32_t slot = 0, epoch = 0;               // clock slot and epoch of its reads
    uint32_t write_slot = 0, write_epoch = 0;   // clock slot and epoch of its writes
    bool keeps_slots = false;                   // the slots belong to a pipe or a thread
    std::vector<std::shared_ptr<AsyncOp>> before;       // in other pipes: must complete before its first step
    std::vector<int32_t> registers;     // destination registers, in flight until a wait

    bool done() const { return next == steps.size(); }
};
using AsyncPtr = std::shared_ptr<AsyncOp>;

// Queue of operations that execute in the order of issue.
struct Pipe {
    std::deque<AsyncPtr> ops;
    uint64_t key = 0;
};

// Order of one thread's tcgen05 operations under `order_by_letter`: what it has issued, and what each kind of them
// orders.
enum class TensorKind : uint8_t { Mma, Copy, Shift, Commit };
struct TensorIssue {
    struct Kind {
        std::vector<AsyncPtr> open;     // not known to be complete
        Order done;                     // completions of the earlier ones
    };
    Kind kinds[2][3];       // by cta_group and kind
    std::map<std::array<uint32_t, 2>, uint64_t> chains;     // accumulator and shape -> key of the pipe
};

struct TraceEvent {
    uint64_t time;
    int32_t cta, warp;      // warp -1: asynchronous operation
    int32_t row;
    uint32_t count;         // instructions of the slice
    const char* what;       // name of the asynchronous operation, or what the warp waits for
};

struct Counters {
    std::map<std::string, uint64_t> bytes;
    uint64_t mma_flops = 0;
    std::vector<uint64_t> waits;            // by instruction row
    std::vector<std::vector<uint64_t>> by_warp;    // [warp in CTA][row]
};

enum class Next : uint8_t { Advance, Stay, Jumped };

// What a fragment waits for, where, and further places with a sentence each.
struct Waiting {
    std::string text;
    Place place;
    std::vector<std::pair<std::string, Place>> hints;
    std::string barrier;    // the mbarrier, by name
    std::string like;       // equal for waits that differ only in who waits
    // True if it cannot tell of another waiting warp that should let it go on.
    bool root = true;
};

// Bytes of memory that one lane accesses.
struct Span {
    uint8_t* data = nullptr;
    uint8_t* shadow = nullptr;      // one byte per byte; null: always defined
    Cta* cta = nullptr;             // CTA whose shared memory it is, or null
    uint32_t offset = 0;            // in the shared window
    uint64_t address = 0;           // in global memory
    Space space = Space::Global;
};

inline CtaMemory memory_of(Cta& cta) {
    return {cta.shared.data(), uint32_t(cta.shared.size()), cta.sm->tmem.empty() ? nullptr : cta.sm->tmem.data()};
}

Agent agent_of(const Warp& w, int32_t row);
// Key of the pipe of operations that one thread issues.
inline uint64_t pipe_key(const Warp& w, int lane) { return (uint64_t(w.cta->linear) * 64 + w.index) * 64 + uint64_t(lane) + 1; }
uint64_t apply_atomic(Type type, AtomicOp op, uint64_t old, uint64_t a, uint64_t b);

// How often a strong load, an atomic or a test_wait may read the same values in an unchanged machine before it waits for
// a change, and how many of its observations are kept.
constexpr uint32_t kLooks = 2;
constexpr size_t kKeptLooks = 1024;
// The same for a weak load in a loop that changes other registers: the loop may have another exit condition. A loop that
// leaves all registers unchanged has none.
constexpr uint32_t kWeakLooks = 1 << 16;

// Instruction that a fragment is executing.
struct Exec {
    Warp& w;
    Fragment& f;
    const Instr& in;
    const Operand* ops;
    uint32_t mask;
    const uint32_t* constants;

    // Lanes that get what lane `l` acquires: the whole warp if all of its living lanes execute the instruction
    // together.
    uint32_t acquirers(int l) const { return mask == w.alive ? kWarp : 1u << l; }
    const Operand& op(uint32_t i) const { return ops[i]; }
    const Operand& source(uint32_t i) const { return ops[in.ndst + i]; }
    uint32_t sources() const { return in.count - in.ndst; }
    bool has(uint32_t i) const { return in.ndst + i < in.count && ops[in.ndst + i].kind != Operand::None; }
    const uint32_t* src(uint32_t i) const { return w.row(source(i), constants); }
    uint32_t* dst(uint32_t i = 0) const { return w.regs.data() + ops[i].offset; }
    bool has_dst(uint32_t i) const { return i < in.ndst && ops[i].kind == Operand::Reg; }
    uint32_t pred(uint32_t i) const { return *src(i) ^ (source(i).negated ? ~0u : 0u); }
    uint64_t value(uint32_t i, int lane) const {
        const Operand& o = source(i);
        const uint32_t* p = w.row(o, constants);
        if (o.bits == 64) { uint64_t v; std::memcpy(&v, p + 2 * lane, 8); return v; }
        return p[lane];
    }
    uint32_t valid(uint32_t i) const {
        const Operand& o = source(i);
        return o.kind == Operand::Reg ? w.valid[o.id] : ~0u;
    }
    void set_valid(uint32_t i, uint32_t lanes) const {
        if (!has_dst(i)) return;
        uint32_t& v = w.valid[ops[i].id];
        v = (v & ~mask) | (lanes & mask);
    }
    int first_lane() const { return __builtin_ctz(mask); }
};

class Engine {
public:
    Engine(const Program& program, const Config& config);
    void run();
    // Called several times a second, with the seconds so far, the clusters that have ended, and all clusters. May throw.
    std::function<void(double, uint64_t, uint64_t)> tick;

    // Results.
    Counters counters;
    uint64_t trace_hash = 1469598103934665603ull;
    std::vector<TraceEvent> trace;
    std::deque<WarpRecord> records;
    uint64_t executed = 0;
    bool launched_dependents = false;
    std::shared_ptr<Touched> touched() const { return races_.touched(); }
    std::vector<Finding> findings() const { return findings_.all(); }
    size_t clock_slots() const { return races_.slots(); }

private:
    friend class Races;

    // engine.cpp: launch, schedule
    void check_launch() const;
    uint64_t cluster_number(uint64_t n) const { return config_.clusters.empty() ? n : config_.clusters[n]; }   // of the n-th that runs
    bool place_cluster(uint64_t n);
    uint32_t launch_registers(uint32_t threads) const;
    void start_warp(Warp& w);
    void retire(Cta& cta);
    bool step();
    bool run_warp(Warp& w, uint32_t quantum);
    void note_writes(Warp& w, const Instr& in);
    bool runnable(const Warp& w) const;
    bool idle();

    // waits.cpp
    Waiting waiting(const Warp& w, const Fragment& f) const;
    void add_history(Waiting& told, const Mbarrier& bar, const Fragment& f) const;
    bool waits_elsewhere(const Warp& w, Wait kind) const;
    bool waits(int32_t cta, int32_t warp) const;
    void add_waits(SimError& error) const;
    bool starves(const Warp& w) const;
    [[noreturn]] void deadlock();
    [[noreturn]] void livelock(const std::string& message) const;
    void watch();

    // findings.cpp
    void annotate(SimError& error) const;
    void look_for_race();
    void effect() { ++epoch_, changed_at_ = executed; }
    void record(Warp& w, int32_t row, uint32_t count, const char* what);
    void mix(uint64_t value) { trace_hash = (trace_hash ^ value) * 1099511628211ull; }
    // Ends the current instruction or step with an error. A run that collects findings continues with the next one.
    [[noreturn]] void fail(Check check, const std::string& message) const { throw SimError(check, message); }
    [[noreturn]] void stop(Check check, const std::string& message) const;
    // Records an error; a run that collects findings continues with the values as they are.
    void note(Check check, const std::string& message);
    void note(SimError error);
    void skip(SimError error);
    Next skip(Exec& x, const SimError& error);
    static SimError named(const UnitError& error);
    Place place_of(const Warp& w, const Fragment& f, int32_t row) const {
        return {row, int32_t(w.cta->linear), int32_t(w.index), f.mask};
    }

    // residency.cpp
    void launch_ready_clusters();
    bool admit();
    void observe(Exec& x, const Look& look);
    void begin_looks(Fragment& f, const Look& look);
    void poll(Exec& x, const Look& look);
    void poll_weakly(Exec& x, const Look& look);
    std::string memory_name(uint64_t address) const;
    std::string address_name(uint64_t address) const;

    // execute.cpp
    Next attempt(Warp& w, Fragment& f, const Instr& in);
    Next execute(Warp& w, Fragment& f, const Instr& in);
    Next dispatch(Exec& x);
    void merge(Warp& w);
    void settle_registers(Warp& w, const Instr& in);
    void settle_load(Warp& w, int32_t id);
    bool converged(Exec& x, uint32_t members);
    void exit_lanes(Warp& w, uint32_t mask);
    Next branch(Exec& x, uint32_t taken);
    void warp_op(Exec& x);
    Next set_registers(Exec& x);
    void check_register_changes(const Cta& cta);

    // alu_int.cpp, alu_float.cpp, convert.cpp
    bool alu_int(Exec& x);
    bool alu_float(Exec& x);
    bool convert(Exec& x);

    // memory.cpp
    Span resolve(const Warp& w, Space space, uint64_t address, uint32_t bytes, int lane) const;
    Span shared_span(Cluster& cluster, const Cta& own, uint64_t address, uint32_t bytes, bool own_only) const;
    const Region* region_below(uint64_t address) const;
    bool is_allocated(uint64_t address, uint32_t bytes) const;
    uint8_t* global_span(uint64_t address, uint32_t bytes) const;
    uint8_t* on_host(uint64_t address) const;
    void check_outside(const TensorMap& map, const std::vector<TmaPiece>& pieces) const;
    Next memory(Exec& x);
    void load(Exec& x);
    void store(Exec& x);
    void atomic(Exec& x);
    void matrix_fragment(Exec& x);
    void note_access(Exec& x);
    void prefetch_shadow(const Exec& x, Space space, int64_t offset, uint32_t bytes) const;
    void shared_write_check(const Span& s, uint32_t bytes);
    Cta& shared_cta(const Warp& w, Space space, uint64_t address, uint32_t& offset) const;
    uint32_t address_check(Exec& x, uint32_t source);
    void check_defined(const Span& s, uint32_t bytes, const char* what);
    void count_bytes(const char* path, uint64_t bytes) { counters.bytes[path] += bytes; }

    // barrier.cpp
    Next barrier(Exec& x);
    Mbarrier& mbarrier(Cta& cta, uint32_t offset);
    void arrive(Cta& cta, uint32_t offset, uint32_t count, int64_t expect, const Order& from, const Place& who,
                bool drop = false);
    void complete_tx(Cta& cta, uint32_t offset, int64_t bytes, const Order& from, const Order& after);
    void complete_tx(Cta& cta, uint32_t offset, int64_t bytes, const AsyncOp& op, const Order& from);
    void arrive(Cta& cta, uint32_t offset, const AsyncOp& op, const Order& from);
    void arrive_committed(Cta& cta, uint32_t offset, const AsyncOp& op);
    void check_barriers_left(const Cta& cta);
    void note_arriver(Mbarrier& bar, const Place& who);
    void finish_phase(Cta& cta, uint32_t offset, Mbarrier& bar);

    // phases.cpp
    Order executed_by(const Warp& w) const;
    void note_expect(Mbarrier& bar, const Warp& w, int64_t bytes);
    void note_expected(Mbarrier& bar, int64_t bytes, const Order& from);
    void note_completed(Mbarrier& bar, int64_t bytes, const Order& after);
    void note_arrival(Mbarrier& bar, const Order& from);
    void note_waited(Mbarrier& bar, const Warp& w);
    void check_phase(const Cta& cta, uint32_t offset, Mbarrier& bar);
    void check_scope(const Mbarrier& bar, uint32_t offset, uint64_t phase, bool narrow);

    // barrier.cpp
    Next mbar_wait(Exec& x);
    bool phase_ends_amid(Exec& x);
    Next named_barrier(Exec& x);
    void release_named(Cta& cta, uint32_t id);
    uint32_t alive_threads(const Cta& cta) const;
    Next cluster_barrier(Exec& x);
    void check_cluster_barrier(Cluster& cluster);
    void check_named_barriers(Cta& cta);

    // operations.cpp
    AsyncPtr begin_op(Exec& x, const char* name, const AsyncPtr& twin = nullptr);
    void take_epochs(AsyncOp& op, uint32_t slot, uint32_t write_slot);
    AsyncPtr make_op(Exec& x, const char* name, uint64_t pipe = 0);
    AsyncPtr make_tensor_op(Exec& x, const char* name, int lane, TensorKind kind, uint32_t group, std::array<uint32_t, 2> chain = {});
    AsyncPtr make_bulk_store(Exec& x, const char* name, int lane, const AsyncPtr& twin);
    uint32_t slot_of(uint64_t key);
    void submit(const AsyncPtr& op);
    void advance(AsyncOp& op);
    void force(AsyncOp& op, size_t steps = ~size_t(0));     // runs at least the first `steps` steps immediately
    void fire(size_t pipe);
    Agent agent(const AsyncOp& op, bool write) const;
    Order completion(const AsyncOp& op, bool reads_only = false) const;
    Order own_accesses(const AsyncOp& op) const;
    void join_completed(Warp& w, const AsyncOp& op, bool reads_only = false, uint32_t lanes = kWarp);
    void join_store(Warp& w, const AsyncOp& op, bool reads_only, uint32_t lanes);
    void drain(const Cta& cta);

    // copies.cpp
    Next async_copy(Exec& x);
    void tma(Exec& x);
    void bulk(Exec& x);
    void cp_async(Exec& x);
    void try_cancel(Exec& x);
    TensorMap tensor_map(Exec& x, uint64_t address);
    void st_async(Exec& x);

    // tmem.cpp
    Next tmem_alloc(Exec& x);
    void tmem_dealloc(Exec& x);
    void tmem_ld_st(Exec& x);
    void tmem_copy_shift(Exec& x);
    void check_tmem(const Cta& cta, const TmemRect& rect);

    // tensor.cpp, wgmma.cpp
    Next tensor(Exec& x);
    void umma(Exec& x);
    void umma_commit(Exec& x);
    void mma_sync(Exec& x);
    Next wgmma(Exec& x);
    void check_operands(const AsyncOp& op, Cta* const* ctas, const Footprint& footprint, std::vector<uint8_t>* poison);

    const Program& program_;
    Config config_;
    Findings findings_;
    Races races_{findings_, program_};
    std::unique_ptr<Scheduler> scheduler_;
    std::vector<std::unique_ptr<Sm>> sms_;
    std::vector<std::unique_ptr<Cluster>> clusters_;    // resident
    std::vector<Warp*> warps_;                          // resident
    std::vector<std::unique_ptr<Pipe>> pipes_;
    std::map<uint64_t, uint32_t> kept_slots_;           // clock slots of pipes with a key, and of threads' bulk stores
    std::map<uint64_t, TensorIssue> issued_;    // by thread, under order_by_letter
    uint64_t next_chain_ = 0;
    uint64_t next_cluster_ = 0, cluster_count_ = 0;
    uint32_t cluster_grid_[3] = {1, 1, 1};
    uint32_t cluster_size_ = 1;
    uint64_t epoch_ = 0;            // changes with every effect that a poll could observe
    uint64_t time_ = 0;
    uint32_t idle_rounds_ = 0;
    uint64_t idle_epoch_ = ~0ull;
    Place current_;
    uint64_t changed_at_ = 0;           // instructions executed up to the last effect
    uint64_t steps_ = 0;
    const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
    uint64_t undefined_since_ = 0;      // instructions executed up to the first finding that left undefined values
    Warp* running_ = nullptr;           // when an error is thrown: the warp that executed
    AsyncOp* advancing_ = nullptr;
    std::vector<Warp*> dead_warps_;
    std::vector<std::unique_ptr<Cluster>> retired_;     // kept until their last asynchronous operation ends
};

}  // namespace warpcheck
