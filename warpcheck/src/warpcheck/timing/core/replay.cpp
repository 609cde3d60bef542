// Discrete-event simulation of the recorded CTAs: issue, pipes, memory, tensor cores and barriers of the chip.
#include "replay.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_set>

namespace warpcheck::timing {
namespace {

constexpr int kPartitions = 4;
constexpr Cycles kPiece = 2048;     // bytes of a copy that occupy shared memory at a time
constexpr size_t kLine = 8;         // instructions per line of the instruction cache

struct Warp {
    const WarpInput* input = nullptr;
    size_t cta = 0;
    int partition = 0;
    std::vector<Step> steps;
    size_t next = 0;
    Cycles ready = 0;
    bool blocked = false, started = false, done = false;
    Cycles blocked_since = 0;
    int64_t blocked_at = -1;
    std::array<Cycles, kScoreboards> scoreboard{};
    Cycles tmem_loads = 0, tmem_stores = 0;     // completion of the last one
    std::vector<std::pair<Cycles, Cycles>> bulk_groups;     // completion of the reads, and of the writes
    std::pair<Cycles, Cycles> bulk_open{0, 0};
    std::vector<Cycles> copy_groups;
    Cycles copy_open = 0, copies_done = 0;      // completion of the copies after the last commit, and of all copies
    int64_t wgmma_issued = 0, wgmma_committed = 0;          // number of instructions, and of those in committed groups
    std::vector<int64_t> wgmma_groups;                      // instructions issued up to each commit
    int64_t wgmma_waits_for = 0;                            // number of instructions that must complete
};

struct Barrier {
    int64_t expected = 0, pending = 0, bytes = 0, phases = 0;
    struct Waiter { size_t warp; int64_t phases, boards; };     // phases that must complete; scoreboards of the result
    std::vector<Waiter> waiters;
};

struct Named {
    int64_t arrived = 0;
    std::vector<size_t> waiters;
};

struct Partition {
    std::vector<size_t> warps;
    std::vector<Cycles> pipe_free;
    Cycles next = 0, ports = 0, products = 0, tmem_read = 0, tmem_write = 0, tensor = 0;
    Cycles taken = 0;           // time of the running wgmma taken by instructions issued beside it
    size_t last = 0;
    bool stale = true;
    Cycles candidate_time = kNever;
    size_t candidate = 0;
};

// Entry of a tensor core's queue: a product, or the arrival that follows earlier products.
struct Tensor {
    Cycles earliest = 0, mma = 0, smem = 0, flops = 0;
    int64_t pair = 1, cta = -1, barrier = -1;
    bool commit = false;
    int64_t group = -1;         // wgmma: cta * 64 + warpgroup
};

struct Sm {
    std::array<Partition, kPartitions> parts;
    Cycles smem_free = 0, lsu_free = 0, tma_free = 0, link_free = 0, gpc_free = 0, red_free = 0, red_out = 0, lines_free = 0, store_free = 0, dsmem_free = 0;
    std::deque<Tensor> tensor;
    Cycles tensor_free = 0, tensor_begin = 0, given = 0;    // given: cycles added to the running wgmma
    Tensor running;
    bool tensor_armed = false;
    std::vector<bool> fetched;      // lines of machine code
};

struct Cta {
    CtaInput input;
    size_t cluster = 0;
    std::vector<size_t> warps;
    int64_t alive = 0;
    bool started = false;
    std::unordered_map<int64_t, Barrier> barriers;
    std::array<Named, 16> named;
    std::map<int64_t, std::pair<int64_t, std::array<int64_t, 4>>> warpgroups;
    std::map<int64_t, int64_t> wgmma_done, wgmma_queued;
};

struct Cluster { int64_t arrived = 0, phase = 0, threads = 0; std::vector<size_t> waiters; };

enum class What : uint8_t { Start, Arrive, Fill, Tensor, Ends };
struct Async {
    Cycles time;
    uint64_t order;
    What what;
    int64_t a, b, c, d;
    bool operator<(const Async& o) const { return time != o.time ? time > o.time : order > o.order; }
};

class Replay {
public:
    Replay(const Model& model, const Chip& chip, const std::vector<WarpInput>& warps, const std::vector<CtaInput>& ctas, const Options& options)
        : model_(model), chip_(chip), options_(options) {
        int64_t sms = 0;
        std::map<int64_t, size_t> clusters;
        for (const CtaInput& c : ctas) {
            sms = std::max(sms, c.sm + 1);
            Cta cta;
            cta.input = c;
            const auto found = clusters.emplace(c.cluster, clusters_.size());
            if (found.second) clusters_.emplace_back();
            cta.cluster = found.first->second;
            clusters_[cta.cluster].threads += c.threads;
            by_number_[c.number] = ctas_.size();
            ctas_.push_back(std::move(cta));
        }
        sms_.resize(size_t(sms));
        carried_.assign(model.instructions.size(), false);
        std::set<size_t> slowed;
        for (const Slot& slot : model.slots)
            if (slot.slowed) slowed.insert(size_t(slot.pipe));
        slowed_pipes_.assign(slowed.begin(), slowed.end());
        for (const Slot& slot : model.slots)
            if (slot.carries && slot.instruction >= 0) carried_[size_t(slot.instruction)] = true;
        for (Sm& sm : sms_) {
            sm.fetched.assign(model.slots.size() / kLine + 1, false);
            for (Partition& p : sm.parts) p.pipe_free.assign(size_t(model.pipes), 0);
        }
        result_.pipe_busy.assign(size_t(model.pipes), 0);
        result_.cta_start.assign(ctas_.size(), 0);
        result_.cta_end.assign(ctas_.size(), 0);
        for (const WarpInput& input : warps) {
            const auto found = by_number_.find(input.cta);
            if (found == by_number_.end()) continue;
            Warp w;
            w.input = &input;
            w.cta = found->second;
            w.partition = int(input.warp % kPartitions);
            ctas_[w.cta].warps.push_back(warps_.size());
            warps_.push_back(std::move(w));
        }
        for (size_t i = 0; i < ctas_.size(); ++i)
            if (ctas_[i].input.after < 0) push(chip_.launch, What::Start, int64_t(i));
    }

