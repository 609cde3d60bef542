/* CuTe DSL's runtime library for machines without a GPU: launches are counted, and run nothing. */
#include <stdint.h>
#include <stdio.h>

static uint32_t counted;
static uint32_t last[3];

uint32_t stub_launches(void) { return counted; }
uint32_t stub_grid(int32_t axis) { return last[axis]; }

int32_t _cudaGetDevice(int32_t *device) { return *device = 0; }
int32_t _cudaGetDeviceCount(int32_t *count) { return *count = 1, 0; }
int32_t _cudaSetDevice(int32_t device) { return 0; }
int32_t _cudaDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device) { return *value = 1 << 20, 0; }
int32_t _cudaLibraryLoadData(void **library, void *code, void *a, void *b, uint32_t c, void *d, void *e, uint32_t f) {
  return *library = code, 0;
}
int32_t _cudaLibraryUnload(void *library) { return 0; }
int32_t _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return *kernel = library, 0; }
int32_t _cuKernelGetAttribute(int32_t *value, int32_t attribute, void *kernel, int32_t device) { return *value = 0; }
int32_t _cudaFuncSetAttribute(void *function, int32_t attribute, int32_t value) { return 0; }
int32_t _cudaKernelSetAttributeForDevice(void *kernel, int32_t attribute, int32_t value, int32_t device) { return 0; }
int32_t _cudaLaunchKernelEx(const uint32_t *config, void *kernel, void **params) {
  for (int i = 0; i < 3; i++) last[i] = config[i];
  return counted++, kernel == NULL;
}

int32_t cuda_dialect_init_library_once(void **state, int32_t (*init)(void *), int32_t (*load)(void *, int32_t),
                                       void *set_error) {
  if (*state) return 0;
  return init(state) || load(state, 0);
}
void cuda_dialect_unload_library_once(void **state) { *state = NULL; }

typedef void (*SetErrorParts)(const char *kind, const char **parts, int32_t count);
void CuteDSLRT_TVMFFISetRaisedCudaError(SetErrorParts set_error, int32_t code) {
  const char *parts[] = {"an error of the stub"};
  set_error("RuntimeError", parts, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(SetErrorParts set_error, int32_t grid_x) {
  const char *parts[] = {"a launch exceeds a limit"};
  set_error("RuntimeError", parts, 1);
}
