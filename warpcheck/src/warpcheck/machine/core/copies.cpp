// Execution of asynchronous copies (TMA, bulk copies, cp.async, st.async) and of clusterlaunchcontrol. PTX ISA 9.7.9.25
// - 9.7.9.28.
#include "engine.hpp"
#include "lanes.hpp"
#include "tma.hpp"

namespace warpcheck {
namespace {

TmaType reduce_type(Type t) {
    switch (t) {
        case Type::u32: case Type::b32: return TmaType::U32;
        case Type::s32: return TmaType::S32;
        case Type::u64: case Type::b64: return TmaType::U64;
        case Type::s64: return TmaType::S64;
        case Type::f16: return TmaType::F16;
        case Type::bf16: return TmaType::BF16;
        case Type::f32: return TmaType::F32;
        default: return TmaType::F64;
    }
}

// Destination CTA of a multicast, and the CTA whose mbarrier it signals.
struct Target { Cta* cta; Cta* bar_cta; };

void note_box(WarpRecord& record, const TmaRows& rows) {
    record.note(Timed::Box, rows.rows, rows.cut, rows.cut_sectors, rows.sectors, rows.bytes, rows.partial);
}

uint64_t first_address(const std::vector<TmaPiece>& pieces) {
    for (const TmaPiece& p : pieces)
        if (!p.fill) return p.global;
    return 0;
}

}  // namespace

TensorMap Engine::tensor_map(Exec& x, uint64_t address) {
    if (address % 64) fail(Check::Misaligned, "tensor map address " + address_name(address) + " is not a multiple of 64");
    const Span s = resolve(x.w, Space::Generic, address, 128, x.first_lane());
    if (s.space == Space::Global && !s.cta) races_.tensor_map(agent_of(x.w, current_.row), s.address, 128);
    return decode_tensormap(s.data);
}

// ISA 5.5.3.3: elements of a box outside the tensor are filled. If the whole box is outside, an H100 fills it as well
// but also touches the tensor's first bytes: it faulted on a map whose base was below all allocations.
void Engine::check_outside(const TensorMap& map, const std::vector<TmaPiece>& pieces) const {
    const bool outside = std::all_of(pieces.begin(), pieces.end(), [](const TmaPiece& p) { return p.fill; });
    if (config_.check_bounds && outside && !is_allocated(map.base, 16))
        fail(Check::OutOfBounds, "the box of a tensor copy lies wholly outside its tensor, which begins at " + address_name(map.base) +
                                     ", outside every allocation: a chip touches that place");
}

void Engine::tma(Exec& x) {
    const Instr& in = x.in;
    const bool is_load = in.op == Op::tma_load, reduce = in.op == Op::tma_red;
    const mod::TensorCopy& m = in.as<mod::TensorCopy>();
    const bool multicast = m.multicast, pair = m.pair, four = m.four;
    for (uint32_t i = 0; i < 9; ++i)
        if (x.has(i) && (x.mask & ~x.valid(i)) && config_.check_poison) note(Check::Uninitialized, "an operand of a tensor copy was never given a value");
    AsyncPtr twin;
    for_lanes(x.mask, [&](int l) {
        const TensorMap map = tensor_map(x, x.value(1, l));
        if (!four && map.rank != m.rank)
            fail(Check::IllegalInstruction, "the tensor map has rank " + std::to_string(map.rank) + ", the instruction " + std::to_string(m.rank));
        int32_t coords[5] = {};
        for (uint32_t i = 0; i < 5; ++i) coords[i] = x.has(4 + i) ? int32_t(x.value(4 + i, l)) : 0;
        // Stores and reductions with a negative start coordinate are illegal. An H100 raised an illegal-instruction
        // error for each of 42 such boxes, in every dimension, whether the box was wholly or partly outside. Loads are
        // filled.
        if (!is_load && !four)
            for (uint32_t i = 0; i < map.rank; ++i)
                if (coords[i] < 0)
                    fail(Check::IllegalInstruction, "a tensor copy to global memory from coordinate " + std::to_string(coords[i]) + " of dimension " +
                                                        std::to_string(i) + " on: chips store no box that begins before its tensor");
        uint32_t offset;
        Cta& home = shared_cta(x.w, Space::SharedCluster, x.value(0, l) + uint64_t(m.offset), offset);
        if (offset % 128) fail(Check::Misaligned, "shared address " + hex(offset) + " of a tensor copy is not a multiple of 128");
        auto pieces = std::make_shared<std::vector<TmaPiece>>();
        four ? tma_pieces_gather4(map, coords, offset, *pieces) : tma_pieces(map, coords, offset, *pieces);
        const SharedRange range = tma_shared_range(map, offset, is_load);
        uint32_t first = range.offset, last = range.offset + range.bytes;
        for (const TmaPiece& p : *pieces) first = std::min(first, p.shared), last = std::max(last, p.shared + p.bytes);
        if (first < kSharedReserved || last > home.shared.size())
            fail(Check::OutOfBounds, "the box of a tensor copy covers shared bytes " + hex(first) + ".." + hex(last) + ", outside the CTA's shared memory");
        uint32_t bytes = tma_delivered_bytes(map);
        if (four) {
            bytes = 0;
            for (const TmaPiece& p : *pieces) bytes += p.bytes;
        }
        AsyncPtr op = is_load ? make_op(x, "tma load") : make_bulk_store(x, reduce ? "tma reduce" : "tma store", l, twin);
        twin = op;
        AsyncOp* self = op.get();
        if (is_load) {
            uint32_t bar_offset;
            Cta& bar_home = shared_cta(x.w, Space::SharedCluster, x.value(2, l) + uint64_t(m.barrier_offset), bar_offset);
            std::vector<Target> targets;
            Cluster& cluster = *x.w.cta->cluster;
            if (multicast) {
                const uint32_t mask = uint32_t(x.value(3, l));
                for (auto& c : cluster.ctas)
                    if (mask >> c->rank & 1)
                        targets.push_back({c.get(), cluster.ctas[pair ? (c->rank & ~1u) | (bar_home.rank & 1) : c->rank].get()});
            } else {
                targets.push_back({&home, &bar_home});
            }
            if (x.w.timed) {
                const TmaRows rows = four ? tma_rows_gather4(map, coords) : tma_rows(map, coords);
                note_box(*x.w.timed, rows);
                for (const Target& t : targets)
                    x.w.timed->note(Timed::Load, t.cta->linear, t.bar_cta->linear, bar_offset, bytes, int64_t(first_address(*pieces)),
                                    &t == &targets[0] ? int64_t(pieces->size()) : -int64_t(pieces->size()));
            }
            op->steps.push_back([this, self, map, pieces, targets, first, last] {
                check_outside(map, *pieces);
                for (const TmaPiece& p : *pieces)
                    if (!p.fill) {
                        global_span(p.global, p.bytes);
                        races_.global(agent(*self, false), p.global, p.bytes, 0);
                    }
                for (const Target& t : targets) {
                    for (uint32_t i = first & ~7u; i < last; i += 8)
                        if (t.cta->shadow[i] & Cta::kBarrier) {
                            SimError error(Check::BarrierMisuse, "a tensor copy overwrites " + program_.barrier(i));
                            error.barrier = program_.barrier(i);
                            throw error;
                        }
                    races_.shared(agent(*self, true), *t.cta, first, last - first, kWrite);
                    for (const TmaPiece& p : *pieces) tma_load_piece(map, p, p.fill ? nullptr : on_host(p.global), t.cta->shared.data());
                    std::memset(t.cta->shadow.data() + first, Cta::kValid, last - first);
                }
            });
            if (races_.enabled) races_.arrives(op->slot, op->epoch, bar_offset);
            op->steps.push_back([this, self, targets, bar_offset, bytes] {
                for (const Target& t : targets) complete_tx(*t.bar_cta, bar_offset, bytes, *self, own_accesses(*self));
            });
            count_bytes("tma_load", uint64_t(bytes) * targets.size());
        } else {
            auto buffer = std::make_shared<std::vector<uint8_t>>(last - first);
            if (x.w.timed) {
                if (!four) note_box(*x.w.timed, tma_rows(map, coords));
                x.w.timed->note(Timed::Store, l, reduce, bytes, int64_t(first_address(*pieces)), int64_t(pieces->size()));
            }
            op->steps.push_back([this, self, pieces, first, last, buffer, cta = &home] {
                for (const TmaPiece& p : *pieces)
                    if (!p.fill) {
                        races_.shared(agent(*self, false), *cta, p.shared, p.bytes, 0);
                        Span s;
                        s.shadow = cta->shadow.data() + p.shared;
                        s.offset = p.shared;
                        check_defined(s, p.bytes, "a tensor copy to global memory");
                    }
                std::memcpy(buffer->data(), cta->shared.data() + first, last - first);
            });
            op->steps.push_back([this, self, map, pieces, first, buffer, reduce, kind = m.operation] {
                const uint8_t* base = buffer->data() - first;
                for (const TmaPiece& p : *pieces) {
                    if (p.fill) continue;
                    uint8_t* to = global_span(p.global, p.bytes);
                    const Change change = reduce ? Change() : Change{to, base + p.shared};
                    races_.global(agent(*self, true), p.global, p.bytes, uint8_t(kWrite | (reduce ? kAtomic : 0)), change);
                    if (reduce) reduce_bytes(kind, map.type, to, base + p.shared, p.bytes);
                    else tma_store_piece(map, p, base, to);
                }
            });
            x.w.bulk[uint32_t(l)].open.push_back(op);
            count_bytes(reduce ? "tma_reduce" : "tma_store", bytes);
        }
        submit(op);
    });
}

void Engine::bulk(Exec& x) {
    const Instr& in = x.in;
    const mod::Bulk& m = in.as<mod::Bulk>();
    for (uint32_t i = 0; i < 4; ++i)
        if (x.has(i) && (x.mask & ~x.valid(i)) && config_.check_poison) note(Check::Uninitialized, "an operand of a bulk copy was never given a value");
    for_lanes(x.mask, [&](int l) {
        const uint64_t dst = x.value(0, l) + uint64_t(m.to_offset), src = x.value(1, l) + uint64_t(m.from_offset);
        const uint32_t bytes = uint32_t(x.value(2, l));
        if (bytes % 16 || dst % 16 || src % 16)
            fail(Check::Misaligned, "bulk copy of " + std::to_string(bytes) + " bytes from " + address_name(src) + " to " + address_name(dst) + ": all must be multiples of 16");
        if (!bytes) return;
        const bool from_global = in.op == Op::bulk_g2s, to_global = in.op == Op::bulk_s2g || in.op == Op::bulk_red;
        AsyncPtr op = to_global ? make_bulk_store(x, "bulk copy", l, nullptr) : make_op(x, "bulk copy");
        AsyncOp* self = op.get();
        auto buffer = std::make_shared<std::vector<uint8_t>>(bytes);
        const Span from = resolve(x.w, from_global ? Space::Global : Space::Shared, src, bytes, l);
        op->steps.push_back([this, self, from, bytes, buffer] {
            if (from.cta) {
                races_.shared(agent(*self, false), *from.cta, from.offset, bytes, 0);
                check_defined(from, bytes, "a bulk copy");
            } else {
                races_.global(agent(*self, false), from.address, bytes, 0);
            }
            std::memcpy(buffer->data(), from.data, bytes);
        });
        if (to_global) {
            const Span to = resolve(x.w, Space::Global, dst, bytes, l);
            const uint32_t byte_mask = m.byte_mask ? uint32_t(x.value(4, l)) : 0xFFFF;
            const bool reduce = in.op == Op::bulk_red;
            if (x.w.timed) x.w.timed->note(Timed::Store, l, reduce, bytes, int64_t(to.address), 1);
            op->steps.push_back([this, self, to, bytes, buffer, reduce, byte_mask, kind = m.operation, type = reduce_type(in.type)] {
                const bool whole = !reduce && byte_mask == 0xFFFF;
                races_.global(agent(*self, true), to.address, bytes, uint8_t(kWrite | (reduce ? kAtomic : 0)),
                              whole ? Change{to.data, buffer->data()} : Change());
                if (reduce) {
                    reduce_bytes(kind, type, to.data, buffer->data(), bytes);
                } else {
                    for (uint32_t i = 0; i < bytes; ++i)
                        if (byte_mask >> (i % 16) & 1) to.data[i] = (*buffer)[i];
                }
            });
            x.w.bulk[uint32_t(l)].open.push_back(op);
            count_bytes(reduce ? "bulk_reduce" : "bulk_store", bytes);
        } else {
            uint32_t bar_offset, offset;
            Cta& bar_cta = shared_cta(x.w, Space::SharedCluster, x.value(3, l) + uint64_t(m.barrier_offset), bar_offset);
            const Span home = resolve(x.w, Space::SharedCluster, dst, bytes, l);
            offset = home.offset;
            std::vector<Target> targets;
            if (m.multicast) {
                const uint32_t mask = uint32_t(x.value(4, l));
                for (auto& c : x.w.cta->cluster->ctas)
                    if (mask >> c->rank & 1) targets.push_back({c.get(), c.get()});
            } else {
                targets.push_back({home.cta, &bar_cta});
            }
            const bool reduce = in.op == Op::bulk_red_s2s;
            if (x.w.timed)
                for (const Target& t : targets) {
                    if (from_global) x.w.timed->note(Timed::Load, t.cta->linear, t.bar_cta->linear, bar_offset, bytes, int64_t(from.address), &t == &targets[0] ? 1 : -1);
                    else x.w.timed->note(Timed::Put, t.cta->linear, t.bar_cta->linear, bar_offset, bytes);
                }
            op->steps.push_back([this, self, targets, offset, bytes, buffer, reduce, kind = m.operation, type = reduce_type(in.type)] {
                for (const Target& t : targets) {
                    Span s;
                    s.cta = t.cta, s.offset = offset, s.shadow = t.cta->shadow.data() + offset;
                    shared_write_check(s, bytes);
                    races_.shared(agent(*self, true), *t.cta, offset, bytes, uint8_t(kWrite | (reduce ? kAtomic : 0)));
                    uint8_t* to = t.cta->shared.data() + offset;
                    if (reduce) reduce_bytes(kind, type, to, buffer->data(), bytes);
                    else std::memcpy(to, buffer->data(), bytes);
                    std::memset(s.shadow, Cta::kValid, bytes);
                }
            });
            if (races_.enabled) races_.arrives(op->slot, op->epoch, bar_offset);
            op->steps.push_back([this, self, targets, bar_offset, bytes] {
                for (const Target& t : targets) complete_tx(*t.bar_cta, bar_offset, bytes, *self, own_accesses(*self));
            });
            count_bytes(from_global ? "bulk_load" : "bulk_shared", uint64_t(bytes) * targets.size());
        }
        submit(op);
    });
}

void Engine::cp_async(Exec& x) {
    const Instr& in = x.in;
    struct Copy { Span from, to; uint32_t bytes; int8_t lane; };
    auto copies = std::make_shared<std::vector<Copy>>();
    const mod::CpAsync& m = in.as<mod::CpAsync>();
    const uint32_t size = uint32_t(m.bytes);
    for (uint32_t i = 0; i < 2; ++i)
        if ((x.mask & ~x.valid(i)) && config_.check_poison) note(Check::Uninitialized, "an address of cp.async was never given a value");
    for_lanes(x.mask, [&](int l) {
        const uint64_t dst = x.value(0, l) + uint64_t(m.to_offset), src = x.value(1, l) + uint64_t(m.from_offset);
        uint32_t take = size;
        if (m.source == CopySource::Size) take = std::min(size, uint32_t(x.value(2, l)));
        if (m.source == CopySource::Ignore && (x.pred(2) >> l & 1)) take = 0;
        if (dst % size || (take && src % size)) fail(Check::Misaligned, "cp.async from " + address_name(src) + " to " + address_name(dst) + ": not multiples of " + std::to_string(size));
        Copy c;
        c.to = resolve(x.w, Space::Shared, dst, size, l);
        shared_write_check(c.to, size);
        if (take) c.from = resolve(x.w, Space::Generic, src, take, l);
        c.bytes = take, c.lane = int8_t(l);
        copies->push_back(c);
    });
    if (x.w.timed) {
        Coalescer from, to, quarters[4];
        for (const Copy& c : *copies) {
            if (c.bytes) from.add(c.from.address, c.bytes), quarters[c.lane / 8].add(c.from.address, c.bytes);
            to.add(c.to.offset, size);
        }
        int64_t lines = 0;
        for (Coalescer& quarter : quarters) lines += quarter.lines();
        x.w.timed->note(Timed::Global, from.bytes(), from.sectors(), from.first(), 0, lines);
        x.w.timed->note(Timed::Shared, to.bytes(), to.passes(), x.w.cta->linear);
    }
    AsyncPtr op = make_op(x, "cp.async");
    AsyncOp* self = op.get();
    op->async_proxy = false;
    op->steps.push_back([this, self, copies, size] {
        for (const Copy& c : *copies) {
            if (c.bytes) races_.global(agent(*self, false), c.from.address, c.bytes, 0);
            Agent copy = agent(*self, true);
            copy.lane = c.lane;
            races_.shared(copy, *c.to.cta, c.to.offset, size, kWrite | kCopy);
            if (c.bytes) std::memcpy(c.to.data, c.from.data, c.bytes);
            std::memset(c.to.data + c.bytes, 0, size - c.bytes);
            std::memset(c.to.shadow, Cta::kValid, size);
        }
    });
    count_bytes("cp_async", uint64_t(size) * copies->size());
    x.w.copies.open.push_back(op);
    submit(op);
}

// clusterlaunchcontrol.try_cancel: takes over a cluster that has not started. The ISA calls the response opaque, but
// kernels decode it themselves, so it has the format of chips and of the assembler: word 0 holds x of the first CTA,
// word 1 y in the lower and z in the upper half, and bit 0 of word 2 tells success.
void Engine::try_cancel(Exec& x) {
    const mod::TryCancel& m = x.in.as<mod::TryCancel>();
    const int l = x.first_lane();
    uint32_t offset, bar_offset;
    Cta& cta = shared_cta(x.w, Space::SharedCluster, x.value(0, l) + uint64_t(m.offset), offset);
    Cta& bar_cta = shared_cta(x.w, Space::SharedCluster, x.value(1, l) + uint64_t(m.barrier_offset), bar_offset);
    resolve(x.w, Space::SharedCluster, x.value(0, l) + uint64_t(m.offset), 16, l);
    std::vector<Target> targets;
    if (m.multicast) {
        for (auto& c : x.w.cta->cluster->ctas) targets.push_back({c.get(), c.get()});
    } else {
        targets.push_back({&cta, &bar_cta});
    }
    if (x.w.timed)
        for (const Target& t : targets) x.w.timed->note(Timed::Cancel, t.bar_cta->linear, bar_offset);
    AsyncPtr op = make_op(x, "try_cancel");
    AsyncOp* self = op.get();
    op->steps.push_back([this, self, targets, offset] {
        uint32_t words[4] = {};
        if (next_cluster_ < cluster_count_) {
            const uint64_t n = cluster_number(next_cluster_++);
            words[0] = uint32_t(n % cluster_grid_[0]) * config_.cluster[0];
            words[1] = uint32_t(n / cluster_grid_[0] % cluster_grid_[1]) * config_.cluster[1];
            words[1] |= uint32_t(n / cluster_grid_[0] / cluster_grid_[1]) * config_.cluster[2] << 16;
            words[2] = 1;
        }
        for (const Target& t : targets) {
            races_.shared(agent(*self, true), *t.cta, offset, 16, kWrite);
            std::memcpy(t.cta->shared.data() + offset, words, 16);
            std::memset(t.cta->shadow.data() + offset, Cta::kValid, 16);
        }
    });
    op->steps.push_back([this, self, targets, bar_offset] {
        for (const Target& t : targets) complete_tx(*t.bar_cta, bar_offset, 16, *self, own_accesses(*self));
    });
    submit(op);
}

void Engine::st_async(Exec& x) {
    const Instr& in = x.in;
    const bool reduce = in.op == Op::red_async;
    for_lanes(x.mask, [&](int l) {
        const mod::AsyncStore& m = in.as<mod::AsyncStore>();
        const uint32_t n = uint32_t(m.count), size = in.type == Type::b64 || in.type == Type::u64 || in.type == Type::s64 || in.type == Type::f64 ? 8 : 4;
        const Span to = resolve(x.w, Space::SharedCluster, x.value(0, l) + uint64_t(m.offset), n * size, l);
        uint32_t bar_offset;
        Cta& bar_cta = shared_cta(x.w, Space::SharedCluster, x.value(1, l) + uint64_t(m.barrier_offset), bar_offset);
        std::array<uint64_t, 4> values{};
        for (uint32_t i = 0; i < n; ++i) values[i] = x.value(2 + i, l);
        if (x.w.timed) x.w.timed->note(Timed::Put, to.cta->linear, bar_cta.linear, bar_offset, n * size);
        AsyncPtr op = make_op(x, reduce ? "red.async" : "st.async");
        AsyncOp* self = op.get();
        op->steps.push_back([this, self, to, n, size, values, reduce, type = in.type, kind = m.operation] {
            shared_write_check(to, n * size);
            races_.shared(agent(*self, true), *to.cta, to.offset, n * size, uint8_t(kWrite | (reduce ? kAtomic : 0)));
            for (uint32_t i = 0; i < n; ++i) {
                uint64_t v = values[i];
                if (reduce) {
                    uint64_t old = 0;
                    std::memcpy(&old, to.data, size);
                    v = apply_atomic(type, kind, old, v, 0);
                }
                std::memcpy(to.data + i * size, &v, size);
            }
            std::memset(to.shadow, Cta::kValid, n * size);
        });
        // st.async releases (ISA 9.7.9.12). 8.9.1.1 narrows the order of bulk copies only; it does not name st.async.
        op->steps.push_back([this, self, &bar_cta, bar_offset, n, size] { complete_tx(bar_cta, bar_offset, n * size, *self, completion(*self)); });
        submit(op);
    });
}

Next Engine::async_copy(Exec& x) {
    const Instr& in = x.in;
    Warp& w = x.w;
    switch (in.op) {
        case Op::tma_load: case Op::tma_store: case Op::tma_red: tma(x); break;
        case Op::bulk_g2s: case Op::bulk_s2g: case Op::bulk_s2s: case Op::bulk_red: case Op::bulk_red_s2s: bulk(x); break;
        case Op::bulk_commit:
            for_lanes(x.mask, [&](int l) {
                CopyGroups& g = w.bulk[uint32_t(l)];
                g.committed.push_back(std::move(g.open));
                g.open.clear();
            });
            break;
        case Op::bulk_wait:
            for_lanes(x.mask, [&](int l) {
                const auto found = w.bulk.find(uint32_t(l));
                if (found == w.bulk.end()) return;
                auto& groups = found->second.committed;
                const bool read = in.as<mod::BulkWait>().read;
                const size_t keep = size_t(in.as<mod::BulkWait>().keep);
                for (size_t i = 0; i + keep < groups.size(); ++i)
                    for (AsyncPtr& op : groups[i]) {
                        force(*op, read ? 1 : ~size_t(0));
                        join_store(w, *op, read, 1u << l);
                    }
                if (!read)
                    while (groups.size() > keep) groups.pop_front();
                // A later wait for complete writes needs only the last finished group: its order includes the groups
                // before it.
                const auto done = [](const std::vector<AsyncPtr>& group) {
                    return std::all_of(group.begin(), group.end(), [](const AsyncPtr& op) { return op->done(); });
                };
                while (groups.size() > keep + 1 && done(groups[0]) && done(groups[1])) groups.pop_front();
            });
            break;
        case Op::cp_async: cp_async(x); break;
        case Op::cp_async_commit:
            w.copies.committed.push_back(std::move(w.copies.open));
            w.copies.open.clear();
            break;
        case Op::cp_async_wait: {
            auto& g = w.copies;
            const mod::CpAsyncWait& m = in.as<mod::CpAsyncWait>();
            if (m.all) {
                g.committed.push_back(std::move(g.open));
                g.open.clear();
            }
            while (g.committed.size() > size_t(m.keep)) {
                for (AsyncPtr& op : g.committed.front()) {
                    force(*op);
                    races_.acquire_copy(w.clock, op->write_slot, op->write_epoch, x.mask);
                    if (races_.enabled) w.waited_copies.set(op->write_slot, op->write_epoch);
                }
                g.committed.pop_front();
            }
            break;
        }
        case Op::cp_async_mbar: {
            const mod::CpAsyncBarrier& m = in.as<mod::CpAsyncBarrier>();
            std::vector<AsyncPtr> before = w.copies.open;
            for (auto& group : w.copies.committed) before.insert(before.end(), group.begin(), group.end());
            // An arrival tracks the cp.async operations of its own lane (ISA 9.7.13.15.15). It also orders the lane's
            // other earlier accesses in practice: NVIDIA's attention backward stores zeros beside its copies and
            // releases them this way. A strict reading of ISA 8.9.1.1 does not order them.
            for_lanes(x.mask, [&](int l) {
                uint32_t offset;
                Cta& cta = shared_cta(w, m.space, x.value(0, l) + uint64_t(m.offset), offset);
                if (!m.noinc) ++mbarrier(cta, offset).pending;
                if (w.timed) w.timed->arrive(Timed::CopyArrive, cta.linear, offset, 1, !m.noinc);
                AsyncPtr op = make_op(x, "cp.async arrive");
                AsyncOp* self = op.get();
                op->async_proxy = false;
                op->steps.push_back([this, self, before, waited = w.waited_copies, l, lanes = x.mask, &cta, offset] {
                    Order handed;
                    handed.seen.join(waited);
                    for (const AsyncPtr& copy : before) {
                        force(*copy);
                        if (!races_.enabled) continue;
                        if (copy->place.lanes & ~lanes) handed.add({copy->write_slot, copy->write_epoch, 1u << l});
                        else handed.seen.set(copy->write_slot, copy->write_epoch);
                    }
                    config_.check_letter ? handed.lean_on(self->order) : handed.join(self->order);
                    // Whoever waits comes after the arrival itself, too: its slot may be used again.
                    if (races_.enabled) handed.seen.set(self->write_slot, self->write_epoch);
                    arrive(cta, offset, *self, handed);
                });
                submit(op);
            });
            break;
        }
        case Op::griddep_wait: races_.wait_for_grid_before(w.clock); break;
        case Op::griddep_launch: launched_dependents = true; break;
        case Op::clc_try_cancel: try_cancel(x); break;
        case Op::clc_is_canceled: {
            uint32_t r = 0;
            for_lanes(x.mask, [&](int l) { r |= uint32_t(get<uint64_t>(x.src(0) + 64, l) & 1) << l; });
            *x.dst() = (*x.dst() & ~x.mask) | r;
            x.set_valid(0, x.valid(0));
            break;
        }
        case Op::clc_first_ctaid:
            for (uint32_t i = 0; i < in.ndst; ++i) {
                if (!x.has_dst(i)) continue;
                const int first = in.as<mod::FirstCtaid>().axis;
                const uint32_t axis = first < 0 ? i : uint32_t(first);
                for_lanes(x.mask, [&](int l) {
                    const uint64_t first_words = get<uint64_t>(x.src(0), l);
                    x.dst(i)[l] = axis == 0 ? uint32_t(first_words) : axis < 3 ? uint32_t(first_words >> (axis == 1 ? 32 : 48) & 0xFFFF) : 0;
                });
                x.set_valid(i, x.valid(0));
            }
            break;
        case Op::st_async: case Op::red_async: st_async(x); break;
        default: stop(Check::UnknownInstruction, "this asynchronous copy is not modelled");
    }
    return Next::Advance;
}

}  // namespace warpcheck