    Result run() {
        while (true) {
            Cycles issue = kNever;
            Sm* at = nullptr;
            Partition* part = nullptr;
            for (Sm& sm : sms_)
                for (Partition& p : sm.parts) {
                    if (p.stale) choose(p);
                    if (p.candidate_time < issue) issue = p.candidate_time, at = &sm, part = &p;
                }
            if (!queue_.empty() && queue_.top().time <= issue) {
                const Async e = queue_.top();
                queue_.pop();
                now_ = std::max(now_, e.time);
                handle(e);
            } else if (part) {
                now_ = std::max(now_, issue);
                step(*at, *part, part->candidate, issue);
            } else {
                break;
            }
            if (options_.limit && now_ > options_.limit) break;
        }
        for (const Warp& w : warps_)
            if (!w.done && w.started)
                result_.stuck += (result_.stuck.empty() ? "warp " : ", warp ") + std::to_string(w.input->warp) + " of CTA " +
                                 std::to_string(w.input->cta) + " waits at instruction " + std::to_string(w.blocked_at) + " (" +
                                 std::to_string(w.steps.size() - w.next) + " slots left)";
        if (!result_.stuck.empty())
            for (const Cta& cta : ctas_)
                for (const auto& [offset, b] : cta.barriers)
                    for (const Barrier::Waiter& waiter : b.waiters)
                        result_.stuck += "; warp " + std::to_string(warps_[waiter.warp].input->warp) + " needs " + std::to_string(waiter.phases) +
                                         " phases of barrier " + std::to_string(offset) + ", which has " + std::to_string(b.phases) + " and lacks " +
                                         std::to_string(b.pending) + " of " + std::to_string(b.expected) + " arrivals and " + std::to_string(b.bytes) + " bytes";
        for (const Cycles end : result_.cta_end) result_.end = std::max(result_.end, end);
        return std::move(result_);
    }

private:
    void push(Cycles time, What what, int64_t a = 0, int64_t b = 0, int64_t c = 0, int64_t d = 0) {
        queue_.push({time, order_++, what, a, b, c, d});
    }

    struct Passage { int64_t block, first, last, at; };         // first and last instruction, position in the record
    struct Happening { uint32_t event, events; int64_t at; };
    using Held = std::unordered_map<int64_t, std::deque<Happening>>;        // by instruction

    // Converts the record of a warp to steps. The events of an instruction belong to the slot that carries it. If the
    // compiler moved that slot to another block, the events belong to the oldest passage of that block without them.
    void expand(Warp& w) {
        const auto& events = w.input->events;
        std::vector<Passage> passages;
        Held held;
        int64_t at = 0, last = -2;
        size_t event = 0;
        for (const auto& run : w.input->runs)
            for (uint32_t row = run.row; row < run.row + run.count; ++row, ++at) {
                const int64_t i = model_.sources[row];
                const size_t first = event;
                while (event < events.size() && events[event].at == at) ++event;
                if (i != last || passages.empty()) {
                    ++result_.instructions;
                    if (!passages.empty() && passages.back().block >= 0 && i == last + 1 && i < model_.blocks[size_t(passages.back().block)].end) {
                        passages.back().last = i;
                    } else {
                        const int32_t b = model_.block_at[size_t(i)];
                        if (b < 0) ++result_.untied_instructions;
                        passages.push_back({b, i, i, at});
                    }
                    last = i;
                }
                if (event == first) continue;
                auto& mine = held[i];
                if (!mine.empty() && mine.back().event + mine.back().events == first && mine.back().at >= passages.back().at) mine.back().events += uint32_t(event - first);
                else mine.push_back({uint32_t(first), uint32_t(event - first), at});
            }
        std::vector<int64_t> again(passages.size());        // position of the next passage of the same block
        std::unordered_map<int64_t, int64_t> next;
        for (size_t k = passages.size(); k-- > 0;) {
            const auto found = next.find(passages[k].block);
            again[k] = found == next.end() ? at : found->second;
            next[passages[k].block] = passages[k].at;
        }
        const auto all = held;
        const int64_t untied_before = result_.untied_events;
        place(w, passages, again, held, {});
        // The compiler may have merged an instruction with one of a block that this warp does not pass: then its events
        // are placed where the warp executed it.
        std::map<int64_t, Happening> late;
        for (const auto& [i, left] : held)
            for (const Happening& h : left) late.emplace(h.at, h);
        if (late.empty()) return;
        held = all;
        for (auto& [i, of_instruction] : held)
            of_instruction.erase(std::remove_if(of_instruction.begin(), of_instruction.end(), [&](const Happening& h) {
                                     const auto found = late.find(h.at);
                                     return found != late.end() && found->second.event == h.event;
                                 }), of_instruction.end());
        result_.untied_events = untied_before;
        w.steps.clear();
        place(w, passages, again, held, late);
    }

