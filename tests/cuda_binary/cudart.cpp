// Stand-in for libcudart: device memory is host memory; copies are made, kernels are recorded by
// name and not computed, and the rules of stream capture hold. Everything done is a line of the log.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Kind { kPageable = 0, kPinned = 1, kDevice = 2 };
const char* const kKindNames[] = {"pageable", "pinned", "device"};

struct Block {
  size_t size;
  Kind kind;
};

struct Graph {
  std::vector<std::function<void()>> work;  // what a launch does: the copies
  std::vector<std::string> kernels;
};

struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id owner;
  bool is_valid = true;
  Graph graph;
};

struct State {
  std::recursive_mutex mutex;
  std::string log, taken, failing_kernel;
  std::unordered_map<const void*, std::string> kernels;
  std::map<uintptr_t, Block> blocks;
  std::map<cudaStream_t, Capture> captures;
  std::map<uintptr_t, Graph> graphs;
  size_t used = 0, limit = size_t(80) << 30;
  uintptr_t next_handle = 0x1000;
  cudaError_t fault = cudaSuccess;  // of a kernel: every later call returns it
};

State& state() {
  static auto* s = new State;  // kernels are registered before main, and after nothing
  return *s;
}

using Lock = std::lock_guard<std::recursive_mutex>;
thread_local cudaError_t last_error = cudaSuccess;

void note(const char* format, ...) {
  char line[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  Lock lock(state().mutex);
  state().log.append(line).append("\n");
}

cudaError_t failed(cudaError_t error) { return last_error = error; }

uintptr_t new_handle() { return state().next_handle += 16; }

int capability() {
  const char* text = getenv("STANDIN_COMPUTE_CAPABILITY");
  return text ? atoi(text) : 90;
}

Capture* capture_of(cudaStream_t stream) {
  auto found = state().captures.find(stream);
  return found == state().captures.end() ? nullptr : &found->second;
}

// Whether this thread may make a call that CUDA calls potentially unsafe. A forbidden one
// invalidates the captures that forbid it.
bool is_unsafe(const char* what) {
  bool refused = false;
  for (auto& [stream, capture] : state().captures) {
    const bool is_own = capture.owner == std::this_thread::get_id();
    if (capture.mode == cudaStreamCaptureModeGlobal ||
        (capture.mode == cudaStreamCaptureModeThreadLocal && is_own)) {
      capture.is_valid = false;
      refused = true;
    }
  }
  if (refused) note("refused %s in a capture", what);
  return refused;
}

const std::pair<const uintptr_t, Block>* block_of(const void* address) {
  auto after = state().blocks.upper_bound(uintptr_t(address));
  if (after == state().blocks.begin()) return nullptr;
  --after;
  return uintptr_t(address) < after->first + after->second.size ? &*after : nullptr;
}

Kind kind_of(const void* address) {
  auto block = block_of(address);
  return block ? block->second.kind : kPageable;
}

#define CHECK_FAULT \
  Lock lock(state().mutex); \
  if (state().fault) return failed(state().fault)
#define CHECK_SAFE(what) \
  CHECK_FAULT; \
  if (is_unsafe(what)) return failed(cudaErrorStreamCaptureUnsupported)

void run_kernel(const std::string& name) {
  const std::string& failing = state().failing_kernel;
  if (!failing.empty() && name.find(failing) != std::string::npos)
    state().fault = cudaErrorIllegalAddress;  // seen at the next call, as on a GPU
}

cudaError_t launch(const char* name, dim3 grid, dim3 block, cudaStream_t stream) {
  CHECK_FAULT;
  Capture* capture = capture_of(stream);
  note("kernel %s%s", capture ? "captured " : "", name);
  const unsigned threads = block.x * block.y * block.z;
  if (!threads || threads > 1024 || !grid.x || !grid.y || !grid.z)
    return failed(cudaErrorInvalidConfiguration);
  if (capture) {
    capture->graph.kernels.push_back(name);
  } else {
    run_kernel(name);
  }
  return cudaSuccess;
}

const char* name_of(const void* function) {
  auto found = state().kernels.find(function);
  return found == state().kernels.end() ? "unknown" : found->second.c_str();
}

cudaError_t take(void** address, size_t size, Kind kind, const char* what) {
  CHECK_SAFE(what);
  if (kind == kDevice && state().used + size > state().limit) {
    note("no memory %s %zu", what, size);
    return failed(cudaErrorMemoryAllocation);
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, size + 256)) return failed(cudaErrorMemoryAllocation);
  if (size < (size_t(64) << 20)) memset(memory, 0, size);  // larger blocks are zero, and untouched
  state().blocks[uintptr_t(memory)] = {size, kind};
  if (kind == kDevice) state().used += size;
  note("take %s %zu", kKindNames[kind], size);
  *address = memory;
  return cudaSuccess;
}

cudaError_t give(void* address, const char* what) {
  if (!address) return cudaSuccess;
  CHECK_SAFE(what);
  auto found = state().blocks.find(uintptr_t(address));
  if (found == state().blocks.end()) return failed(cudaErrorInvalidValue);
  if (found->second.kind == kDevice) state().used -= found->second.size;
  note("give %s %zu", kKindNames[found->second.kind], found->second.size);
  state().blocks.erase(found);
  free(address);
  return cudaSuccess;
}

