/* Stand-in for libcublasLt: descriptions are empty memory, products are recorded. */
#include <stdlib.h>
#include <string.h>

extern void standin_product(const char*, void*);

#define CREATES(name) \
  int name(void** object) { return (*object = calloc(1, 256)) ? 0 : 1; }
#define SUCCEEDS(name) \
  int name(void) { return 0; }
CREATES(cublasLtCreate)
CREATES(cublasLtMatmulDescCreate)
CREATES(cublasLtMatmulPreferenceCreate)
CREATES(cublasLtMatrixLayoutCreate)
CREATES(cublasLtMatrixTransformDescCreate)
SUCCEEDS(cublasLtDestroy)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatrixTransform)
SUCCEEDS(cublasLtMatrixTransformDescDestroy)
SUCCEEDS(cublasLtMatmulAlgoConfigSetAttribute)
SUCCEEDS(cublasLtMatmulAlgoInit)

int cublasLtMatmul(void* handle, void* description, void* alpha, void* a, void* a_layout, void* b,
                   void* b_layout, void* beta, void* c, void* c_layout, void* d, void* d_layout,
                   void* algorithm, void* workspace, size_t workspace_size, void* stream) {
  standin_product("cublasLtMatmul", stream);
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* description, void* a, void* b, void* c,
                                   void* d, void* preference, int wanted, void* results,
                                   int* found) {
  memset(results, 0, 96); /* one cublasLtMatmulHeuristicResult_t */
  *found = 1;
  return 0;
}