    // Appends the slots of the passages to the steps of a warp, with the events that they carry, and removes these.
    void place(Warp& w, const std::vector<Passage>& passages, const std::vector<int64_t>& again, Held& held, const std::map<int64_t, Happening>& late) {
        const uint32_t untied = uint32_t(model_.slots.size() - 1);
        for (size_t k = 0; k < passages.size(); ++k) {
            const Passage& p = passages[k];
            if (p.block < 0) {
                w.steps.push_back({untied, 0, 0});
            } else {
                const Block& block = model_.blocks[size_t(p.block)];
                for (int64_t s = block.slot_begin; s < block.slot_end; ++s) {
                    const Slot& slot = model_.slots[size_t(s)];
                    const bool inside = slot.instruction >= block.begin && slot.instruction < block.end;
                    if (inside && slot.instruction > p.last) continue;      // after a taken branch
                    Step step{uint32_t(s), 0, 0};
                    if (slot.carries && slot.instruction >= 0) {
                        const auto found = held.find(slot.instruction);
                        // A predicate replaced the branch around an earlier block: if the warp skipped that block, the
                        // next event of its instruction belongs to a later passage.
                        const bool joined = slot.carries == 2 && slot.instruction < block.begin;
                        if (found != held.end() && !found->second.empty() && found->second.front().at < (joined ? p.at : again[k])) {
                            step.event = found->second.front().event, step.events = found->second.front().events;
                            found->second.pop_front();
                        }
                    }
                    w.steps.push_back(step);
                }
            }
            // Events that no slot carries are placed at the end of their block.
            for (int64_t i = p.first; i <= p.last; ++i) {
                if (carried_[size_t(i)]) continue;
                const auto found = held.find(i);
                if (found == held.end() || found->second.empty()) continue;
                result_.untied_events += found->second.front().events;
                w.steps.push_back({untied, found->second.front().event, found->second.front().events});
                found->second.pop_front();
            }
            const auto stop = k + 1 < passages.size() ? late.lower_bound(passages[k + 1].at) : late.end();
            for (auto found = late.lower_bound(p.at); found != stop; ++found) {
                result_.untied_events += found->second.events;
                w.steps.push_back({untied, found->second.event, found->second.events});
            }
        }
    }

    void choose(Partition& p) {
        p.stale = false;
        p.candidate_time = kNever;
        const size_t n = p.warps.size();
        for (size_t k = 0; k < n; ++k) {
            // Greedy then round-robin: the warp that issued last continues if it can, then the next in order.
            const size_t i = p.warps[(p.last + k) % n];
            const Warp& w = warps_[i];
            if (w.blocked || w.done) continue;
            const Slot& s = model_.slots[w.steps[w.next].slot];
            Cycles t = std::max({w.ready, p.next, p.pipe_free[size_t(s.pipe)], s.ordered == 1 ? p.ports : s.ordered == 2 ? p.products * chip_.store_waits : 0});
            for (uint64_t m = uint64_t(s.wait); m; m &= m - 1) t = std::max(t, w.scoreboard[size_t(__builtin_ctzll(m))]);
            if (t < p.candidate_time) p.candidate_time = t, p.candidate = i;
        }
    }

    void touch(const Warp& w) { sm_of(w).parts[size_t(w.partition)].stale = true; }
    Sm& sm_of(const Warp& w) { return sms_[size_t(ctas_[w.cta].input.sm)]; }
    Cta& cta_of(int64_t number) { return ctas_[by_number_.at(number)]; }

    void block(size_t i, int64_t instruction) {
        Warp& w = warps_[i];
        w.blocked = true;
        w.blocked_since = now_;
        w.blocked_at = instruction;
        touch(w);
    }
    void wake(size_t i, Cycles t) {
        Warp& w = warps_[i];
        w.blocked = false;
        w.ready = std::max(w.ready, t);
        note_wait(i, t);
        touch(w);
        if (w.next == w.steps.size()) finish(i);
    }
    void note_wait(size_t i, Cycles t) {
        const Warp& w = warps_[i];
        result_.waited[std::to_string(w.input->warp) + " " + std::to_string(w.blocked_at)] += t - w.blocked_since;
        if (options_.timeline) result_.intervals.push_back({kWaitTrack, ctas_[w.cta].input.sm, int64_t(w.input->warp), w.blocked_at, w.blocked_since, t});
    }

    void start(size_t i) {
        Cta& cta = ctas_[i];
        cta.started = true;
        cta.alive = int64_t(cta.warps.size());
        result_.cta_start[i] = now_;
        Sm& sm = sms_[size_t(cta.input.sm)];
        for (size_t k : cta.warps) {
            Warp& w = warps_[k];
            expand(w);
            w.started = true;
            w.ready = now_;
            w.done = w.steps.empty();
            if (w.done) --cta.alive;
            Partition& p = sm.parts[size_t(w.partition)];
            p.warps.push_back(k);
            p.stale = true;
        }
    }

    void finish(size_t i) {
        Warp& w = warps_[i];
        w.done = true;
        w.steps.clear();
        w.steps.shrink_to_fit();
        Cta& cta = ctas_[w.cta];
        Partition& p = sm_of(w).parts[size_t(w.partition)];
        p.warps.erase(std::find(p.warps.begin(), p.warps.end(), i));
        p.last = 0;
        p.stale = true;
        check_all_named(cta);
        if (--cta.alive) return;
        result_.cta_end[w.cta] = now_;
        for (size_t k = 0; k < ctas_.size(); ++k)
            if (ctas_[k].input.after == cta.input.number) push(now_ + chip_.replace, What::Start, int64_t(k));
    }

