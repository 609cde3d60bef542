// Asynchronous operations: their order, the execution of their steps, and the order that their completion gives.
#include <utility>

#include "engine.hpp"

namespace warpcheck {
namespace {

// Flags in the slot keys of a thread: MMAs of one accumulator, and its bulk stores.
constexpr uint64_t kChain = uint64_t(1) << 59;      // MMAs with one accumulator
constexpr uint64_t kBulkReads = uint64_t(1) << 61, kBulkWrites = uint64_t(1) << 60;

}  // namespace

uint32_t Engine::slot_of(uint64_t key) {
    const auto found = kept_slots_.find(key);
    return found != kept_slots_.end() ? found->second : kept_slots_.emplace(key, races_.new_slot()).first->second;
}

// Creates an operation without clock slots. `twin`: operation of another lane by the same instruction; both have the
// same order.
AsyncPtr Engine::begin_op(Exec& x, const char* name, const AsyncPtr& twin) {
    auto op = std::make_shared<AsyncOp>();
    op->name = name;
    op->place = current_;
    op->place.lanes = x.mask;
    op->cta = x.w.cta;
    if (!races_.enabled) return op;
    if (twin) {
        op->order = twin->order;
        return op;
    }
    WarpClock& clock = x.w.clock;
    op->order = clock.order;
    clock.add_held(op->order, x.mask, true);
    clock.stamp(op->order, x.mask);
    clock.epoch = races_.next_epoch(clock.slot);
    return op;
}

void Engine::take_epochs(AsyncOp& op, uint32_t slot, uint32_t write_slot) {
    op.slot = slot, op.write_slot = write_slot;
    op.epoch = races_.next_epoch(slot);
    op.write_epoch = races_.next_epoch(write_slot);
    races_.owns(slot, op.epoch, op.place.cta);
    races_.owns(write_slot, op.write_epoch, op.place.cta);
}

AsyncPtr Engine::make_op(Exec& x, const char* name, uint64_t pipe) {
    AsyncPtr op = begin_op(x, name);
    op->pipe = pipe;
    op->keeps_slots = pipe != 0;
    if (!races_.enabled) return op;
    const uint32_t slot = pipe ? slot_of(pipe) : races_.take_slot(op->order);
    take_epochs(*op, slot, slot);
    return op;
}

// Creates a tcgen05 operation of one thread. In practice a thread's operations execute in order. ISA 9.7.16.6.2
// guarantees the order of some pairs only: an MMA after an MMA with the same accumulator and shape (`chain`), and after
// copies and shifts; a shift after MMAs; a commit after everything that it tracks. Under `order_by_letter`, other pairs
// may complete in any order.
AsyncPtr Engine::make_tensor_op(Exec& x, const char* name, int lane, TensorKind kind, uint32_t group, std::array<uint32_t, 2> chain) {
    const uint64_t thread = pipe_key(x.w, lane);
    if (!config_.order_by_letter) return make_op(x, name, thread);
    TensorIssue& issue = issued_[thread];
    uint64_t key = 0;
    if (kind == TensorKind::Mma) {
        uint64_t& known = issue.chains[chain];
        if (!known) known = kChain | ++next_chain_;
        key = known;
    }
    AsyncPtr op = make_op(x, name, key);
    races_.same_issuer(op->slot, thread);
    const auto after = [&](TensorKind other) {
        TensorIssue::Kind& earlier = issue.kinds[group - 1][int(other)];
        auto& open = earlier.open;
        open.erase(std::remove_if(open.begin(), open.end(), [](const AsyncPtr& o) { return o->next == 0 && o->steps.empty(); }), open.end());
        op->before.insert(op->before.end(), open.begin(), open.end());
        op->order.join(earlier.done);
        op->order.via[kTensor].join(earlier.done.via[kTensor]);
    };
    if (kind != TensorKind::Mma && kind != TensorKind::Copy) after(TensorKind::Mma);
    if (kind == TensorKind::Mma || kind == TensorKind::Commit) after(TensorKind::Copy);
    if (kind != TensorKind::Shift) after(TensorKind::Shift);
    if (kind != TensorKind::Commit) {
        TensorIssue::Kind& mine = issue.kinds[group - 1][int(kind)];
        mine.open.push_back(op);
        if (races_.enabled) {
            mine.done.join(completion(*op));
            mine.done.via[kTensor].join(op->order.via[kTensor]);
            mine.done.via[kTensor].set(op->slot, op->epoch);
        }
    }
    return op;
}

// Creates a bulk store of a thread. A wait covers all stores before a group, so the stores of a thread share two slots:
// one for their reads (wait_group.read), one for their writes. `twin`: store of another lane by the same instruction;
// both are one agent, so they cannot race with each other.
AsyncPtr Engine::make_bulk_store(Exec& x, const char* name, int lane, const AsyncPtr& twin) {
    AsyncPtr op = begin_op(x, name, twin);
    op->keeps_slots = true;
    if (!races_.enabled) return op;
    if (twin) op->slot = twin->slot, op->epoch = twin->epoch, op->write_slot = twin->write_slot, op->write_epoch = twin->write_epoch;
    else take_epochs(*op, slot_of(pipe_key(x.w, lane) | kBulkReads), slot_of(pipe_key(x.w, lane) | kBulkWrites));
    return op;
}

Agent Engine::agent(const AsyncOp& op, bool write) const {
    const uint32_t slot = write ? op.write_slot : op.slot, epoch = write ? op.write_epoch : op.epoch;
    const uint32_t self_from = op.pipe ? 1 : slot == op.slot ? op.epoch : op.write_epoch;
    return {&op.order, slot, epoch, self_from, op.place.row, op.place.cta, int16_t(op.place.warp), op.async_proxy};
}

Order Engine::completion(const AsyncOp& op, bool reads_only) const {
    Order order;
    if (!races_.enabled) return order;
    order = op.order;
    order.seen.set(op.slot, op.epoch);
    if (!reads_only) order.seen.set(op.write_slot, op.write_epoch);
    return order;
}

// Order that the complete-tx of a copy gives: the copy's own accesses, but not earlier accesses or waits of its thread
// (ISA 8.9.1.1). Earlier operations in the same slot are included as well, so some races that the ISA allows are not
// found.
Order Engine::own_accesses(const AsyncOp& op) const {
    Order order;
    if (!races_.enabled) return order;
    order.seen.set(op.slot, op.epoch);
    order.seen.set(op.write_slot, op.write_epoch);
    return order;
}

void Engine::join_completed(Warp& w, const AsyncOp& op, bool reads_only, uint32_t lanes) {
    if (!races_.enabled) return;
    races_.acquire(w.clock, completion(op, reads_only), lanes);
    w.clock.order.via[kTensor].set(op.slot, op.epoch);
    if (!reads_only) w.clock.order.via[kTensor].set(op.write_slot, op.write_epoch);
}

// Order after a thread has waited for a bulk store.
void Engine::join_store(Warp& w, const AsyncOp& op, bool reads_only, uint32_t lanes) {
    join_completed(w, op, reads_only, lanes);
    if (!races_.enabled) return;
    Clock& waited = w.clock.order.via[kCopyWaited];
    waited.join(op.order.via[kAsyncShared]);
    waited.set(op.slot, op.epoch);
    if (!reads_only) waited.set(op.write_slot, op.write_epoch);
}

void Engine::submit(const AsyncPtr& op) {
    effect();
    if (op->pipe)
        for (auto& p : pipes_)
            if (p->key == op->pipe) {
                // Later operations of a pipe execute after earlier ones.
                if (races_.enabled) op->order.join(p->ops.back()->order);
                p->ops.push_back(op);
                return;
            }
    auto pipe = std::make_unique<Pipe>();
    pipe->key = op->pipe;
    pipe->ops.push_back(op);
    pipes_.push_back(std::move(pipe));
}

void Engine::advance(AsyncOp& op) {
    const Place old = current_;
    AsyncOp* const outer = advancing_;
    for (const AsyncPtr& earlier : std::exchange(op.before, {})) force(*earlier);
    current_ = op.place;
    advancing_ = &op;
    try {
        op.steps[op.next]();
    } catch (const SimError& error) {
        skip(error);
    } catch (const UnitError& error) {
        skip(named(error));
    }
    advancing_ = outer;
    ++op.next;
    current_ = old;
    effect();
    mix(uint64_t(op.place.row) << 20 | op.next << 16 | uint64_t(op.place.cta));
    if (config_.trace) trace.push_back({time_, op.place.cta, -1, op.place.row, uint32_t(op.next), op.name});
    if (op.done()) {
        if (races_.enabled && !op.keeps_slots) races_.give_slot(op.slot);
        op.steps.clear();
        op.next = 0;
    }
}

void Engine::force(AsyncOp& op, size_t steps) {
    if (op.pipe) {
        for (auto& p : pipes_) {
            if (p->key != op.pipe) continue;
            for (AsyncPtr& other : p->ops) {
                while (!other->done() && (other.get() != &op || other->next < steps)) advance(*other);
                if (other.get() == &op) return;
            }
        }
        return;
    }
    while (!op.done() && op.next < steps) advance(op);
}

void Engine::fire(size_t index) {
    Pipe& pipe = *pipes_[index];
    while (!pipe.ops.empty() && pipe.ops.front()->done()) pipe.ops.pop_front();
    if (!pipe.ops.empty()) {
        const AsyncPtr op = pipe.ops.front();
        advance(*op);
    }
    while (!pipe.ops.empty() && pipe.ops.front()->done()) pipe.ops.pop_front();
    if (pipe.ops.empty()) pipes_.erase(pipes_.begin() + long(index));
}

// Completes all pending operations of a CTA that retires.
void Engine::drain(const Cta& cta) {
    for (size_t i = 0; i < pipes_.size();) {
        Pipe& pipe = *pipes_[i];
        const bool mine = !pipe.ops.empty() && pipe.ops.front()->cta->cluster == cta.cluster;
        if (!mine) {
            ++i;
            continue;
        }
        while (!pipe.ops.empty()) {
            const AsyncPtr op = pipe.ops.front();
            while (!op->done()) advance(*op);
            pipe.ops.pop_front();
        }
        pipes_.erase(pipes_.begin() + long(i));
    }
}

}  // namespace warpcheck
