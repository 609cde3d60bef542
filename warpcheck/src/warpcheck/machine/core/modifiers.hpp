// Records of the modifiers and immediates of every operation. `Lowering.emit` takes the fields as keywords: a bool, an
// int, or the name of an enumerator; a missing keyword is false, 0, or the first enumerator. The engine reads the
// record by `in.as<mod::...>()`. A new operation is a line of WARPCHECK_OPS, with a record of WARPCHECK_RECORDS.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "enumerations.hpp"

// clang-format off
#define WARPCHECK_NONE(F)
/* arithmetic and logic */
#define WARPCHECK_INTEGER(F) F(bool, sat) F(bool, relu) F(bool, shiftamt) F(bool, wrap)
#define WARPCHECK_CARRY(F) F(bool, reads) F(bool, writes)
#define WARPCHECK_DOT(F) F(bool, high)
#define WARPCHECK_LOGIC(F) F(int, table) F(Boolean, boolean)
#define WARPCHECK_PERMUTE(F) F(Permutation, mode)
#define WARPCHECK_COMPARE(F) F(Comparison, comparison) F(Boolean, boolean) F(bool, ftz)
#define WARPCHECK_SELECT(F) F(bool, ftz)
#define WARPCHECK_CONVERT(F) F(Round, rounding) F(bool, integral) F(bool, ftz) F(bool, sat) F(bool, satfinite) F(bool, relu)
#define WARPCHECK_PACK_INTEGERS(F) F(int, bits)
#define WARPCHECK_WINDOW(F) F(Space, space)
#define WARPCHECK_FLOAT(F) F(Round, rounding) F(bool, ftz) F(bool, sat) F(bool, relu) F(bool, nan) F(bool, xorsign)
#define WARPCHECK_TEST(F) F(FloatProperty, property)
/* control and warp */
#define WARPCHECK_BRANCH(F) F(int, target)
#define WARPCHECK_REGISTERS(F) F(int, registers) F(bool, grows)
#define WARPCHECK_SHUFFLE(F) F(ShuffleMode, mode)
#define WARPCHECK_VOTE(F) F(VoteMode, mode)
#define WARPCHECK_REDUX(F) F(ReduceOp, operation) F(bool, abs) F(bool, nan)
#define WARPCHECK_TIME(F) F(Timer, timer)
/* memory: offsets are bytes that are added to an address operand */
#define WARPCHECK_ACCESS(F) F(Space, space) F(int, count) F(int, offset) F(Semantics, semantics) F(Scope, scope)
#define WARPCHECK_ATOMIC(F) WARPCHECK_ACCESS(F) F(AtomicOp, operation)
#define WARPCHECK_ASYNC_STORE(F) F(int, count) F(int, offset) F(int, barrier_offset) F(AtomicOp, operation)
#define WARPCHECK_BULK_FILL(F) F(Space, space) F(int, offset)
#define WARPCHECK_FENCE(F) F(Semantics, semantics) F(Scope, scope) F(bool, barrier_init)
#define WARPCHECK_PROXY_FENCE(F) F(ProxyKind, kind) F(bool, global) F(bool, shared) F(Semantics, semantics)
#define WARPCHECK_MATRIX(F) F(MatrixShape, shape) F(int, count) F(bool, trans) F(Space, space) F(int, offset)
#define WARPCHECK_MMA_SYNC(F) \
    F(int, m) F(int, n) F(int, k) F(MmaType, d_type) F(MmaType, a_type) F(MmaType, b_type) F(MmaType, c_type) F(bool, satfinite) \
    F(bool, a_columns) F(bool, b_rows) F(bool, containers) F(int, a_registers) F(int, b_registers) F(int, c_registers) \
    F(int, scale_vector) F(ScaleType, scale_type)
#define WARPCHECK_MAP_FIELD(F) F(TensorMapField, field) F(int, ordinal) F(Space, space) F(int, offset)
#define WARPCHECK_MAP_COPY(F) F(int, bytes) F(int, to_offset) F(int, from_offset)
/* barriers; strong: .release or .acquire, not .relaxed */
#define WARPCHECK_NAMED_BARRIER(F) F(BarrierReduction, reduction)
#define WARPCHECK_CLUSTER_BARRIER(F) F(bool, strong)
#define WARPCHECK_MBARRIER(F) F(Space, space) F(int, offset) F(bool, strong) F(Scope, scope) F(bool, expect_tx) F(bool, parity)
/* asynchronous copies */
#define WARPCHECK_CP_ASYNC(F) F(int, bytes) F(int, to_offset) F(int, from_offset) F(CopySource, source)
#define WARPCHECK_CP_ASYNC_WAIT(F) F(int, keep) F(bool, all)
#define WARPCHECK_CP_ASYNC_BARRIER(F) F(Space, space) F(int, offset) F(bool, noinc)
#define WARPCHECK_BULK(F) F(int, to_offset) F(int, from_offset) F(int, barrier_offset) F(bool, multicast) F(ReduceOp, operation) F(bool, byte_mask)
#define WARPCHECK_BULK_WAIT(F) F(int, keep) F(bool, read)
#define WARPCHECK_TENSOR_COPY(F) F(int, rank) F(int, offset) F(int, barrier_offset) F(bool, multicast) F(bool, pair) F(bool, four) F(ReduceOp, operation)
#define WARPCHECK_TRY_CANCEL(F) F(int, offset) F(int, barrier_offset) F(bool, multicast)
#define WARPCHECK_FIRST_CTAID(F) F(int, axis)    /* -1: all */
/* tensor cores; group: CTAs of cta_group */
#define WARPCHECK_TMEM_ALLOC(F) F(int, group) F(int, offset) F(Space, space)
#define WARPCHECK_TMEM_GROUP(F) F(int, group)
/* reduces: one more destination has the extreme, `operation`, of the others */
#define WARPCHECK_TMEM_MOVE(F) \
    F(TmemShape, shape) F(int, repeat) F(bool, pack16) F(int, offset) F(int, split) F(bool, reduces) F(ReduceOp, operation) F(bool, abs) F(bool, nan)