    // Issues the next slot of a warp.
    void step(Sm& sm, Partition& p, size_t i, Cycles t) {
        Warp& w = warps_[i];
        const Step at = w.steps[w.next++];
        const Slot& s = model_.slots[at.slot];
        ++result_.issued;
        p.next = t + 1;
        if (s.holds) p.ports = std::max(p.ports, t) + Cycles(s.holds) / 1000;
        Cycles slowed = 0;
        if (sm.running.group >= 0 && sm.tensor_free > t) {
            p.taken += Cycles(s.takes) / 1000;
            slowed = Cycles(s.slowed) / 1000;
        }
        if (slowed > 0)     // the slowdown beside products applies to all arithmetic pipes
            for (size_t pipe : slowed_pipes_) p.pipe_free[pipe] = std::max(p.pipe_free[pipe], t) + slowed;
        const Cycles occupancy = Cycles(s.occupancy) + slowed;
        p.pipe_free[size_t(s.pipe)] = t + occupancy;
        result_.pipe_busy[size_t(s.pipe)] += occupancy;
        const auto place = std::find(p.warps.begin(), p.warps.end(), i);
        p.last = size_t(place - p.warps.begin());
        p.stale = true;
        w.ready = t + Cycles(std::max<int64_t>(1, s.stall));
        Cycles done = t + Cycles(s.latency), read = t + Cycles(s.read);
        if (s.carries || at.events) {
            if (s.instruction >= 0) act(sm, p, i, s, t, done, read);
            for (uint32_t e = at.event; e < at.event + at.events; ++e) event(sm, p, i, s, w.input->events[e], t, done, read);
        }
        if (w.next < w.steps.size()) {      // the first warp of an SM to reach a line waits for its fetch
            const size_t line = w.steps[w.next].slot / kLine;
            if (!sm.fetched[line]) w.ready = std::max(w.ready, t + chip_.code_miss);
            sm.fetched[line] = true;
        }
        for (uint64_t m = uint64_t(s.sets); m; m &= m - 1) {
            Cycles& b = w.scoreboard[size_t(__builtin_ctzll(m))];
            b = std::max(b, done);
        }
        for (uint64_t m = uint64_t(s.reads); m; m &= m - 1) {
            Cycles& b = w.scoreboard[size_t(__builtin_ctzll(m))];
            b = std::max(b, std::min(done, read));
        }
        if (!w.done && w.next == w.steps.size() && !w.blocked) finish(i);
    }

    void act(Sm& sm, Partition& p, size_t i, const Slot& s, Cycles t, Cycles& done, Cycles& read) {
        Warp& w = warps_[i];
        Cta& cta = ctas_[w.cta];
        const Instruction& in = model_.instructions[size_t(s.instruction)];
        switch (Action(in.action)) {
            case Action::TmemLoad: {        // first: bytes
                const Cycles cycles = Cycles(in.first) / chip_.tmem_bytes * (sm.tensor_free > t ? chip_.tmem_stretch : 1);
                p.tmem_read = std::max(p.tmem_read, t) + cycles;
                result_.busy["tmem load"] += cycles;
                done = p.tmem_read + chip_.tmem_load_latency;
                w.tmem_loads = std::max(w.tmem_loads, done);
                break;
            }
            case Action::TmemStore: {
                const Cycles cycles = Cycles(in.first) / chip_.tmem_bytes * (sm.tensor_free > t ? chip_.tmem_stretch : 1);
                p.tmem_write = std::max(p.tmem_write, t) + cycles;
                result_.busy["tmem store"] += cycles;
                read = p.tmem_write;
                done = p.tmem_write + chip_.tmem_store_latency;
                w.tmem_stores = std::max(w.tmem_stores, done);
                break;
            }
            case Action::TmemWaitLoad: w.ready = std::max(w.ready, w.tmem_loads); break;
            case Action::TmemWaitStore: w.ready = std::max(w.ready, w.tmem_stores); break;
            case Action::BulkCommit:
                w.bulk_groups.push_back(w.bulk_open);
                w.bulk_open = {0, 0};
                break;
            case Action::BulkWait: case Action::BulkWaitRead:
                for (size_t g = 0; g + size_t(in.first) < w.bulk_groups.size(); ++g)
                    w.ready = std::max(w.ready, Action(in.action) == Action::BulkWaitRead ? w.bulk_groups[g].first : w.bulk_groups[g].second);
                break;
            case Action::CopyCommit:
                w.copy_groups.push_back(w.copy_open);
                w.copy_open = 0;
                break;
            case Action::CopyWait:          // first: groups that may be open; second: 1 for all copies
                if (in.second) w.copy_groups.push_back(w.copy_open), w.copy_open = 0;
                for (size_t g = 0; g + size_t(in.first) < w.copy_groups.size(); ++g) w.ready = std::max(w.ready, w.copy_groups[g]);
                break;
            case Action::TensorSync: {      // first: FLOPs of the warp; second: kind of product
                const Cycles cycles = Cycles(in.first) / (chip_.mma_flops * rate_of(in.second) / kPartitions);
                p.products = p.ports;
                p.tensor = std::max(p.tensor, t) + cycles;
                // The row of the opcode may hold the rate of a faster chip with the same code.
                if (p.tensor > p.pipe_free[size_t(s.pipe)] + 1) p.pipe_free[size_t(s.pipe)] = p.tensor;
                result_.busy["tensor"] += cycles / kPartitions;
                result_.products.push_back({p.tensor - cycles, p.tensor, Cycles(in.first)});
                done = p.tensor + Cycles(s.latency);
                w.ready = std::max(w.ready, p.tensor - cycles);
                break;
            }
            case Action::Wgmma: {           // first: N; second: bit 0 if A is in shared memory, bit 1 if it ends a group, then K
                const int64_t group = int64_t(w.input->warp) / 4;
                auto& state = cta.warpgroups[group];
                auto& mine = state.second[w.input->warp % 4];
                ++mine;
                ++w.wgmma_issued;
                if (in.second & 2) w.wgmma_groups.push_back(w.wgmma_issued);
                const int64_t slowest = *std::min_element(state.second.begin(), state.second.end());
                if (slowest > state.first) {        // all four warps have issued it
                    state.first = slowest;
                    Tensor e;
                    const Cycles n = Cycles(in.first);
                    e.smem = n / 4 + (in.second & 1 ? 16 : 0);
                    e.mma = std::max(n / 2, Cycles(0)) + chip_.wgmma_overhead;
                    e.flops = 2 * 64 * n * Cycles(in.second >> 2);
                    e.earliest = t + (in.second & 1 ? chip_.wgmma_start_ss : chip_.wgmma_start);
                    e.cta = cta.input.number;
                    e.group = group;
                    enqueue(sm, e);
                }
                break;
            }
            case Action::WgmmaWait: {
                if (int64_t(w.wgmma_groups.size()) <= in.first) break;
                const int64_t need = w.wgmma_groups[w.wgmma_groups.size() - 1 - size_t(in.first)];
                w.wgmma_waits_for = need;
                if (cta.wgmma_done[int64_t(w.input->warp) / 4] < need) block(i, s.instruction);
                break;
            }
            case Action::ClusterArrive: {
                Cluster& c = clusters_[cta.cluster];
                c.arrived += 32;
                if (c.arrived >= c.threads) {
                    c.arrived = 0;
                    ++c.phase;
                    for (size_t k : c.waiters) wake(k, t + chip_.cluster_barrier);
                    c.waiters.clear();
                }
                arrived_at_[i] = c.arrived == 0 ? c.phase : c.phase + 1;
                break;
            }
            case Action::ClusterWait: {
                Cluster& c = clusters_[cta.cluster];
                if (c.phase < arrived_at_[i]) {
                    c.waiters.push_back(i);
                    block(i, s.instruction);
                }
                break;
            }
            case Action::Clock: result_.clocks.push_back({Cycles(cta.input.number), Cycles(w.input->warp), t}); break;
            default: break;
        }
    }

