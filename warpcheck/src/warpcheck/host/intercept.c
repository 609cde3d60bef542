/* CUDA runtime symbols that compiled CuTe DSL host functions call, forwarded to Python.
 *
 * A host function takes these symbols from the library that CUTE_DSL_LIBS names, unless the process has loaded the
 * real runtime globally. Therefore the symbols have the prefix warpcheck here, and warpcheck.host.dsl renames the
 * calls. Each function packs its arguments into an array of 64-bit words and calls the dispatcher that
 * warpcheck.host.launch installs, with its name and the array. Without a dispatcher it returns the error "no device".
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { SUCCESS = 0, NO_DEVICE = 100 };

typedef int32_t (*Dispatcher)(const char *symbol, const uint64_t *args);
static Dispatcher dispatcher;

EXPORT void warpcheck_set_dispatcher(Dispatcher function) { dispatcher = function; }

static int32_t call(const char *symbol, const uint64_t *args) {
  return dispatcher ? dispatcher(symbol, args) : NO_DEVICE;
}

#define WORD(x) ((uint64_t)(x))
#define FORWARD(symbol, parameters, ...)        \
  EXPORT int32_t warpcheck##symbol parameters {       \
    const uint64_t args[] = {__VA_ARGS__};      \
    return call(#symbol, args);                 \
  }

/* devices */
FORWARD(_cuDeviceGet, (void *device, int32_t ordinal), WORD(device), WORD(ordinal))
FORWARD(_cudaGetDevice, (void *device), WORD(device))
FORWARD(_cudaGetDeviceCount, (void *count), WORD(count))
FORWARD(_cudaSetDevice, (int32_t device), WORD(device))
FORWARD(_cudaDeviceGetAttribute, (void *value, int32_t attribute, int32_t device), WORD(value), WORD(attribute),
        WORD(device))
FORWARD(_cudaDeviceSynchronize, (void), 0)

/* libraries and kernels */
FORWARD(_cudaLibraryLoadData,
        (void *library, void *code, void *jit_options, void *jit_values, uint32_t jit_count, void *options,
         void *values, uint32_t count),
        WORD(library), WORD(code), WORD(jit_options), WORD(jit_values), WORD(jit_count), WORD(options),
        WORD(values), WORD(count))
FORWARD(_cudaLibraryUnload, (void *library), WORD(library))
FORWARD(_cudaLibraryGetKernel, (void *kernel, void *library, void *name), WORD(kernel), WORD(library), WORD(name))
FORWARD(_cudaLibraryGetKernelCount, (void *count, void *library), WORD(count), WORD(library))
FORWARD(_cudaLibraryGetGlobal, (void *address, void *bytes, void *library, void *name), WORD(address), WORD(bytes),
        WORD(library), WORD(name))
FORWARD(_cuKernelGetAttribute, (void *value, int32_t attribute, void *kernel, int32_t device), WORD(value),
        WORD(attribute), WORD(kernel), WORD(device))
FORWARD(_cudaFuncSetAttribute, (void *function, int32_t attribute, int32_t value), WORD(function), WORD(attribute),
        WORD(value))
FORWARD(_cudaKernelSetAttributeForDevice, (void *kernel, int32_t attribute, int32_t value, int32_t device),
        WORD(kernel), WORD(attribute), WORD(value), WORD(device))
FORWARD(_cudaOccupancyMaxActiveBlocksPerMultiprocessor,
        (void *blocks, void *function, int32_t block_size, uint64_t smem_bytes), WORD(blocks), WORD(function),
        WORD(block_size), WORD(smem_bytes))

/* launches */
FORWARD(_cudaLaunchKernelEx, (void *config, void *kernel, void *params), WORD(config), WORD(kernel), WORD(params))
FORWARD(_cudaLaunchKernel,
        (void *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x, uint32_t block_y,
         uint32_t block_z, void *params, uint64_t smem_bytes, void *stream),
        WORD(kernel), WORD(grid_x), WORD(grid_y), WORD(grid_z), WORD(block_x), WORD(block_y), WORD(block_z),
        WORD(params), WORD(smem_bytes), WORD(stream))

/* memory */
FORWARD(_cudaMalloc, (void *address, uint64_t bytes), WORD(address), WORD(bytes))
FORWARD(_cudaMallocAsync, (void *address, uint64_t bytes, void *stream), WORD(address), WORD(bytes), WORD(stream))
FORWARD(_cudaMallocHost, (void *address, uint64_t bytes), WORD(address), WORD(bytes))
FORWARD(_cudaMallocManaged, (void *address, uint64_t bytes, uint32_t flags), WORD(address), WORD(bytes), WORD(flags))
FORWARD(_cudaFree, (void *address), WORD(address))
FORWARD(_cudaFreeAsync, (void *address, void *stream), WORD(address), WORD(stream))
FORWARD(_cudaFreeHost, (void *address), WORD(address))
FORWARD(_cudaMemcpy, (void *to, void *from, uint64_t bytes, int32_t kind), WORD(to), WORD(from), WORD(bytes),
        WORD(kind))
