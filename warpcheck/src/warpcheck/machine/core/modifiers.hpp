// The modifiers and immediates of every operation, named once. A record here is what `Lowering.emit` takes as keywords
// (a bool, an int, or an enumerator by name; what is not given is false, 0, or the first enumerator) and what the
// engine reads with `in.as<mod::...>()`. A new operation is a line of FA4_OPS, with a record of FA4_RECORDS.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "enumerations.hpp"

// clang-format off
#define FA4_NONE(F)
/* arithmetic and logic */
#define FA4_INTEGER(F) F(bool, sat) F(bool, relu) F(bool, shiftamt) F(bool, wrap)
#define FA4_CARRY(F) F(bool, reads) F(bool, writes)
#define FA4_DOT(F) F(bool, high)
#define FA4_LOGIC(F) F(int, table) F(Boolean, boolean)
#define FA4_PERMUTE(F) F(Permutation, mode)
#define FA4_COMPARE(F) F(Comparison, comparison) F(Boolean, boolean) F(bool, ftz)
#define FA4_SELECT(F) F(bool, ftz)
#define FA4_CONVERT(F) F(Round, rounding) F(bool, integral) F(bool, ftz) F(bool, sat) F(bool, satfinite) F(bool, relu)
#define FA4_PACK_INTEGERS(F) F(int, bits)
#define FA4_WINDOW(F) F(Space, space)
#define FA4_FLOAT(F) F(Round, rounding) F(bool, ftz) F(bool, sat) F(bool, relu) F(bool, nan) F(bool, xorsign)
#define FA4_TEST(F) F(FloatProperty, property)
/* control and warp */
#define FA4_BRANCH(F) F(int, target)
#define FA4_REGISTERS(F) F(int, registers) F(bool, grows)
#define FA4_SHUFFLE(F) F(ShuffleMode, mode)
#define FA4_VOTE(F) F(VoteMode, mode)
#define FA4_REDUX(F) F(ReduceOp, operation) F(bool, abs) F(bool, nan)
#define FA4_TIME(F) F(Timer, timer)
/* memory: offsets are bytes that are added to an address operand */
#define FA4_ACCESS(F) F(Space, space) F(int, count) F(int, offset) F(Semantics, semantics) F(Scope, scope)
#define FA4_ATOMIC(F) FA4_ACCESS(F) F(AtomicOp, operation)
#define FA4_ASYNC_STORE(F) F(int, count) F(int, offset) F(int, barrier_offset) F(AtomicOp, operation)
#define FA4_BULK_FILL(F) F(Space, space) F(int, offset)
#define FA4_FENCE(F) F(Semantics, semantics) F(Scope, scope) F(bool, barrier_init)
#define FA4_PROXY_FENCE(F) F(ProxyKind, kind) F(bool, global) F(bool, shared) F(Semantics, semantics)
#define FA4_MATRIX(F) F(MatrixShape, shape) F(int, count) F(bool, trans) F(Space, space) F(int, offset)
#define FA4_MMA_SYNC(F) \
    F(int, m) F(int, n) F(int, k) F(MmaType, d_type) F(MmaType, a_type) F(MmaType, b_type) F(MmaType, c_type) F(bool, satfinite) \
    F(bool, a_columns) F(bool, b_rows) F(bool, containers) F(int, a_registers) F(int, b_registers) F(int, c_registers)