    void event(Sm& sm, Partition& p, size_t i, const Slot& s, const TimedEvent& e, Cycles t, Cycles& done, Cycles& read) {
        Warp& w = warps_[i];
        Cta& cta = ctas_[w.cta];
        const int64_t* v = e.value;
        const Instruction* in = s.instruction >= 0 ? &model_.instructions[size_t(s.instruction)] : nullptr;
        switch (Timed(e.kind)) {
            case Timed::Init: {
                Barrier& b = cta_of(v[0]).barriers[v[1]];
                b.expected = b.pending = v[2];
                break;
            }
            case Timed::Arrive:
                push(t + chip_.mbarrier_arrive, What::Arrive, v[0], v[1], v[2], v[3]);
                break;
            case Timed::Wait: {
                Barrier& b = cta_of(v[0]).barriers[v[1]];
                done = t + chip_.mbarrier_try;
                if (b.phases < v[2]) {
                    b.waiters.push_back({i, v[2], s.sets});
                    if (s.sets) {       // the warp continues until an instruction needs the result
                        done = kNever;
                        w.blocked_since = t;
                        w.blocked_at = s.instruction;
                    } else {
                        block(i, s.instruction);
                    }
                } else if (!s.sets) {
                    w.ready = std::max(w.ready, done);
                }
                break;
            }
            case Timed::Named: {
                Named& n = cta.named[size_t(v[0])];
                n.arrived += 32;
                if (!in || Action(in->action) != Action::NamedArrive) {
                    n.waiters.push_back(i);
                    block(i, s.instruction);
                }
                named_[{w.cta, v[0]}] = v[1];
                check_named(cta, n, v[1]);
                break;
            }
            case Timed::Product: {
                Tensor product;
                const Cycles m = Cycles(v[0]), n = Cycles(v[1]);
                product.pair = v[3];
                const Cycles rows = m / Cycles(product.pair), columns = n / Cycles(product.pair);
                product.flops = 2 * m * n * Cycles(v[2]);
                // Cycles per K step of 32 bytes: N / 2 with 128 rows per SM, and with 64 rows of a single CTA; N / 4
                // with 64 rows of a CTA pair.
                product.mma = product.pair == 2 && m <= 128 ? n / 4 : n / 2;
                product.smem = 32 * ((v[4] ? 0 : rows) + columns) / chip_.smem_bytes;
                if (product.pair == 2 && n <= 96) product.mma += chip_.mma_residual_pair;
                product.earliest = t + (v[4] ? chip_.mma_start_ts : chip_.mma_start_ss) + (product.pair == 2 ? chip_.mma_start_pair : 0);
                enqueue(sm, product);
                break;
            }
            case Timed::Commit: {
                Tensor c;
                c.commit = true;
                c.cta = v[0];
                c.barrier = v[1];
                c.earliest = t;
                enqueue(sm, c);
                break;
            }
            case Timed::TensorCopy: {       // in order with the products
                Tensor copy;
                copy.smem = Cycles(v[0]) / chip_.smem_bytes;
                copy.earliest = t;
                enqueue(sm, copy);
                break;
            }
            case Timed::Box: box_ = &e; break;
            case Timed::Load: load(cta, i, e, t); break;
            case Timed::Put: {
                Sm& here = sm_of(w);
                here.dsmem_free = std::max(here.dsmem_free, t) + Cycles(v[3]) / chip_.dsmem_bytes;
                result_.busy["dsmem"] += Cycles(v[3]) / chip_.dsmem_bytes;
                fill(cta.input.sm, t, here.dsmem_free, Cycles(v[3]));
                fill(cta_of(v[0]).input.sm, t + chip_.dsmem_latency, here.dsmem_free + chip_.dsmem_latency, Cycles(v[3]));
                push(here.dsmem_free + chip_.dsmem_latency, What::Arrive, v[1], v[2], 0, -v[3]);
                done = t + chip_.dsmem_latency;
                break;
            }
            case Timed::Store: {
                // The chip executes a store once for a warp if all lanes give the same operands.
                const int64_t apart = box_ == &e - 1 ? 2 : 1;       // events from one store to the next
                if (stored_ && stored_->at == e.at && stored_->value[3] == v[3] && stored_->value[2] == v[2] && stored_ + apart == &e) {
                    stored_ = &e;
                    break;
                }
                stored_ = &e;
                const int64_t* box = box_of(e);
                const Cycles bytes = box ? Cycles(box[4]) : Cycles(v[2]), rate = v[1] ? chip_.reduce_bytes : chip_.tma_store_bytes;
                const Cycles cut = box ? Cycles(box[1] + box[2]) * chip_.tma_store_cut_row : 0;
                const Cycles begin = std::max(sm.store_free, t);
                sm.store_free = begin + bytes / rate + cut;
                result_.busy["tma store"] += bytes / rate + cut;
                fill(cta.input.sm, begin, sm.store_free, bytes * chip_.store_share);
                w.bulk_open.first = std::max(w.bulk_open.first, begin + bytes / std::min(rate, chip_.store_read_bytes) + cut + chip_.tma_store_latency / 2);
                w.bulk_open.second = std::max(w.bulk_open.second, sm.store_free + chip_.tma_store_latency);
                if (options_.timeline) result_.intervals.push_back({kStoreTrack, cta.input.sm, 0, v[2], begin, sm.store_free});
                break;
            }
            case Timed::Shared: {
                // cp.async writes a line at a time, not as a warp's threads store.
                const bool remote = v[2] != cta.input.number, is_copy = copies(in);
                const Cycles passes = is_copy ? std::min(Cycles(v[1]), chip_.copy_passes) : Cycles(v[1]);
                sm.lsu_free = std::max(sm.lsu_free, t) + passes;
                sm.smem_free = std::max(sm.smem_free, t) + passes;
                result_.busy["smem"] += passes;
                result_.busy["smem threads"] += passes;
                read = sm.lsu_free + 8;
                done = sm.lsu_free + (remote ? chip_.dsmem_latency : chip_.smem_latency);
                if (is_copy) w.copy_open = std::max(w.copy_open, copy_done_), w.copies_done = std::max(w.copies_done, copy_done_);
                break;
            }
            case Timed::Global: {
                const Memory memory = v[3] == 0 ? memory_of(v[2]) : Memory{0, kNever, false};
                const Cycles bytes = Cycles(v[1]) * 32;
                if (v[3] == 2) {        // atomic: its registers are free once it has left the SM
                    sm.red_free = std::max(sm.red_free, t) + bytes / chip_.red_bytes;
                    result_.busy["additions"] += bytes / chip_.red_bytes;
                    read = sm.red_free;
                    if (chip_.red_port_bytes > 0) {     // they leave in order with accesses to shared memory
                        sm.red_out = std::max({sm.red_out, t, sm.red_free - chip_.red_burst}) + bytes / chip_.red_port_bytes;
                        sm.lsu_free = std::max(sm.lsu_free, sm.red_out);
                        Cycles& pipe = p.pipe_free[size_t(s.pipe)];
                        pipe = std::max(pipe, sm.red_out - chip_.red_queue);
                        read = sm.red_out;
                    }
                    done = std::max(read, sm.red_free) + chip_.atomic_latency;
                    break;
                }
                // Lines of cp.async are looked up one after another.
                if (copies(in)) sm.lines_free = std::max(sm.lines_free, t) + Cycles(v[4]) * chip_.copy_lines;
                const Cycles begin = copies(in) ? sm.lines_free : t;
                done = from_l2(sm, bytes, memory, begin) + chip_.l2_latency;
                if (memory.miss) done = std::max(done, from_dram(bytes, memory.sharers, begin) + chip_.dram_latency);
                if (v[3] == 1) read = t + 8;
                copy_done_ = done;
                break;
            }
            case Timed::CopyArrive:
                cta_of(v[0]).barriers[v[1]].pending += v[3];
                push(std::max(t, w.copies_done) + chip_.mbarrier_arrive, What::Arrive, v[0], v[1], v[2], 0);
                break;
            case Timed::Cancel: push(t + chip_.cancel_latency, What::Arrive, v[0], v[1], 0, -16); break;
        }
    }