// Do what a stream is given, or record it where the stream is captured.
cudaError_t queue(cudaStream_t stream, const char* line, std::function<void()> work) {
  CHECK_FAULT;
  Capture* capture = capture_of(stream);
  note("%s%s", capture ? "captured " : "", line);
  if (capture)
    capture->graph.work.push_back(std::move(work));
  else
    work();
  return cudaSuccess;
}

}  // namespace

// ---- what the tests say and read

EXPORT void standin_mark(const char* text) { note("mark %s", text); }
EXPORT void standin_note(const char* text) { note("%s", text); }
EXPORT void standin_product(const char* name, void* stream) {
  Lock lock(state().mutex);
  Capture* capture = capture_of(cudaStream_t(stream));
  if (capture) capture->graph.kernels.push_back(name);
  note("product %s%s", capture ? "captured " : "", name);
}
EXPORT void standin_limit_memory(size_t limit) { state().limit = limit; }
EXPORT size_t standin_used_memory() { return state().used; }
EXPORT size_t standin_num_captures() { return state().captures.size(); }
EXPORT size_t standin_num_graphs() { return state().graphs.size(); }
EXPORT void standin_fail_kernels(const char* part_of_name) { state().failing_kernel = part_of_name; }
EXPORT void standin_recover() {
  state().fault = last_error = cudaSuccess;
  state().failing_kernel.clear();
  state().captures.clear();
}
EXPORT const char* standin_take_log() {
  Lock lock(state().mutex);
  state().taken.swap(state().log);
  state().log.clear();
  return state().taken.c_str();
}

// ---- kernels

EXPORT void** __cudaRegisterFatBinary(void*) { return (void**)new_handle(); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                                   uint3*, dim3*, dim3*, int*) {
  Lock lock(state().mutex);
  state().kernels[function] = name;
}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Configuration> configurations;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *(void**)stream = last.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t,
                                      cudaStream_t stream) {
  return launch(name_of((const void*)kernel), grid, block, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                    cudaStream_t stream) {
  return launch(name_of(function), grid, block, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**,
                                               size_t, cudaStream_t stream) {
  return launch(name_of(function), grid, block, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                       void**) {
  return launch(name_of(function), config->gridDim, config->blockDim, config->stream);
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return queue(stream, "host function", [=] { function(data); });
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = capability();
  attributes->numRegs = 64;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**,
                                       unsigned, cudaLibraryOption*, void**, unsigned) {
  *library = (cudaLibrary_t)new_handle();
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  Lock lock(state().mutex);
  *kernel = (cudaKernel_t)new_handle();
  state().kernels[*kernel] = name;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* number, const void*,
                                                                          int, size_t, unsigned) {
  *number = 2;
  return cudaSuccess;
}

// ---- memory

EXPORT cudaError_t cudaMalloc(void** address, size_t size) {
  return take(address, size, kDevice, "cudaMalloc");
}
EXPORT cudaError_t cudaMallocFromPoolAsync(void** address, size_t size, cudaMemPool_t, cudaStream_t) {
  return take(address, size, kDevice, "cudaMallocFromPoolAsync");
}
EXPORT cudaError_t cudaMallocHost(void** address, size_t size) {
  return take(address, size, kPinned, "cudaMallocHost");
}
EXPORT cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  return take(address, size, kPinned, "cudaHostAlloc");
}
EXPORT cudaError_t cudaFree(void* address) { return give(address, "cudaFree"); }
EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return give(address, "cudaFreeAsync"); }
EXPORT cudaError_t cudaFreeHost(void* address) { return give(address, "cudaFreeHost"); }
EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = state().limit;
  *free_bytes = state().limit - std::min(state().used, state().limit);
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Lock lock(state().mutex);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = (cudaMemoryType)kind_of(address);
  attributes->devicePointer = attributes->hostPointer = (void*)address;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = (cudaMemPool_t)new_handle();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *(unsigned long long*)value = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---- copies

EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
  CHECK_SAFE("cudaMemcpy");
  note("copy-and-wait %zu %s to %s", size, kKindNames[kind_of(source)], kKindNames[kind_of(target)]);
  memcpy(target, source, size);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind,
                                   cudaStream_t stream) {
  CHECK_FAULT;
  const Kind from = kind_of(source), to = kind_of(target);
  Capture* capture = capture_of(stream);
  if (capture && (from == kPageable || to == kPageable)) {
    capture->is_valid = false;
    note("refused a copy of pageable memory in a capture");
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  char line[128];
  snprintf(line, sizeof line, "copy %zu %s to %s", size, kKindNames[from], kKindNames[to]);
  return queue(stream, line, [=] { memmove(target, source, size); });
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                                     size_t source_pitch, size_t width, size_t height,
                                     cudaMemcpyKind, cudaStream_t stream) {
  return queue(stream, "copy-rectangle", [=] {
    for (size_t i = 0; i < height; i++)
      memcpy((char*)target + i * target_pitch, (const char*)source + i * source_pitch, width);
  });
}
EXPORT cudaError_t cudaMemcpyFromSymbol(void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* target, int value, size_t size) {
  CHECK_SAFE("cudaMemset");
  note("fill-and-wait %zu", size);
  memset(target, value, size);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  return queue(stream, "fill", [=] { memset(target, value, size); });
}

// ---- devices

EXPORT cudaError_t cudaGetDeviceCount(int* number) {
  *number = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  CHECK_FAULT;
  return device ? failed(cudaErrorInvalidDevice) : cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  CHECK_SAFE("cudaDeviceSynchronize");
  note("wait device");
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int) {  // those of an H100
  memset(prop, 0, sizeof *prop);
  strcpy(prop->name, "Stand-in");
  prop->totalGlobalMem = state().limit;
  prop->major = capability() / 10, prop->minor = capability() % 10;
  prop->sharedMemPerBlock = 49152, prop->sharedMemPerBlockOptin = 232448;
  prop->sharedMemPerMultiprocessor = 233472, prop->reservedSharedMemPerBlock = 1024;
  prop->regsPerBlock = prop->regsPerMultiprocessor = prop->totalConstMem = 65536;
  prop->warpSize = 32, prop->maxThreadsPerBlock = 1024, prop->maxThreadsPerMultiProcessor = 2048;
  prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024, prop->maxThreadsDim[2] = 64;
  prop->maxGridSize[0] = 2147483647, prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->multiProcessorCount = 132, prop->maxBlocksPerMultiProcessor = 32;
  prop->l2CacheSize = 50 << 20, prop->memoryBusWidth = 5120, prop->asyncEngineCount = 3;
  prop->concurrentKernels = prop->unifiedAddressing = prop->managedMemory = 1;
  prop->concurrentManagedAccess = prop->canMapHostMemory = prop->streamPrioritiesSupported = 1;
  prop->cooperativeLaunch = prop->clusterLaunch = 1;  // without them TopK takes another kernel
  prop->computePreemptionSupported = prop->memoryPoolsSupported = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> values = {
      {cudaDevAttrMultiProcessorCount, 132},        {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrWarpSize, 32},                    {cudaDevAttrL2CacheSize, 50 << 20},
      {cudaDevAttrIntegrated, 0}};
  auto found = values.find(attribute);
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? capability() / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? capability() % 10
           : found != values.end()                          ? found->second
                                                            : 1;
  return cudaSuccess;
}
static int driver_function() { return 0; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = (void*)driver_function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError() {
  const cudaError_t error = state().fault ? state().fault : last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORT cudaError_t cudaPeekAtLastError() { return state().fault ? state().fault : last_error; }
EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    default: return "cudaErrorUnknown";
  }
}
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default: return cudaGetErrorName(error);
  }
}