#define FA4_MAP_FIELD(F) F(TensorMapField, field) F(int, ordinal) F(Space, space) F(int, offset)
#define FA4_MAP_COPY(F) F(int, bytes) F(int, to_offset) F(int, from_offset)
/* barriers; strong: .release or .acquire, not .relaxed */
#define FA4_NAMED_BARRIER(F) F(BarrierReduction, reduction)
#define FA4_CLUSTER_BARRIER(F) F(bool, strong)
#define FA4_MBARRIER(F) F(Space, space) F(int, offset) F(bool, strong) F(bool, expect_tx) F(bool, parity)
/* asynchronous copies */
#define FA4_CP_ASYNC(F) F(int, bytes) F(int, to_offset) F(int, from_offset) F(CopySource, source)
#define FA4_CP_ASYNC_WAIT(F) F(int, keep) F(bool, all)
#define FA4_CP_ASYNC_BARRIER(F) F(Space, space) F(int, offset) F(bool, noinc)
#define FA4_BULK(F) F(int, to_offset) F(int, from_offset) F(int, barrier_offset) F(bool, multicast) F(ReduceOp, operation) F(bool, byte_mask)
#define FA4_BULK_WAIT(F) F(int, keep) F(bool, read)
#define FA4_TENSOR_COPY(F) F(int, rank) F(int, offset) F(int, barrier_offset) F(bool, multicast) F(bool, pair) F(bool, four) F(ReduceOp, operation)
#define FA4_TRY_CANCEL(F) F(int, offset) F(int, barrier_offset) F(bool, multicast)
#define FA4_FIRST_CTAID(F) F(int, axis)    /* -1: all */
/* tensor cores; group: CTAs of cta_group */
#define FA4_TMEM_ALLOC(F) F(int, group) F(int, offset) F(Space, space)
#define FA4_TMEM_GROUP(F) F(int, group)
#define FA4_TMEM_MOVE(F) F(TmemShape, shape) F(int, repeat) F(bool, pack16) F(int, offset) F(int, split)
#define FA4_TMEM_WAIT(F) F(bool, stores)
#define FA4_TMEM_FENCE(F) F(bool, after)
#define FA4_TMEM_COPY(F) F(int, group) F(int, offset) F(TmemCopyShape, shape) F(TmemCopyFormat, format)
#define FA4_TMEM_SHIFT(F) F(int, group) F(int, offset)
#define FA4_UMMA(F) \
    F(int, group) F(MmaKind, kind) F(bool, a_in_tmem) F(bool, stationary) F(bool, lanes) F(int, scale_vector) F(int, scale_d) \
    F(int, d_offset) F(int, a_offset)
#define FA4_UMMA_COMMIT(F) F(int, group) F(int, offset) F(Space, space)
#define FA4_WGMMA(F) \
    F(int, n) F(MmaType, d_type) F(MmaType, a_type) F(MmaType, b_type) F(bool, a_in_registers) F(bool, negate_a) F(bool, negate_b) \
    F(bool, a_mn_major) F(bool, b_mn_major) F(bool, satfinite)
#define FA4_WGMMA_WAIT(F) F(int, keep)

#define FA4_RECORDS(R) \
    R(None, FA4_NONE) R(Integer, FA4_INTEGER) R(Carry, FA4_CARRY) R(Dot, FA4_DOT) R(Logic, FA4_LOGIC) R(Permute, FA4_PERMUTE) \
    R(Compare, FA4_COMPARE) R(Select, FA4_SELECT) R(Convert, FA4_CONVERT) R(PackIntegers, FA4_PACK_INTEGERS) R(Window, FA4_WINDOW) \
    R(Float, FA4_FLOAT) R(Test, FA4_TEST) R(Branch, FA4_BRANCH) R(Registers, FA4_REGISTERS) R(Shuffle, FA4_SHUFFLE) R(Vote, FA4_VOTE) \
    R(Redux, FA4_REDUX) R(Time, FA4_TIME) R(Access, FA4_ACCESS) R(Atomic, FA4_ATOMIC) R(AsyncStore, FA4_ASYNC_STORE) \
    R(BulkFill, FA4_BULK_FILL) R(Fence, FA4_FENCE) R(ProxyFence, FA4_PROXY_FENCE) R(Matrix, FA4_MATRIX) R(MmaSync, FA4_MMA_SYNC) \
    R(MapField, FA4_MAP_FIELD) R(MapCopy, FA4_MAP_COPY) R(NamedBarrier, FA4_NAMED_BARRIER) R(ClusterBarrier, FA4_CLUSTER_BARRIER) \
    R(Mbarrier, FA4_MBARRIER) R(CpAsync, FA4_CP_ASYNC) R(CpAsyncWait, FA4_CP_ASYNC_WAIT) R(CpAsyncBarrier, FA4_CP_ASYNC_BARRIER) \
    R(Bulk, FA4_BULK) R(BulkWait, FA4_BULK_WAIT) R(TensorCopy, FA4_TENSOR_COPY) R(TryCancel, FA4_TRY_CANCEL) R(FirstCtaid, FA4_FIRST_CTAID) \
    R(TmemAlloc, FA4_TMEM_ALLOC) R(TmemGroup, FA4_TMEM_GROUP) R(TmemMove, FA4_TMEM_MOVE) R(TmemWait, FA4_TMEM_WAIT) \
    R(TmemFence, FA4_TMEM_FENCE) R(TmemCopy, FA4_TMEM_COPY) R(TmemShift, FA4_TMEM_SHIFT) R(Umma, FA4_UMMA) \
    R(UmmaCommit, FA4_UMMA_COMMIT) R(Wgmma, FA4_WGMMA) R(WgmmaWait, FA4_WGMMA_WAIT)