    // Rate of a kind of mma.sync (effects.ProductKind), relative to 16-bit operands with float32 sums.
    double rate_of(int64_t kind) const {
        const std::array<double, 7> rates{
            1, chip_.mma_f16_sums, chip_.mma_8bit, chip_.mma_8bit * chip_.mma_f16_sums, chip_.mma_scaled, chip_.mma_scaled_4bit, 0.5,
        };
        return rates.at(size_t(kind));
    }

    // Numbers of the box of a copy by a tensor map, which precede it; nullptr for a bulk copy, and on chips without their law.
    const int64_t* box_of(const TimedEvent& e) const {
        return chip_.box_sectors > 0 && box_ == &e - 1 ? box_->value : nullptr;
    }

    static bool copies(const Instruction* in) { return in && Action(in->action) == Action::Copy; }

    void load(Cta& cta, size_t i, const TimedEvent& e, Cycles t) {
        const int64_t* v = e.value;
        Cta& target = cta_of(v[0]);
        const Cycles bytes = Cycles(v[3]);
        if (v[5] >= 0 || copied_from_ != &e - 1) {
            Sm& sm = sms_[size_t(cta.input.sm)];
            const int64_t* box = box_of(e);
            Cycles takes = bytes / chip_.tma_bytes;
            if (box) takes = std::max(takes, Cycles(box[0]) * chip_.tma_row) + Cycles(box[1]) * chip_.tma_cut_row + Cycles(box[2]) * chip_.tma_cut_sector;
            const Cycles begin = std::max(sm.tma_free, t);
            sm.tma_free = begin + takes;
            result_.busy["tma load"] += takes;
            const Memory memory = memory_of(v[4]);
            ++result_.loads;
            result_.misses += memory.miss;
            // L2 gives whole sectors, also those that the tensor's edge cuts off. Of what they hold of others, a part comes
            // from device memory once more.
            const Cycles sectors = box ? Cycles(32 * box[3]) : bytes, inside = box ? Cycles(box[4]) : bytes;
            const Cycles from_memory = inside + (sectors - inside) * chip_.dram_outside;
            Cycles end = from_l2(sm, sectors, memory, begin);
            if (memory.miss) end = std::max(end, from_dram(from_memory, memory.sharers, begin) + chip_.dram_latency - chip_.l2_latency);
            load_end_ = std::max(sm.tma_free, end) + chip_.tma_latency;
            load_begin_ = std::min(load_end_, begin + chip_.tma_latency);
            if (options_.timeline) result_.intervals.push_back({kLoadTrack, cta.input.sm, int64_t(i), v[3], begin, load_end_});
        }
        copied_from_ = &e;
        fill(target.input.sm, load_begin_, load_end_, bytes * chip_.tma_share);
        push(load_end_, What::Arrive, v[1], v[2], 0, -v[3]);
    }

