// Lanes of a warp: shuffles, votes, masks.
#include "ptx.cuh"

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// A shuffle by all lanes. Fault: in a branch of half of them, with the mask of all.
KERNEL shuffle_in_branch(const u32* in, u32* out) {
    int t = threadIdx.x;
    u32 x = in[t];
    RIGHT(u32 y = __shfl_down_sync(0xffffffff, x, 1); if (t < 16) out[t] = y;)
    WRONG(if (t < 16) out[t] = __shfl_down_sync(0xffffffff, x, 1);)
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// Half a warp shuffles by its own mask. Fault: a lane asks one outside the mask.
KERNEL shuffle_from_outside(const u32* in, u32* out) {
    int t = threadIdx.x;
    u32 x = in[t];
    if (t < 16) out[t] = __shfl_sync(0xffff, x, RIGHT(15 - t) WRONG(t + 1));
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// A vote of the lanes that are there. Fault: the mask leaves out a lane that votes.
KERNEL vote_outside_mask(const u32* in, u32* out) {
    int t = threadIdx.x;
    if (t < 20) out[t] = __ballot_sync(RIGHT(0xfffff) WRONG(0x7ffff), in[t] & 1);
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// A sum of the lanes with data. Fault: the mask names lanes that are elsewhere.
KERNEL reduce_in_branch(const u32* in, u32* out) {
    int t = threadIdx.x;
    u32 x = in[t], sum = 0;
    if (x < 20) sum = __reduce_add_sync(RIGHT(0xfffff) WRONG(0xffffffff), x);
    __syncwarp();
    out[t] = sum;
}

// PAIR block=32 | u32[32]=arange u32[4]=zeros u32[32]=zeros
// One lane of a branch adds for all of them. Fault: lane 0 hands out the place, which is not in the branch.
KERNEL lane_zero(const u32* in, u32* count, u32* out) {
    int t = threadIdx.x;
    if (in[t] % 3 == 1) {
        u32 mask = __match_any_sync(__activemask(), 1);
        int first = __ffs(mask) - 1, leader = RIGHT(first) WRONG(0);
        u32 at = 0;
        if (t == first) at = atomicAdd(count, __popc(mask));
        at = __shfl_sync(mask, at, leader);
        out[at + __popc(mask & ((1u << t) - 1))] = in[t];
    }
}