// Every operation and the record of its modifiers. The order matters where the engine asks for a range of operations.
#define FA4_OPS(X) \
    /* moves and bits */ \
    X(mov, None) X(pack, None) X(unpack, None) X(add, Integer) X(sub, Integer) X(mul_lo, Integer) X(mul_hi, Integer) X(mul_wide, Integer) \
    X(mad_lo, Integer) X(mad_hi, Integer) X(mad_wide, Integer) X(mul24_lo, Integer) X(mul24_hi, Integer) X(sad, Integer) X(div, Integer) \
    X(rem, Integer) X(abs, Integer) X(neg, Integer) X(min, Integer) X(max, Integer) X(popc, Integer) X(clz, Integer) X(bfind, Integer) \
    X(brev, Integer) X(bfe, Integer) X(bfi, Integer) X(szext, Integer) X(bmsk, Integer) X(dp4a, Dot) X(dp2a, Dot) X(addc, Carry) \
    X(subc, Carry) X(madc_lo, Carry) X(madc_hi, Carry) X(fns, Integer) \
    X(and_, Integer) X(or_, Integer) X(xor_, Integer) X(not_, Integer) X(cnot, Integer) X(shl, Integer) X(shr, Integer) X(shf_l, Integer) \
    X(shf_r, Integer) X(lop3, Logic) X(prmt, Permute) \
    X(setp, Compare) X(set, Compare) X(selp, None) X(slct, Select) X(cvt, Convert) X(cvt_pack, Convert) X(cvt_unpack, Convert) \
    X(cvt_pack_int, PackIntegers) X(isspacep, Window) X(to_generic, Window) X(from_generic, Window) \
    /* floating point */ \
    X(fadd, Float) X(fsub, Float) X(fmul, Float) X(ffma, Float) X(fdiv, Float) X(fmin, Float) X(fmax, Float) X(fabs, Float) X(fneg, Float) \
    X(rcp, Float) X(sqrt, Float) X(rsqrt, Float) X(sin, Float) X(cos, Float) X(lg2, Float) X(ex2, Float) X(tanh, Float) X(copysign, Float) \
    X(testp, Test) \
    /* control */ \
    X(bra, Branch) X(brx, Branch) X(exit, None) X(trap, None) X(nop, None) X(nanosleep, None) X(setmaxnreg, Registers) \
    /* warp */ \
    X(shfl, Shuffle) X(vote, Vote) X(ballot, None) X(match_any, None) X(match_all, None) X(activemask, None) X(elect, None) X(redux, Redux) \
    X(warpsync, None) X(clock, Time) \
    /* memory */ \
    X(ld, Access) X(st, Access) X(atom, Atomic) X(red, Atomic) X(fence, Fence) X(fence_proxy, ProxyFence) X(prefetch, None) \
    X(createpolicy, None) X(mapa, None) X(getctarank, None) \
    X(ldmatrix, Matrix) X(stmatrix, Matrix) X(movmatrix, None) X(mma_sync, MmaSync) X(st_async, AsyncStore) X(red_async, AsyncStore) \
    X(st_bulk, BulkFill) X(tensormap_replace, MapField) X(tensormap_cp, MapCopy) \
    /* barriers */ \
    X(bar_sync, None) X(bar_arrive, None) X(bar_red, NamedBarrier) X(cluster_arrive, ClusterBarrier) X(cluster_wait, ClusterBarrier) \
    X(mbar_init, Mbarrier) X(mbar_inval, Mbarrier) X(mbar_arrive, Mbarrier) X(mbar_arrive_drop, Mbarrier) X(mbar_expect_tx, Mbarrier) \
    X(mbar_complete_tx, Mbarrier) X(mbar_test_wait, Mbarrier) X(mbar_try_wait, Mbarrier) X(mbar_pending_count, None) \
    /* asynchronous copies */ \
    X(cp_async, CpAsync) X(cp_async_commit, None) X(cp_async_wait, CpAsyncWait) X(cp_async_mbar, CpAsyncBarrier) \
    X(bulk_g2s, Bulk) X(bulk_s2g, Bulk) X(bulk_s2s, Bulk) X(bulk_red, Bulk) X(bulk_red_s2s, Bulk) X(bulk_commit, None) X(bulk_wait, BulkWait) \
    X(tma_load, TensorCopy) X(tma_store, TensorCopy) X(tma_red, TensorCopy) \
    X(griddep_wait, None) X(griddep_launch, None) X(clc_try_cancel, TryCancel) X(clc_is_canceled, None) X(clc_first_ctaid, FirstCtaid) \
    /* tensor cores */ \
    X(tmem_alloc, TmemAlloc) X(tmem_dealloc, TmemGroup) X(tmem_relinquish, TmemGroup) X(tmem_ld, TmemMove) X(tmem_st, TmemMove) \
    X(tmem_wait, TmemWait) X(tmem_fence, TmemFence) X(tmem_cp, TmemCopy) X(tmem_shift, TmemShift) X(umma, Umma) X(umma_commit, UmmaCommit) \
    X(wgmma_fence, None) X(wgmma, Wgmma) X(wgmma_commit, None) X(wgmma_wait, WgmmaWait)
