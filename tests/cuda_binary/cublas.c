/* Stand-in for libcublas: products are recorded with their sizes, not computed. */
#include <stdio.h>
#include <stdlib.h>

extern void standin_product(const char*, void*);

typedef struct {
  void* stream;
  int mode;
} Handle;

static int product(Handle* handle, const char* name) {
  standin_product(name, handle->stream);
  return 0;
}

int cublasCreate_v2(Handle** handle) {
  *handle = calloc(1, sizeof(Handle));
  return 0;
}
int cublasDestroy_v2(Handle* handle) {
  free(handle);
  return 0;
}
int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->mode;
  return 0;
}
int cublasSetMathMode(Handle* handle, int mode) {
  handle->mode = mode;
  return 0;
}
int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}
const char* cublasGetStatusName(int status) { return status ? "failed" : "CUBLAS_STATUS_SUCCESS"; }
const char* cublasGetStatusString(int status) { return cublasGetStatusName(status); }

#define PRODUCT(name) \
  int name(Handle* handle) { return product(handle, #name); }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasGemmBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemmBatched)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDgemmBatched)
PRODUCT(cublasSgeam)
PRODUCT(cublasDgeam)
PRODUCT(cublasScopy_v2)
PRODUCT(cublasSscal_v2)
PRODUCT(cublasSgetrfBatched)
PRODUCT(cublasDgetrfBatched)
PRODUCT(cublasSgetriBatched)
PRODUCT(cublasDgetriBatched)
