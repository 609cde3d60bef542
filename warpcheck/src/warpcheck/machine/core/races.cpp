// Comparison of accesses by their vector clocks, and the orders that fences, barriers and flags give.
#include "races.hpp"

#include <cstring>

#include "state.hpp"

namespace warpcheck {
namespace {

constexpr uint32_t kFew = 64;       // bytes of a range whose words may all differ
constexpr size_t kTried = 16;       // free slots that a new operation tries
constexpr size_t kEnded = 4096;     // warps of other CTAs that end before the slot of a warp is reused
// What a relaxed arrival or wait passes on: it is complete, or a fence has taken effect.
constexpr Via kRelaxed[] = {kAsyncGlobal, kAsyncShared, kBarrierInit, kTensorReleased, kTensorWaited, kCopyWaited, kHandedOn, kExecuted};
constexpr const char* kOnlyHandedOn = "a thread that had acquired it says so by a relaxed arrival, which orders nothing";
const char* const kSpaces[] = {"global memory", "shared memory", "tensor memory"};

bool seen(const Access& prior, const Order& order) {
    if (prior.epoch <= order.seen[prior.slot]) return true;
    for (const Partial& p : order.partial)
        if (p.granted && p.slot == prior.slot && prior.epoch <= p.epoch && (prior.lane < 0 || p.lanes >> prior.lane & 1)) return true;
    return false;
}

// True if the access is ordered by an arrival of cp.async only. The ISA says that such an arrival orders the copied
// bytes only.
bool arrived(const Access& prior, const Order& order) {
    if (prior.epoch <= order.via[kCopyArrived][prior.slot]) return true;
    return std::any_of(order.partial.begin(), order.partial.end(), [&](const Partial& p) {
        return p.slot == prior.slot && prior.epoch <= p.epoch && (prior.lane < 0 || p.lanes >> prior.lane & 1);
    });
}

bool arrived(const Access& prior, const Agent& agent) {
    if (arrived(prior, *agent.order)) return true;
    if (!agent.clock) return false;
    const auto& held = agent.clock->held;
    return std::any_of(held.begin(), held.end(), [&](const Held& h) { return (agent.lane < 0 || h.lanes >> agent.lane & 1) && arrived(prior, h.order); });
}

// As `seen`, with the orders that the agent's lanes have beyond their warp.
bool seen_by(const Access& prior, const Agent& agent) {
    if (seen(prior, *agent.order)) return true;
    if (!agent.clock || (agent.clock->held.empty() && agent.clock->copied.empty())) return false;
    uint32_t lanes = agent.lane >= 0 ? 1u << agent.lane : kWarp;
    for (const Copied& c : agent.clock->copied)
        if (c.slot == prior.slot && prior.epoch <= c.epoch && (prior.lane < 0 || prior.lane == agent.lane || agent.lane == kAnyLane)) return true;
    uint32_t have = ~agent.clock->alive;
    for (const Held& h : agent.clock->held)
        if (seen(prior, h.order)) have |= h.lanes;
    return agent.lane == kAnyLane ? have & agent.clock->alive : !(lanes & ~have);
}

// True if an order of this kind leads from the access to the agent.
bool known_by(Via via, const Access& prior, const Agent& agent) {
    const auto in = [&](const Order& order) { return prior.epoch <= order.via[via][prior.slot]; };
    if (in(*agent.order)) return true;
    if (!agent.clock) return false;
    const auto& held = agent.clock->held;
    return std::any_of(held.begin(), held.end(), [&](const Held& h) { return (agent.lane < 0 || h.lanes >> agent.lane & 1) && in(h.order); });
}

// True if the agent knows, by a relaxed arrival, that the access was waited for. A relaxed arrival orders nothing.
bool told_of(const Access& prior, const Agent& agent) { return known_by(kCopyWaited, prior, agent); }

// Applies `change` to the order of the warp if all lanes execute the instruction, else to the order of these lanes.
template <class Change>
void on_orders(WarpClock& clock, uint32_t lanes, Change change) {
    change(clock.order);
    for (Held& h : clock.held)
        if (h.lanes & lanes) change(h.order);
}

}  // namespace

// True if the agent knows, by a relaxed arrival, that another thread had acquired the access. In global memory this
// counts within a CTA, whose threads share a cache.
bool Races::handed_on(const Access& prior, const Agent& agent, int space) const {
    return (space || cta_of(prior) == agent.cta) && known_by(kHandedOn, prior, agent);
}

bool Races::ordered(const Access& prior, const Agent& agent, int space) const {
    if (prior.slot == agent.slot && prior.epoch >= agent.self_from && prior.epoch <= agent.epoch) {
        // Accesses of the same warp are ordered by program order, or by a synchronisation of the lanes.
        if (prior.lane < 0 || agent.lane < 0 || prior.lane == agent.lane || prior.epoch <= agent.synced || prior.row == agent.row)
            return true;
    }
    // tcgen05.dealloc itself is no asynchronous operation: operations that are complete before it need no fence.
    if (space == 2 && agent.async) {
        if (by_letter || prior.epoch <= agent.order->via[kTensor][prior.slot]) return prior.epoch <= agent.order->via[kTensor][prior.slot];
        if (prior.epoch <= agent.order->via[kTensorWaited][prior.slot]) return true;
    }
    return seen_by(prior, agent);
}

uint32_t Races::new_slot() {
    epochs_.push_back(0);
    return uint32_t(epochs_.size() - 1);
}

void Races::owns(uint32_t slot, uint32_t epoch, int32_t cta) {
    if (slot >= owners_.size()) owners_.resize(slot + 1);
    auto& owners = owners_[slot];
    if (owners.empty() || owners.back().cta != cta) owners.push_back({epoch, cta});
}

int32_t Races::cta_of(const Access& access) const {
    const auto& owners = owners_[access.slot];
    auto owner = owners.rbegin();
    while (owner->from > access.epoch) ++owner;
    return owner->cta;
}

uint32_t Races::take_slot(const Order& order) {
    for (size_t tried = std::min(kTried, free_.size()); tried; --tried) {
        const uint32_t slot = free_.front();
        free_.pop_front();
        if (order.seen[slot] >= epochs_[slot]) return slot;
        free_.push_back(slot);
    }
    return new_slot();
}

void Races::start(WarpClock& clock, int32_t cta) {
    if (!enabled) return;
    if (ended_.size() > kEnded) {
        clock.slot = ended_.front();
        ended_.pop_front();
    } else {
        clock.slot = new_slot();
    }
    clock.epoch = clock.self_from = next_epoch(clock.slot);
    owns(clock.slot, clock.epoch, cta);
}

void Races::release(WarpClock& clock, Order& to, uint32_t lanes) {
    if (!enabled) return;
    to.join(clock.order);
    clock.add_held(to, lanes, false);
    clock.stamp(to, lanes);
    clock.epoch = next_epoch(clock.slot);
}

void Races::acquire(WarpClock& clock, const Order& from, uint32_t lanes) {
    if (!enabled) return;
    if (clock.alive & ~lanes) {
        for (Held& h : clock.held)
            if (h.lanes == lanes) return h.order.join(from);
        clock.held.push_back({lanes, {}});
        return clock.held.back().order.join(from);
    }
    clock.order.join(from);
    clock.synced = std::max(clock.synced, clock.order.seen[clock.slot]);
    auto& held = clock.held;
    held.erase(std::remove_if(held.begin(), held.end(), [&](const Held& h) { return clock.order.covers(h.order); }), held.end());
    auto& copied = clock.copied;
    copied.erase(std::remove_if(copied.begin(), copied.end(), [&](const Copied& c) { return c.epoch <= clock.order.seen[c.slot]; }), copied.end());
}

void Races::acquire_copy(WarpClock& clock, uint32_t slot, uint32_t epoch, uint32_t lanes) {
    if (enabled) clock.copied.push_back({slot, epoch, lanes});
}

// A relaxed arrival publishes no accesses except what is complete: tcgen05 operations and bulk stores that were waited
// for, what its thread had acquired, and what proxy fences have shown. A strict reading of the ISA requires a fence for
// the first and a release for the others. NVIDIA's cuDNN omits both: the fence when it releases P and the statistics, the
// release when it releases buffers in shared memory and statistics that it has read.
void Races::release_relaxed(WarpClock& clock, Order& to, uint32_t lanes) {
    if (!enabled) return;
    const auto publish = [&](const Order& order) {
        for (const Via via : kRelaxed) to.via[via].join(order.via[via]);
        to.via[kTensorWaited].join(order.via[kTensor]);
        to.via[kHandedOn].join(order.seen);
        to.join_fences(order);
        to.join_executed(order);
    };
    publish(clock.order);
    for (const Held& h : clock.held)
        if (h.lanes & lanes) publish(h.order);
    if (clock.has_fenced) to.join(clock.fenced[0]);
    to.via[kExecuted].set(clock.slot, clock.epoch);
    clock.epoch = next_epoch(clock.slot);
}

void Races::acquire_relaxed(WarpClock& clock, const Order& from, uint32_t lanes) {
    if (!enabled) return;
    for (const Via via : kRelaxed) clock.order.via[via].join(from.via[via]);
    clock.observed[0].join(from);
    clock.has_observed = true;
    observe_fences(clock, from, lanes);
}

void Races::observe_fences(WarpClock& clock, const Order& from, uint32_t lanes) {
    if (!from.fences) return;
    Order observed;
    observed.fences = from.fences;
    acquire(clock, observed, lanes);
}

void Races::sync_lanes(WarpClock& clock) {
    if (!enabled) return;
    clock.share();
    clock.synced = clock.epoch;
    clock.unsynced = 0;
    clock.epoch = next_epoch(clock.slot);
}

void Races::meet_lanes(WarpClock& clock) {
    if (!enabled) return;
    clock.met = clock.epoch;
    clock.epoch = next_epoch(clock.slot);
}

void Races::proxy_fence(WarpClock& clock, bool global, bool shared, uint32_t lanes) {
    if (!enabled) return;
    for (const Via via : {kAsyncGlobal, kAsyncShared, kBarrierInit}) {
        if (!(via == kAsyncGlobal ? global : shared)) continue;
        on_orders(clock, lanes, [&](Order& order) {
            order.via[via].join(order.seen);
            order.via[via].join(order.via[kCopyArrived]);
        });
        clock.order.via[via].set(clock.slot, clock.epoch);
        for (const Copied& c : clock.copied)
            if (c.lanes & lanes) clock.order.via[via].set(c.slot, c.epoch);
    }
    clock.epoch = next_epoch(clock.slot);
}

void Races::barrier_init_fence(WarpClock& clock) {
    if (!enabled) return;
    clock.order.via[kBarrierInit].set(clock.slot, clock.epoch);
    clock.epoch = next_epoch(clock.slot);
}

void Races::tensormap_fence(WarpClock& clock, int semantics, uint32_t lanes) {
    if (!enabled) return;
    if (semantics & 4) {
        on_orders(clock, lanes, [&](Order& order) {
            order.via[kMapReleased].join(order.seen);
            order.via[kMapReleased].join(order.via[kCopyArrived]);
        });
        clock.order.via[kMapReleased].set(clock.slot, clock.epoch);
        clock.epoch = next_epoch(clock.slot);
    }
    if (semantics & 2) on_orders(clock, lanes, [&](Order& order) { order.via[kMap].join(order.via[kMapReleased]); });
}

void Races::tensor_fence(WarpClock& clock, bool after, uint32_t lanes) {
    if (!enabled) return;
    const Via from = after ? kTensorReleased : kTensor, to = after ? kTensor : kTensorReleased;
    on_orders(clock, lanes, [&](Order& order) { order.via[to].join(order.via[from]); });
}

void Races::fence(WarpClock& clock, int semantics, int scope, uint32_t lanes) {
    if (!enabled) return;
    for (int reach = 0; reach < kScopes && reach <= scope; ++reach) {
        if (semantics & 2 && clock.has_observed) acquire(clock, clock.observed[reach], lanes);
        if (semantics & 4) {
            clock.has_fenced = true;
            clock.fenced[reach].join(clock.order);
            clock.add_held(clock.fenced[reach], lanes, false);
            clock.stamp(clock.fenced[reach], lanes);
        }
    }
    if (semantics & 8 && scope >= kScopes - 1) fence_sc(clock, lanes);
    clock.epoch = next_epoch(clock.slot);
}

// Two fence.sc are ordered, one way or the other (ISA 8.9.3). If an observation leads from the first to the second, the
// second cannot be the earlier one, so it acquires what the first had before it. The fence after a barrier thus sees
// what other threads of the writer's CTA fenced before theirs.
void Races::fence_sc(WarpClock& clock, uint32_t lanes) {
    Order earlier;
    clock.add_fences(earlier, lanes);
    if (earlier.fences) acquire(clock, *earlier.fences, lanes);
    auto before = std::make_shared<Order>();
    before->join(clock.order);
    clock.add_held(*before, lanes, false);
    clock.stamp(*before, lanes);
    before->fences.reset();
    earlier.fences = std::move(before);
    acquire(clock, earlier, lanes);
}

void Races::flag_write(WarpClock& clock, uint64_t key, int semantics, int scope, uint32_t lanes) {
    if (!enabled) return;
    Order fences;
    clock.add_fences(fences, lanes);
    if (!(semantics & 4 || clock.has_fenced || fences.fences)) return;
    for (int reach = 0; reach < kScopes && reach <= scope; ++reach) {
        Order& flag = flags_[{key, reach, clock.domain[reach]}];
        flag.join_fences(fences);
        if (semantics & 4) {
            flag.join(clock.order);
            clock.add_held(flag, lanes, false);
            clock.stamp(flag, lanes);
        } else {
            flag.join(clock.fenced[reach]);
        }
    }
    clock.epoch = next_epoch(clock.slot);
}

void Races::flag_read(WarpClock& clock, uint64_t key, int semantics, int scope, uint32_t lanes) {
    if (!enabled) return;
    for (int reach = 0; reach < kScopes && reach <= scope; ++reach) {
        const auto found = flags_.find({key, reach, clock.domain[reach]});
        if (found == flags_.end()) continue;
        if (semantics & 2) acquire(clock, found->second, lanes);
        else {
            clock.observed[reach].join(found->second), clock.has_observed = true;
            observe_fences(clock, found->second, lanes);
        }
    }
}

// True if both are tcgen05 operations of one thread, which chips are known to execute in order.
bool Races::same_thread(const Access& prior, const Agent& agent) const {
    if (issuers_.empty()) return false;
    const auto a = issuers_.find(prior.slot), b = issuers_.find(agent.slot);
    return a != issuers_.end() && b != issuers_.end() && a->second == b->second;
}

// True if the write being compared leaves these bytes of the cell unchanged.
bool Races::changes_nothing(uint16_t bytes) const {
    if (!change_.after) return false;
    for (int i = 0; bytes >> i; ++i)
        if (bytes >> i & 1 && change_.before[i] != change_.after[i]) return false;
    return true;
}

std::string Races::barrier_of(uint32_t slot, uint32_t epoch) const {
    if (slot >= arrivals_.size() || !epoch || arrivals_[slot].epoch != epoch) return "";
    return program_.barrier(arrivals_[slot].offset);
}

void Races::report(Check check, const Access& prior, const Agent& agent, uint8_t kind, int space, const char* missing, bool equal) {
    ++reports_;
    if (!findings_.told(equal ? Check::EqualWrites : check) || findings_.again(check, agent.row, prior.row, equal)) return;
    const auto name = [](uint8_t k) {
        return std::string(k & kAsync ? "asynchronous " : "") + (k & kAtomic ? "atomic " : "") + (k & kWrite ? "write" : "read");
    };
    const std::string where = agent.column < 0 ? "" : ", column " + std::to_string(agent.column);
    std::string text = std::string("data race in ") + kSpaces[space] + where + ": " + name(kind) + " against an earlier " + name(prior.kind);
    if (equal) text += " of the same bytes";
    SimError error(check, text + "; " + missing);
    error.place = {agent.row, agent.cta, agent.warp, agent.lane < 0 ? 0 : 1u << agent.lane};
    error.others.push_back({"the other access (" + name(prior.kind) + ")",
                            {prior.row, cta_of(prior), prior.warp, prior.lane < 0 ? 0 : 1u << prior.lane}});
    error.barrier = barrier_of(agent.slot, agent.epoch);
    if (error.barrier.empty()) error.barrier = barrier_of(prior.slot, prior.epoch);
    findings_.note(std::move(error), equal);
}

void Races::compare(const Access& prior, const Agent& agent, uint16_t bytes, uint8_t kind, int space) {
    if (!prior.epoch || !(prior.bytes & bytes) || !((prior.kind | kind) & kWrite)) return;
    if (prior.kind & kind & kAtomic) return;
    if (!ordered(prior, agent, space)) {
        Check check = Check::Race;
        const char* missing = "no synchronisation orders the two";
        if (same_thread(prior, agent)) {
            check = Check::MmaOrder;
            missing = "needs tcgen05.commit and a wait between: the ISA pipelines tcgen05.mma only for the same accumulator and shape";
        } else if (by_letter && arrived(prior, agent)) {
            check = Check::CopyArrival;
            missing = "an arrival of cp.async lies between, which orders what its thread copied and nothing else";
        } else if (prior.slot == agent.slot && prior.lane >= 0 && agent.lane >= 0) {
            check = Check::LaneRace;
            missing = "needs bar.warp.sync between the lanes";
        } else if (space == 2 && (seen(prior, *agent.order) || prior.epoch <= agent.order->via[kTensorWaited][prior.slot])) {
            check = Check::TensorFence;
            missing = "needs tcgen05.wait or tcgen05.fence beside the synchronisation";
        } else if ((space == 1 || prior.kind & kAsync) && told_of(prior, agent)) {
            check = Check::RelaxedArrival;
            missing = "its thread waited for it, and says so by a relaxed arrival, which orders nothing";
        } else if (handed_on(prior, agent, space)) {
            check = Check::RelaxedArrival;
            missing = kOnlyHandedOn;
        }
        if (ends_) check = Check::TmemLeftover;
        report(check, prior, agent, kind, space, missing, prior.kind & kind & kWrite && changes_nothing(prior.bytes & bytes));
    }
    // A write by the generic proxy is visible to the async proxy only after a proxy fence.
    if (space < 2 && agent.async && !(prior.kind & kAsync) && (prior.kind & kWrite) && prior.epoch > agent.order->via[space][prior.slot] &&
        !(space == 1 && told_of(prior, agent)))
        report(prior.kind & kCopy ? Check::CpAsyncProxy : Check::ProxyFence, prior, agent, kind, space,
               "needs fence.proxy.async between the generic write and the asynchronous access");
}

void Races::tensor_map(const Agent& agent, uint64_t address, uint32_t bytes) {
    if (!enabled) return;
    Agent reader = agent;
    reader.async = false;
    global(reader, address, bytes, 0);
    for (uint64_t at = address; at < address + bytes; at += kGlobalCell)
        for (const Access& write : pages_[at / kGlobalPage][at % kGlobalPage / kGlobalCell].writes)
            if (write.epoch > agent.order->via[kMap][write.slot])
                report(Check::TensormapFence, write, agent, 0, 0, "needs fence.proxy.tensormap::generic between the write and the use of the tensor map");
}

void Races::barrier_use(const Agent& agent, const Access& init, bool remote) {
    if (!enabled || init.epoch <= agent.order->via[kBarrierInit][init.slot]) return;
    if (!ordered(init, agent, 1) && !arrived(init, agent)) report(Check::Race, init, agent, kWrite, 1, "no synchronisation orders the two");
    if (remote || agent.async)
        report(Check::BarrierInitFence, init, agent, kWrite, 1, "needs fence.mbarrier_init or fence.proxy.async after mbarrier.init");
}

void Races::end_of_shared(const Cta& cta, bool sources) {
    if (!enabled) return;
    const Agent end{&cta.last, ~0u, 0, 1, -1, int32_t(cta.linear), -1, false};
    const auto check = [&](const Access& prior) {
        const bool source = (prior.kind & (kAsync | kWrite)) == kAsync;
        if (!prior.epoch || (source && !sources) || seen(prior, cta.last) || arrived(prior, cta.last)) return;
        if (handed_on(prior, end, 1)) report(Check::RelaxedArrival, prior, end, kWrite, 1, kOnlyHandedOn);
        else report(source ? Check::StoreLeftover : Check::CtaEnd, prior, end, kWrite, 1, "nothing orders it before the end of the CTA");
    };
    for (size_t i = 0, n; i < cta.races.size(); i += n) {
        n = alike(cta.races.at(i), cta.races.size() - i);
        WordRef word = words_[*cta.races.at(i)];
        const uint64_t reports = reports_;
        size_t k = 0;
        do {
            for (const Access& write : word.writes) check(write);
            for (uint32_t r = 0; r < word.reads_used(); ++r) check(word.read(r));
        } while (++k < n && reports_ != reports);
    }
    for (const auto& [who, arrival] : cta.arrivals) {
        if (seen(arrival, cta.last) || arrived(arrival, cta.last) || cta.last.after(arrival.slot, arrival.epoch)) continue;
        report(Check::CtaEnd, arrival, end, kWrite, 1, "nothing orders the arrival before the end of the CTA");
        break;
    }
}

// Fast test for the common case: the accessor has seen the prior access, and no fence is needed.
template <int space>
inline bool Races::clear(const Access& prior, const Agent& agent) const {
    if (prior.epoch > agent.order->seen[prior.slot]) return false;
    return space == 2 ? !by_letter : !agent.async || prior.kind & kAsync || !(prior.kind & kWrite);
}

template <int space, class C>
inline void Races::touch(C& cell, const Agent& agent, uint16_t bytes, uint8_t kind) {
    const Access now(agent.slot, agent.epoch, agent.row, agent.warp, bytes, kind, agent.lane);
    for (const Access& write : cell.writes)
        if (write.epoch && !clear<space>(write, agent)) compare(write, agent, bytes, kind, space);
    const uint32_t end = cell.reads_used();
    if (kind & kWrite) {
        uint32_t used = 0;
        for (uint32_t i = 0; i < end; ++i) {
            Access& read = cell.read(i);
            if (!read.epoch) continue;
            if (!clear<space>(read, agent)) compare(read, agent, bytes, kind, space);
            if (!(read.bytes & ~bytes)) read = {};
            else used = i + 1;
        }
        if constexpr (C::counts) cell.used = used;
        // Of atomic writes that nothing orders both are kept: a later plain access must come after either.
        const auto stays = [&](const Access& write) {
            return write.kind & kind & kAtomic && !clear<space>(write, agent) && !ordered(write, agent, space);
        };
        for (Access& write : cell.writes)
            if (write.epoch && !(write.bytes & ~bytes) && !stays(write)) write = {};
        cell.writes[cell.writes[0].epoch && !cell.writes[1].epoch] = now;
        return;
    }
    // A read replaces an earlier read that it is ordered after. If no slot is free, one is overwritten.
    const auto replaced = [&](const Access& read) {
        return !read.epoch || (!(read.bytes & ~bytes) && (clear<space>(read, agent) || ordered(read, agent, space) || arrived(read, agent)));
    };
    uint32_t i = 0;
    while (i < end && !replaced(cell.read(i))) ++i;
    if (i == C::readers) i = (agent.slot + agent.epoch) % C::readers;
    if constexpr (C::counts) {
        if (i == end) ++cell.used;
    }
    cell.read(i) = now;
}

// Same as `touch`, for a cell of global memory. Equal neighbouring cells take the result of the last one.
template <int space, class C>
inline void Races::repeat(C& cell, const Agent& agent, uint16_t bytes, uint8_t kind, Repeats<C>& repeats) {
    if (repeats.known && bytes == repeats.bytes && std::memcmp(&cell, &repeats.before, sizeof cell) == 0) {
        cell = repeats.after;
        return;
    }
    const uint64_t reports = reports_;
    repeats.before = cell;
    touch<space>(cell, agent, bytes, kind);
    repeats.after = cell;
    repeats.bytes = bytes;
    repeats.known = reports == reports_;
}

void Races::begin_operation() {
    ++operation_;
    made_count_ = 0;
    change_ = {};
    words_.collect();
}

// Number of a word that the current operation has created.
uint32_t Races::number_of(const WholeWord& word) {
    for (size_t i = 0; i < std::min(made_count_, made_.size()); ++i)
        if (words_.equal(made_[i], word)) return made_[i];
    return made_[made_count_++ % made_.size()] = words_.add(word);
}

// Touches neighbouring words, of which the operation accesses the same bytes. In tensor memory, the agent's column is
// the column of the first word. The new state of a word depends only on its old state and the access, so equal words
// share one comparison. If it reports a finding, each word is compared separately, because findings are counted.
template <int space>
void Races::touch_words(uint32_t* numbers, size_t count, Agent& agent, uint16_t bytes, uint8_t kind) {
    const int32_t column = agent.column;
    const Change change = change_;
    for (size_t i = 0, n; i < count; i += n) {
        n = alike(numbers + i, count - i);
        const uint32_t before = numbers[i];
        Known& known = known_[before % known_.size()];
        uint32_t after = known.after;
        if (known.operation != operation_ || known.before != before || known.bytes != bytes) {
            const uint64_t reports = reports_;
            const auto look_at = [&](size_t k) {
                if (space == 2) agent.column = column + int32_t(i + k);
                if (change.after) change_ = {change.before + 4 * (i + k), change.after + 4 * (i + k)};
            };
            // Words touched by single lanes, and words that are read, differ from each other; words that are written
            // become equal and share a number.
            const bool apart = agent.lane >= 0 || !(kind & kWrite);
            const bool own = apart && words_.only(before, n);
            if (own && n == 1) {
                look_at(0);
                WordRef word = words_[before];
                touch<space>(word, agent, bytes, kind);
                continue;
            }
            WholeWord word;
            size_t k = 0;
            do {
                look_at(k);
                words_.copy(before, word);
                WordRef ref = word.ref();
                touch<space>(ref, agent, bytes, kind);
            } while (++k < n && reports_ != reports);
            if (own) {
                words_.set(before, word);
                continue;
            }
            after = apart ? words_.add(word) : number_of(word);
            if (reports_ == reports) known = {operation_, before, after, bytes};
        }
        words_.move(before, after, n);
        std::fill_n(numbers + i, n, after);
    }
    agent.column = column;
}

void Races::record_write(uint64_t address, uint32_t bytes) {
    for (const Output& output : outputs) {
        const uint64_t first = std::max(address, output.base), end = std::min(address + bytes, output.base + output.bytes);
        if (first < end) std::memset(output.written + (first - output.base), 1, end - first);
    }
}

void Races::global(const Agent& agent, uint64_t address, uint32_t bytes, uint8_t kind, Change change) {
    if (!enabled) return;
    if (kind & kWrite && !outputs.empty()) record_write(address, bytes);
    if (agent.async) kind |= kAsync;
    const bool many = bytes > 4 * kGlobalCell;
    pieces_.known = false;
    while (bytes) {
        const uint64_t page = address / kGlobalPage;
        if (!last_page_ || last_page_number_ != page) {
            last_page_ = &pages_[page];
            last_page_number_ = page;
            if (last_page_->empty()) last_page_->resize(kGlobalPage / kGlobalCell);
        }
        auto& cells = *last_page_;
        const uint32_t in_page = uint32_t(address % kGlobalPage);
        uint32_t part = std::min<uint32_t>(bytes, kGlobalPage - in_page), at = in_page;
        address += part;
        bytes -= part;
        while (part) {
            const uint32_t first = at % kGlobalCell, n = std::min<uint32_t>(part, kGlobalCell - first);
            const auto touched = uint16_t(((1u << n) - 1) << first);
            if (before_slot_ >= 0) compare_with_grid_before(agent, page, at / kGlobalCell, touched, kind);
            if (change.after) {
                change_ = {change.before - first, change.after - first};
                change.before += n, change.after += n;
            }
            if (many) repeat<0>(cells[at / kGlobalCell], agent, touched, kind, pieces_);
            else touch<0>(cells[at / kGlobalCell], agent, touched, kind);
            at += n;
            part -= n;
        }
    }
    change_ = {};
}

Place Races::writer(uint64_t address, uint32_t bytes, int32_t but) const {
    const auto page = pages_.find(address / kGlobalPage);
    if (page == pages_.end()) return {};
    const uint32_t first = address % kGlobalCell;
    const auto touched = uint16_t(((1u << std::min(bytes, kGlobalCell - first)) - 1) << first);
    for (const Access& write : page->second[address % kGlobalPage / kGlobalCell].writes)
        if (write.epoch && write.bytes & touched && cta_of(write) != but) return {write.row, cta_of(write), write.warp, write.lane < 0 ? 0 : 1u << write.lane};
    return {};
}

void Races::shared_range(Agent& agent, Cta& cta, uint32_t offset, uint32_t bytes, uint8_t kind, Change change) {
    if (cta.races.empty()) cta.races.resize(words_, cta.shared.size() / 4 + 1);
    while (bytes) {
        const uint32_t first = offset % 4;
        const bool whole = !first && bytes >= 4;
        const uint32_t n = whole ? bytes / 4 * 4 : std::min(bytes, 4 - first);
        if (change.after) {
            change_ = {change.before - first, change.after - first};
            change.before += n, change.after += n;
        }
        const auto touched = uint16_t(whole ? 0xF : ((1u << n) - 1) << first);
        touch_words<1>(cta.races.at(offset / 4), whole ? n / 4 : 1, agent, touched, kind);
        offset += n;
        bytes -= n;
    }
}

void Races::shared(const Agent& agent, Cta& cta, uint32_t offset, uint32_t bytes, uint8_t kind, Change change) {
    if (!enabled) return;
    Agent who = agent;
    begin_operation();
    shared_range(who, cta, offset, bytes, uint8_t(kind | (agent.async ? kAsync : 0)), change);
}

void Races::prefetch(const Cta& cta, uint32_t offset, uint32_t bytes) const {
    for (size_t word = offset / 4; word < (offset + bytes + 3) / 4 && word < cta.races.size(); ++word) words_.prefetch(*cta.races.at(word));
}

void Races::shared(const Agent& agent, Cta* const* ctas, const std::vector<SharedRange>& ranges, bool write) {
    if (!enabled) return;
    const auto kind = uint8_t((write ? kWrite : 0) | (agent.async ? kAsync : 0));
    Agent who = agent;
    begin_operation();
    for (const SharedRange& r : ranges)
        if (r.bytes <= kFew) prefetch(*ctas[r.cta], r.offset, r.bytes);
    for (const SharedRange& r : ranges)
        if (r.write == write) shared_range(who, *ctas[r.cta], r.offset, r.bytes, kind, {});
}

void Races::tmem(const Agent& agent, Sm& sm, const TmemRect& rect, uint8_t kind) {
    if (!enabled) return;
    if (sm.races.empty()) sm.races.resize(words_, kTmemLanes * kTmemColumns);
    Agent who = agent;
    who.column = int32_t(rect.column);
    begin_operation();
    for (uint32_t lane = rect.lane; lane < uint32_t(rect.lane + rect.lanes); ++lane)
        touch_words<2>(sm.races.at(lane * kTmemColumns + rect.column), rect.columns, who, 1, kind);
}

void Races::end_of_tmem(const Agent& agent, Sm& sm, const TmemRect& rect) {
    ends_ = true;
    tmem(agent, sm, rect, kWrite);
    ends_ = false;
}

void Races::overlap(std::shared_ptr<const Touched> before) {
    if (!enabled) return;
    before_ = std::move(before);
    before_slot_ = new_slot();
    next_epoch(uint32_t(before_slot_));
}

void Races::wait_for_grid_before(WarpClock& clock) {
    has_waited_ = true;
    if (!enabled || before_slot_ < 0) return;
    Order end;
    end.seen.set(uint32_t(before_slot_), 1);
    acquire(clock, end);
}

void Races::compare_with_grid_before(const Agent& agent, uint64_t page, uint32_t cell, uint16_t bytes, uint8_t kind) {
    const char* does = "touch";
    if (before_) {
        const auto found = before_->pages.find(page);
        if (found == before_->pages.end()) return;
        const Touched::Bytes& theirs = found->second[cell];
        if (theirs.written & bytes) does = "write";
        else if (kind & kWrite && theirs.read & bytes) does = "read";
        else return;
    }
    if (agent.order->seen[uint32_t(before_slot_)] || agent.order->via[kCopyArrived][uint32_t(before_slot_)]) return;
    if (findings_.again(Check::GridDependency, agent.row, -1)) return;
    SimError error(Check::GridDependency, std::string("data race in global memory: the grid before, which may still run, may ") + does +
                                   " it; needs griddepcontrol.wait before this access");
    error.place = {agent.row, agent.cta, agent.warp, agent.lane < 0 ? 0 : 1u << agent.lane};
    findings_.note(std::move(error));
}

std::shared_ptr<Touched> Races::touched() const {
    auto all = before_ && !has_waited_ ? std::make_shared<Touched>(*before_) : std::make_shared<Touched>();
    for (const auto& [page, cells] : pages_) {
        auto& bytes = all->pages[page];
        for (size_t i = 0; i < cells.size(); ++i) {
            for (const Access& write : cells[i].writes)
                if (write.epoch) bytes[i].written |= write.bytes;
            for (const Access& read : cells[i].reads)
                if (read.epoch) bytes[i].read |= read.bytes;
        }
    }
    return all;
}

void Races::forget_shared(Cta& cta, uint32_t offset, uint32_t bytes) {
    if (!enabled || cta.races.empty()) return;
    cta.races.forget(offset / 4, (offset + bytes + 3) / 4 - offset / 4);
}

}  // namespace warpcheck