    struct Memory { double sharers; Cycles gpc; bool miss; };       // gpc: bytes per cycle of the SM's share of the link from its GPC to L2

    // Sources of a read. SMs that read the same address are spread over all GPCs; a GPC fetches it once for all of its
    // SMs.
    Memory memory_of(int64_t address) {
        for (const Range& r : options_.ranges)
            if (address >= r.begin && address < r.end)
                return {r.sharers, chip_.l2_own_bytes * std::max(1.0, r.sharers / chip_.gpcs), r.cold && first_touch(uint64_t(address) >> 7)};
        return {1, kNever, options_.cold && first_touch(uint64_t(address) >> 7)};
    }

    // Time at which bytes arrive from L2, over the GPC's link and the SM's own.
    Cycles from_l2(Sm& sm, Cycles bytes, const Memory& memory, Cycles t) {
        sm.gpc_free = std::max(sm.gpc_free, t) + bytes / memory.gpc;
        sm.link_free = std::max(sm.link_free, t) + bytes / chip_.l2_bytes;
        result_.busy["gpc link"] += bytes / memory.gpc;
        result_.busy["l2 link"] += bytes / chip_.l2_bytes;
        return std::max(sm.gpc_free, sm.link_free);
    }

    // Time at which bytes that `sharers` SMs read together have left DRAM.
    Cycles from_dram(Cycles bytes, double sharers, Cycles t) {
        const Cycles takes = bytes / (chip_.dram_bytes * sharers);
        dram_free_ = std::max(dram_free_, t) + takes;
        result_.busy["dram"] += takes;
        return dram_free_;
    }

    bool first_touch(uint64_t line) { return touched_.insert(line).second; }

    // Writes bytes to shared memory (or reads them), spread evenly between two times.
    void fill(int64_t sm, Cycles begin, Cycles end, Cycles bytes) {
        const int64_t pieces = std::max<int64_t>(1, int64_t(bytes / kPiece));
        for (int64_t k = 0; k < pieces; ++k)
            push(begin + (end - begin) * Cycles(k) / Cycles(pieces), What::Fill, sm, int64_t(bytes / Cycles(pieces)));
    }

    void enqueue(Sm& sm, const Tensor& e) {
        sm.tensor.push_back(e);
        arm(sm);
    }
    void arm(Sm& sm) {
        if (sm.tensor_armed || sm.tensor.empty()) return;
        sm.tensor_armed = true;
        push(std::max(sm.tensor_free, sm.tensor.front().earliest), What::Tensor, &sm - sms_.data());
    }

    void tensor(Sm& sm) {
        const Tensor e = sm.tensor.front();
        sm.tensor.pop_front();
        if (e.group >= 0) {
            begin(sm, e);
            return;
        }
        sm.tensor_armed = false;
        if (e.commit) {
            push(now_ + chip_.commit, What::Arrive, e.cta, e.barrier, 1, 0);
        } else {
            Cycles end = now_ + e.mma;
            const auto operands = [&](Sm& s) {
                s.smem_free = std::max(s.smem_free, now_) + e.smem;
                end = std::max(end, s.smem_free);
                result_.busy["smem"] += e.smem;
                result_.busy["smem operands"] += e.smem;
            };
            operands(sm);
            result_.busy["tensor"] += e.mma;
            if (e.pair == 2) {
                Sm& peer = sms_.at(size_t((&sm - sms_.data()) ^ 1));
                operands(peer);
                peer.tensor_free = std::max(peer.tensor_free, end);
                result_.busy["tensor"] += e.mma;
            }
            sm.tensor_free = end;
            result_.products.push_back({now_, end, e.flops});
            if (options_.timeline) result_.intervals.push_back({kTensorTrack, &sm - sms_.data(), e.group, int64_t(e.flops), now_, end});
        }
        arm(sm);
    }