// clang-format on

namespace fa4 {

enum class Op : uint16_t {
#define X(name, record) name,
    FA4_OPS(X)
#undef X
        count
};

namespace mod {

enum class Record : uint8_t {
#define R(Name, fields) Name,
    FA4_RECORDS(R)
#undef R
};

// A field takes a number only if it holds it.
template <class T>
T field_from(int64_t value) {
    const T field = T(value);
    if (int64_t(field) != value) throw std::out_of_range("a modifier of an instruction is " + std::to_string(value) + ", which its field cannot hold");
    return field;
}

#define F(type, name) type name;
#define R(Name, fields) \
    struct Name { \
        static constexpr Record kRecord = Record::Name; \
        fields(F) \
    };
FA4_RECORDS(R)
#undef R
#undef F

inline constexpr Record kRecordOf[] = {
#define X(name, record) Record::record,
    FA4_OPS(X)
#undef X
};

// Room for any of the records.
struct Modifiers {
    alignas(4) unsigned char bytes[64] = {};

    // `values` in the order of the record's fields.
    void set(Record record, const std::vector<int64_t>& values) {
        size_t used = 0;
        const auto next = [&] { return used < values.size() ? values[used++] : throw std::out_of_range("too few modifiers of an instruction"); };
        (void)next;
        switch (record) {
#define F(type, name) fields.name = field_from<type>(next());
#define R(Name, list) \
    case Record::Name: { \
        static_assert(sizeof(Name) <= sizeof bytes); \
        Name fields{}; \
        list(F) \
        std::memcpy(bytes, &fields, sizeof fields); \
        break; \
    }
            FA4_RECORDS(R)
#undef R
#undef F
        }
        if (used != values.size()) throw std::out_of_range("too many modifiers of an instruction");
    }
};

}  // namespace mod
}  // namespace fa4
