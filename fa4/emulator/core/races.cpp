#include "races.hpp"

#include "state.hpp"

namespace fa4 {
namespace {

constexpr size_t kIdleSlots = 64;   // slots rest a while before another agent takes them
const char* const kSpaces[] = {"global memory", "shared memory", "tensor memory"};

bool ordered(const Access& prior, const Agent& agent) {
    if (prior.slot == agent.slot && prior.epoch >= agent.self_from && prior.epoch <= agent.epoch) return true;
    return prior.epoch <= agent.order->seen[prior.slot];
}

}  // namespace

uint32_t Races::take_slot() {
    if (free_.size() > kIdleSlots) {
        const uint32_t slot = free_.front();
        free_.pop_front();
        return slot;
    }
    epochs_.push_back(0);
    return uint32_t(epochs_.size() - 1);
}

void Races::start(WarpClock& clock) {
    if (!enabled) return;
    clock.slot = take_slot();
    clock.epoch = clock.self_from = next_epoch(clock.slot);
}

void Races::release(WarpClock& clock, Order& to) {
    if (!enabled) return;
    to.join(clock.order);
    to.seen.set(clock.slot, clock.epoch);
    clock.epoch = next_epoch(clock.slot);
}

void Races::acquire(WarpClock& clock, const Order& from) {
    if (enabled) clock.order.join(from);
}

void Races::proxy_fence(WarpClock& clock, int spaces) {
    if (!enabled) return;
    for (int i = 0; i < 2; ++i) {
        if (!(spaces & (i ? 6 : 1))) continue;
        clock.order.proxied[i].join(clock.order.seen);
        clock.order.proxied[i].set(clock.slot, clock.epoch);
    }
    clock.epoch = next_epoch(clock.slot);
}

void Races::fence(WarpClock& clock, int semantics) {
    if (!enabled) return;
    if (semantics & 2 && clock.has_observed) clock.order.join(clock.observed);
    if (semantics & 4) {
        clock.has_fenced = true;
        release(clock, clock.fenced);
    }
}

void Races::flag_write(WarpClock& clock, uint64_t key, int semantics) {
    if (!enabled) return;
    if (semantics & 4) release(clock, flags_[key]);
    else if (clock.has_fenced) flags_[key].join(clock.fenced);
}

void Races::flag_read(WarpClock& clock, uint64_t key, int semantics) {
    if (!enabled) return;
    const auto found = flags_.find(key);
    if (found == flags_.end()) return;
    if (semantics & 2) clock.order.join(found->second);
    else clock.observed.join(found->second), clock.has_observed = true;
}

void Races::report(const Access& prior, const Agent& agent, uint8_t kind, int space, bool proxy) {
    const auto name = [](uint8_t k) {
        return std::string(k & kAsync ? "asynchronous " : "") + (k & kAtomic ? "atomic " : "") + (k & kWrite ? "write" : "read");
    };
    std::string text = std::string("data race in ") + kSpaces[space] + ": " + name(kind) + " against an earlier " + name(prior.kind);
    text += proxy ? "; needs fence.proxy.async between the generic write and the asynchronous access"
                  : "; no synchronisation orders the two";
    SimError error("DataRace", text);
    error.place = {agent.row, agent.cta, agent.warp, 0};
    error.others.push_back({"the other access (" + name(prior.kind) + ")", {prior.row, prior.cta, prior.warp, 0}});
    throw error;
}

void Races::compare(const Access& prior, const Agent& agent, uint16_t bytes, uint8_t kind, int space) {
    if (!prior.epoch || !(prior.bytes & bytes) || !((prior.kind | kind) & kWrite)) return;
    if (prior.kind & kind & kAtomic) return;
    if (!ordered(prior, agent)) report(prior, agent, kind, space, false);
    // Writing by the generic proxy, then touching by the async proxy: visible only through a proxy fence.
    if (space < 2 && agent.async && !(prior.kind & kAsync) && (prior.kind & kWrite) &&
        prior.epoch > agent.order->proxied[space][prior.slot])
        report(prior, agent, kind, space, true);
}

template <class C>
void Races::touch(C& cell, const Agent& agent, uint16_t bytes, uint8_t kind, int space) {
    const Access now{agent.slot, agent.epoch, agent.row, agent.cta, agent.warp, bytes, kind};
    for (const Access& write : cell.writes) compare(write, agent, bytes, kind, space);
    if (kind & kWrite) {
        for (Access& read : cell.reads) {
            compare(read, agent, bytes, kind, space);
            if (!(read.bytes & ~bytes)) read.epoch = 0;
        }
        for (Access& write : cell.writes)
            if (!(write.bytes & ~bytes)) write.epoch = 0;
        cell.writes[cell.writes[0].epoch && !cell.writes[1].epoch] = now;
        return;
    }
    // A read replaces an earlier one that it is ordered after; the last slot takes the rest.
    for (Access& read : cell.reads) {
        if (!read.epoch || (ordered(read, agent) && !(read.bytes & ~bytes))) {
            read = now;
            return;
        }
    }
    cell.reads[(agent.slot + agent.epoch) % C::readers] = now;
}

void Races::global(const Agent& agent, uint64_t address, uint32_t bytes, uint8_t kind) {
    if (!enabled) return;
    if (agent.async) kind |= kAsync;
    while (bytes) {
        const uint64_t page = address / kPage;
        auto& cells = pages_[page];
        if (cells.empty()) cells.resize(kPage / kGlobalCell);
        const uint32_t in_page = uint32_t(address % kPage);
        uint32_t part = std::min<uint32_t>(bytes, kPage - in_page), at = in_page;
        address += part;
        bytes -= part;
        while (part) {
            const uint32_t first = at % kGlobalCell, n = std::min<uint32_t>(part, kGlobalCell - first);
            touch(cells[at / kGlobalCell], agent, uint16_t(((1u << n) - 1) << first), kind, 0);
            at += n;
            part -= n;
        }
    }
}

void Races::shared(const Agent& agent, Cta& cta, uint32_t offset, uint32_t bytes, uint8_t kind) {
    if (!enabled) return;
    if (agent.async) kind |= kAsync;
    auto& cells = cta.races.cells;
    if (cells.empty()) cells.resize(cta.shared.size() / 4 + 1);
    while (bytes) {
        const uint32_t first = offset % 4, n = std::min(bytes, 4 - first);
        touch(cells[offset / 4], agent, uint16_t(((1u << n) - 1) << first), kind, 1);
        offset += n;
        bytes -= n;
    }
}

void Races::tmem(const Agent& agent, Sm& sm, const TmemRect& rect, uint8_t kind) {
    if (!enabled) return;
    auto& cells = sm.races.cells;
    if (cells.empty()) cells.resize(kTmemLanes * kTmemColumns);
    for (uint32_t lane = rect.lane; lane < uint32_t(rect.lane + rect.lanes); ++lane)
        for (uint32_t column = rect.column; column < uint32_t(rect.column + rect.columns); ++column)
            touch(cells[lane * kTmemColumns + column], agent, 1, kind, 2);
}

void Races::forget_shared(Cta& cta, uint32_t offset, uint32_t bytes) {
    if (!enabled || cta.races.cells.empty()) return;
    for (uint32_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) cta.races.cells[i] = {};
}

}  // namespace fa4