    // Starts a wgmma. It ends when its products are done and its operands are read, plus the time that instructions of
    // other warps took from it: they use the same register ports as the accumulation.
    void begin(Sm& sm, const Tensor& e) {
        sm.running = e;
        sm.tensor_begin = now_;
        sm.given = 0;
        for (Partition& p : sm.parts) p.taken = 0;
        sm.smem_free = std::max(sm.smem_free, now_) + e.smem;
        result_.busy["smem"] += e.smem;
        result_.busy["smem operands"] += e.smem;
        result_.busy["tensor"] += e.mma;
        sm.tensor_free = std::max(now_ + e.mma, sm.smem_free);
        push(sm.tensor_free, What::Ends, &sm - sms_.data());
    }

    void ends(Sm& sm) {
        Cycles taken = 0;
        for (const Partition& p : sm.parts) taken = std::max(taken, p.taken);
        if (taken - sm.given >= 1) {
            sm.tensor_free = now_ + taken - sm.given;
            sm.given = taken;
            push(sm.tensor_free, What::Ends, &sm - sms_.data());
            return;
        }
        const Tensor& e = sm.running;
        result_.products.push_back({sm.tensor_begin, now_, e.flops});
        if (options_.timeline) result_.intervals.push_back({kTensorTrack, &sm - sms_.data(), e.group, int64_t(e.flops), sm.tensor_begin, now_});
        push(now_ + chip_.wgmma_tail, What::Arrive, e.cta, -1 - e.group, 1, 0);
        sm.running.group = -1;
        sm.tensor_armed = false;
        arm(sm);
    }

    void check_named(Cta& cta, Named& n, int64_t threads) {
        int64_t target = threads;
        if (!target)
            for (size_t k : cta.warps) target += warps_[k].done ? 0 : 32;
        if (n.arrived < target) return;
        n.arrived = 0;
        std::vector<size_t> waiters;
        waiters.swap(n.waiters);
        for (size_t k : waiters) wake(k, now_ + chip_.named_barrier);
    }
    void check_all_named(Cta& cta) {
        for (size_t id = 0; id < 16; ++id)
            if (cta.named[id].arrived && !named_[{size_t(&cta - ctas_.data()), int64_t(id)}]) check_named(cta, cta.named[id], 0);
    }

    void handle(const Async& e) {
        switch (e.what) {
            case What::Start: start(size_t(e.a)); break;
            case What::Fill: {
                Sm& sm = sms_[size_t(e.a)];
                sm.smem_free = std::max(sm.smem_free, now_) + Cycles(e.b) / chip_.smem_bytes;
                result_.busy["smem"] += Cycles(e.b) / chip_.smem_bytes;
                result_.busy["smem copies"] += Cycles(e.b) / chip_.smem_bytes;
                break;
            }
            case What::Tensor: tensor(sms_[size_t(e.a)]); break;
            case What::Ends: ends(sms_[size_t(e.a)]); break;
            case What::Arrive: {
                Cta& cta = cta_of(e.a);
                if (e.b < 0) {      // completion of a wgmma
                    const int64_t group = -1 - e.b, done = ++cta.wgmma_done[group];
                    for (size_t k : cta.warps) {
                        Warp& w = warps_[k];
                        if (w.blocked && int64_t(w.input->warp) / 4 == group && w.wgmma_waits_for && done >= w.wgmma_waits_for) {
                            w.wgmma_waits_for = 0;
                            wake(k, now_);
                        }
                    }
                    break;
                }
                Barrier& b = cta.barriers[e.b];
                b.pending -= e.c;
                b.bytes += e.d;
                if (b.pending || b.bytes) break;
                ++b.phases;
                b.pending = b.expected;
                for (size_t k = 0; k < b.waiters.size();) {
                    const Barrier::Waiter waiter = b.waiters[k];
                    if (waiter.phases > b.phases) {
                        ++k;
                        continue;
                    }
                    b.waiters.erase(b.waiters.begin() + long(k));
                    const Cycles t = now_ + chip_.mbarrier_wake;
                    if (waiter.boards) {
                        for (uint64_t m = uint64_t(waiter.boards); m; m &= m - 1) warps_[waiter.warp].scoreboard[size_t(__builtin_ctzll(m))] = t;
                        note_wait(waiter.warp, t);
                        touch(warps_[waiter.warp]);
                    } else {
                        wake(waiter.warp, t);
                    }
                }
                break;
            }
        }
    }
    const Model& model_;
    const Chip& chip_;
    const Options options_;
    Result result_;
    std::vector<Sm> sms_;
    std::vector<Cta> ctas_;
    std::vector<Cluster> clusters_;
    std::vector<Warp> warps_;
    std::unordered_map<int64_t, size_t> by_number_;
    std::priority_queue<Async> queue_;
    std::map<std::pair<size_t, int64_t>, int64_t> named_;
    std::unordered_map<size_t, int64_t> arrived_at_;
    std::unordered_set<uint64_t> touched_;
    std::vector<bool> carried_;         // by instruction
    std::vector<size_t> slowed_pipes_;  // pipes whose instructions are slowed beside products
    uint64_t order_ = 0;
    Cycles now_ = 0, dram_free_ = 0, copy_done_ = 0, load_begin_ = 0, load_end_ = 0;
    const TimedEvent* copied_from_ = nullptr;
    const TimedEvent* stored_ = nullptr;
    const TimedEvent* box_ = nullptr;
};

}  // namespace

Result replay(const Model& model, const Chip& chip, const std::vector<WarpInput>& warps, const std::vector<CtaInput>& ctas, const Options& options) {
    return Replay(model, chip, warps, ctas, options).run();
}

}  // namespace warpcheck::timing