#define WARPCHECK_TMEM_WAIT(F) F(bool, stores)
#define WARPCHECK_TMEM_FENCE(F) F(bool, after)
#define WARPCHECK_TMEM_COPY(F) F(int, group) F(int, offset) F(TmemCopyShape, shape) F(TmemCopyFormat, format)
#define WARPCHECK_TMEM_SHIFT(F) F(int, group) F(int, offset)
#define WARPCHECK_UMMA(F) \
    F(int, group) F(MmaKind, kind) F(bool, a_in_tmem) F(bool, stationary) F(bool, lanes) F(int, scale_vector) F(int, scale_d) \
    F(int, d_offset) F(int, a_offset)
#define WARPCHECK_UMMA_COMMIT(F) F(int, group) F(int, offset) F(Space, space)
#define WARPCHECK_WGMMA(F) \
    F(int, n) F(MmaType, d_type) F(MmaType, a_type) F(MmaType, b_type) F(bool, a_in_registers) F(bool, negate_a) F(bool, negate_b) \
    F(bool, a_mn_major) F(bool, b_mn_major) F(bool, satfinite)
#define WARPCHECK_WGMMA_WAIT(F) F(int, keep)

#define WARPCHECK_RECORDS(R) \
    R(None, WARPCHECK_NONE) R(Integer, WARPCHECK_INTEGER) R(Carry, WARPCHECK_CARRY) R(Dot, WARPCHECK_DOT) R(Logic, WARPCHECK_LOGIC) R(Permute, WARPCHECK_PERMUTE) \
    R(Compare, WARPCHECK_COMPARE) R(Select, WARPCHECK_SELECT) R(Convert, WARPCHECK_CONVERT) R(PackIntegers, WARPCHECK_PACK_INTEGERS) R(Window, WARPCHECK_WINDOW) \
    R(Float, WARPCHECK_FLOAT) R(Test, WARPCHECK_TEST) R(Branch, WARPCHECK_BRANCH) R(Registers, WARPCHECK_REGISTERS) R(Shuffle, WARPCHECK_SHUFFLE) R(Vote, WARPCHECK_VOTE) \
    R(Redux, WARPCHECK_REDUX) R(Time, WARPCHECK_TIME) R(Access, WARPCHECK_ACCESS) R(Atomic, WARPCHECK_ATOMIC) R(AsyncStore, WARPCHECK_ASYNC_STORE) \
    R(BulkFill, WARPCHECK_BULK_FILL) R(Fence, WARPCHECK_FENCE) R(ProxyFence, WARPCHECK_PROXY_FENCE) R(Matrix, WARPCHECK_MATRIX) R(MmaSync, WARPCHECK_MMA_SYNC) \
    R(MapField, WARPCHECK_MAP_FIELD) R(MapCopy, WARPCHECK_MAP_COPY) R(NamedBarrier, WARPCHECK_NAMED_BARRIER) R(ClusterBarrier, WARPCHECK_CLUSTER_BARRIER) \
    R(Mbarrier, WARPCHECK_MBARRIER) R(CpAsync, WARPCHECK_CP_ASYNC) R(CpAsyncWait, WARPCHECK_CP_ASYNC_WAIT) R(CpAsyncBarrier, WARPCHECK_CP_ASYNC_BARRIER) \
    R(Bulk, WARPCHECK_BULK) R(BulkWait, WARPCHECK_BULK_WAIT) R(TensorCopy, WARPCHECK_TENSOR_COPY) R(TryCancel, WARPCHECK_TRY_CANCEL) R(FirstCtaid, WARPCHECK_FIRST_CTAID) \
    R(TmemAlloc, WARPCHECK_TMEM_ALLOC) R(TmemGroup, WARPCHECK_TMEM_GROUP) R(TmemMove, WARPCHECK_TMEM_MOVE) R(TmemWait, WARPCHECK_TMEM_WAIT) \
    R(TmemFence, WARPCHECK_TMEM_FENCE) R(TmemCopy, WARPCHECK_TMEM_COPY) R(TmemShift, WARPCHECK_TMEM_SHIFT) R(Umma, WARPCHECK_UMMA) \
    R(UmmaCommit, WARPCHECK_UMMA_COMMIT) R(Wgmma, WARPCHECK_WGMMA) R(WgmmaWait, WARPCHECK_WGMMA_WAIT)

// Every operation, with the record of its modifiers. The order matters: the engine compares operations with the ends of
// ranges.
#define WARPCHECK_OPS(X) \
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

namespace warpcheck {

enum class Op : uint16_t {
#define X(name, record) name,
    WARPCHECK_OPS(X)
#undef X
        count
};

namespace mod {

enum class Record : uint8_t {
#define R(Name, fields) Name,
    WARPCHECK_RECORDS(R)
#undef R
};

// Converts a value to a field's type; throws if the type cannot hold it.
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
WARPCHECK_RECORDS(R)
#undef R
#undef F

inline constexpr Record kRecordOf[] = {
#define X(name, record) Record::record,
    WARPCHECK_OPS(X)
#undef X
};

// Storage for any of the records.
struct Modifiers {
    alignas(4) unsigned char bytes[64] = {};

    // Sets the record from `values` in the order of its fields.
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
            WARPCHECK_RECORDS(R)
#undef R
#undef F
        }
        if (used != values.size()) throw std::out_of_range("too many modifiers of an instruction");
    }
};

}  // namespace mod
}  // namespace warpcheck