// ---- streams, events, graphs

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  CHECK_FAULT;
  *stream = (cudaStream_t)new_handle();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, 0);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  CHECK_FAULT;
  state().captures.erase(stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CHECK_FAULT;
  if (Capture* capture = capture_of(stream)) {
    capture->is_valid = false;
    note("refused a wait in a capture");
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  note("wait stream");
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  CHECK_FAULT;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  CHECK_FAULT;
  Capture* capture = capture_of(stream);
  *status = !capture            ? cudaStreamCaptureStatusNone
            : capture->is_valid ? cudaStreamCaptureStatusActive
                                : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  CHECK_FAULT;
  if (capture_of(stream)) return failed(cudaErrorIllegalState);
  note("capture begins");
  Capture capture;
  capture.mode = mode;
  capture.owner = std::this_thread::get_id();
  state().captures[stream] = capture;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CHECK_FAULT;
  *graph = nullptr;
  Capture* capture = capture_of(stream);
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->owner != std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed)
    return failed(cudaErrorStreamCaptureWrongThread);
  const Capture done = *capture;
  state().captures.erase(stream);
  note("capture ends");
  if (!done.is_valid) return failed(cudaErrorStreamCaptureInvalidated);
  const uintptr_t handle = new_handle();
  state().graphs[handle] = done.graph;
  *graph = (cudaGraph_t)handle;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                        unsigned long long) {
  CHECK_FAULT;
  const uintptr_t handle = new_handle();
  state().graphs[handle] = state().graphs.at(uintptr_t(graph));
  *executable = (cudaGraphExec_t)handle;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  CHECK_FAULT;
  if (capture_of(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  const Graph& graph = state().graphs.at(uintptr_t(executable));
  note("graph %zu kernels %zu copies", graph.kernels.size(), graph.work.size());
  for (auto& kernel : graph.kernels) run_kernel(kernel);
  for (auto& work : graph.work) work();
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  CHECK_FAULT;
  state().graphs.erase(uintptr_t(graph));
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  CHECK_FAULT;
  state().graphs.erase(uintptr_t(executable));
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t)new_handle();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  CHECK_FAULT;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) {
  CHECK_FAULT;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
  CHECK_SAFE("cudaEventSynchronize");
  note("wait event");
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t, cudaEvent_t) {
  *time = 0.01f;
  return cudaSuccess;
}
