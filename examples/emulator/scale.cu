// y = factor * x: every block scales a tile of 128 numbers in shared memory and stores it by one bulk copy.
//
//     warpcheck ptx examples/emulator/scale.cu --grid 2 --block 128 --arg 'f32[256]' --arg 'f32[256]' --arg 3
//
// It gives the right result, and has a mistake that docs/emulator-quickstart.md finds and repairs.
extern "C" __global__ void scale(const float* x, float* y, float factor) {
    __shared__ alignas(128) float tile[128];
    const int first = 128 * blockIdx.x;
    tile[threadIdx.x] = factor * x[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned source = __cvta_generic_to_shared(tile);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(y + first), "r"(source) : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