FORWARD(_cudaMemcpyAsync, (void *to, void *from, uint64_t bytes, int32_t kind, void *stream), WORD(to), WORD(from),
        WORD(bytes), WORD(kind), WORD(stream))
FORWARD(_cudaMemset, (void *address, int32_t value, uint64_t bytes), WORD(address), WORD(value), WORD(bytes))
FORWARD(_cudaMemsetAsync, (void *address, int32_t value, uint64_t bytes, void *stream), WORD(address), WORD(value),
        WORD(bytes), WORD(stream))
FORWARD(_cuTensorMapEncodeTiled,
        (void *map, uint32_t type, uint32_t rank, void *address, void *extents, void *strides, void *box,
         void *element_strides, uint32_t interleave, uint32_t swizzle, uint32_t promotion, uint32_t fill),
        WORD(map), WORD(type), WORD(rank), WORD(address), WORD(extents), WORD(strides), WORD(box),
        WORD(element_strides), WORD(interleave), WORD(swizzle), WORD(promotion), WORD(fill))

/* streams and events: every call completes before it returns, so no call has to wait for another */
FORWARD(_cudaStreamCreate, (void *stream), WORD(stream))
FORWARD(_cudaStreamDestroy, (void *stream), WORD(stream))
FORWARD(_cudaStreamSynchronize, (void *stream), WORD(stream))
FORWARD(_cudaStreamWaitEvent, (void *stream, void *event, uint32_t flags), WORD(stream), WORD(event), WORD(flags))
FORWARD(_cudaEventCreate, (void *event), WORD(event))
FORWARD(_cudaEventDestroy, (void *event), WORD(event))
FORWARD(_cudaEventRecord, (void *event, void *stream), WORD(event), WORD(stream))
FORWARD(_cudaEventElapsedTime, (void *milliseconds, void *start, void *end), WORD(milliseconds), WORD(start),
        WORD(end))

EXPORT const char *warpcheck_cuda_dialect_get_error_name(int32_t code) { return code ? "EmulatedLaunchFailure" : "Success"; }

EXPORT void warpcheck_cuda_dialect_print_on_error(int32_t code) {
  if (code) fprintf(stderr, "emulated CUDA call failed with code %d\n", code);
}

/* Called for results that the host code does not return. It cannot raise an exception, so it prints the error. */
EXPORT void warpcheck_cuda_dialect_assert_success(int32_t code) { warpcheck_cuda_dialect_print_on_error(code); }

/* Functions called through tvm-ffi load their library on the first call and store it in *state. */
typedef void (*SetError)(const char *kind, const char *message);
typedef void (*SetErrorParts)(const char *kind, const char **parts, int32_t count);

EXPORT int32_t warpcheck_cuda_dialect_init_library_once(void **state, int32_t (*init)(void *), int32_t (*load)(void *, int32_t),
                                              SetError set_error) {
  if (*state) return SUCCESS;
  int32_t code = init(state);
  if (!code) code = load(state, 0);
  if (code) {
    char message[64];
    snprintf(message, sizeof message, "CUDA Error Code: %d", code);
    set_error("EmulatedCudaError", message);
    *state = NULL;
    return -1;
  }
  return SUCCESS;
}

EXPORT void warpcheck_cuda_dialect_unload_library_once(void **state) { *state = NULL; }

EXPORT void warpcheck_CuteDSLRT_TVMFFISetRaisedCudaError(SetErrorParts set_error, int32_t code) {
  char message[64];
  snprintf(message, sizeof message, "CUDA Error Code: %d", code);
  const char *parts[] = {message};
  set_error("EmulatedCudaError", parts, 1);
}

/* Called by the host function if a launch exceeds a limit of the chip, before it would call the runtime. */
EXPORT void warpcheck_CuteDSLRT_TVMFFISetRaisedCudaLaunchError(SetErrorParts set_error, int32_t grid_x, int32_t grid_y,
                                                     int32_t grid_z, int32_t block_x, int32_t block_y,
                                                     int32_t block_z, int32_t cluster, int64_t smem_bytes) {
  char message[256];
  snprintf(message, sizeof message,
           "launch of grid (%d, %d, %d), block (%d, %d, %d), cluster %d, %lld bytes of shared memory exceeds a limit",
           grid_x, grid_y, grid_z, block_x, block_y, block_z, cluster, (long long)smem_bytes);
  const char *parts[] = {message};
  set_error("EmulatedCudaError", parts, 1);
}

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_intercept",
    .m_doc = "The emulated CUDA runtime library; load it with ctypes by __file__.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__intercept(void) { return PyModule_Create(&module); }
