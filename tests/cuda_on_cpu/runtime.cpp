// libcudart.so.13, as far as libtvm_runtime_cuda and tests ask: memory, streams, events, graphs.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "device.h"
#include "lock.h"

using namespace device;

namespace {

enum Kind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };
std::map<const char *, size_t> pinned;  // host memory of cudaMallocHost

bool is_pinned(const void *address) {
  auto after = pinned.upper_bound((const char *)address);
  if (after == pinned.begin()) return false;
  --after;
  return (const char *)address < after->first + after->second;
}

void copy(void *to, const void *from, size_t size) {
  for (const void *each : {(const void *)to, from}) {
    if (is_device(each) && !reachable("a copy", each, size)) return;
  }
  memcpy(to, from, size);
}

// As CUDA does: what lies in pageable memory of the host is read before this returns, and written.
Error copy_on(Stream *stream, void *to, const void *from, size_t size, int kind) {
  bool into = is_device(to), out = is_device(from);
  if (kind != BY_ADDRESS && kind != (out ? 2 : 0) + (into ? 1 : 0)) return INVALID_VALUE;
  bool pageable = (!into && !is_pinned(to)) || (!out && !is_pinned(from));
  if (pageable && is_capturing(stream)) return CAPTURE_UNSUPPORTED;
  if (!out && pageable) {
    const char *start = (const char *)from;
    std::vector<char> staged(start, start + size);
    return queue(stream, [=] { copy(to, staged.data(), size); });
  }
  Error error = queue(stream, [=] { copy(to, from, size); });
  return error || into || !pageable ? error : wait_for(stream);
}

int attribute(int number) {
  const char *arch = getenv("CUDA_ON_CPU_ARCH");
  int version = arch ? atoi(arch) : 90;
  const std::map<int, int> known = {
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 0x7fffffff}, {6, 65535}, {7, 65535},
      {8, 49152}, {10, 32}, {12, 65536}, {13, 1000000}, {16, 2}, {38, 1 << 20},
      {39, 2048}, {75, version / 10}, {76, version % 10}, {97, 49152}};
  auto found = known.find(number);
  return found == known.end() ? 0 : found->second;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) int
#define STREAM(handle)                \
  Lock lock;                          \
  Stream *stream = stream_of(handle); \
  if (!stream) return INVALID_HANDLE

EXPORT cudaGetDeviceCount(int *count) {
  *count = 1;
  return SUCCESS;
}
EXPORT cudaGetDevice(int *number) {
  *number = 0;
  return failed();
}
EXPORT cudaSetDevice(int number) { return number ? NO_DEVICE : failed(); }
EXPORT cudaDeviceGetAttribute(int *value, int number, int device) {
  *value = attribute(number);
  return device ? NO_DEVICE : SUCCESS;
}
EXPORT cudaGetDeviceProperties(char *properties, int) {  // its name and, at byte 288, its memory
  snprintf(properties, 256, "this CPU");
  const size_t memory = size_t(4) << 30;
  memcpy(properties + 288, &memory, sizeof memory);
  return failed();
}
EXPORT cudaDeviceSynchronize() {
  Lock lock;
  return wait_for((Stream *)nullptr);
}

extern "C" const char *cudaGetErrorName(int error) { return error ? "cudaError" : "cudaSuccess"; }
extern "C" const char *cudaGetErrorString(int error) {
  static thread_local char text[32];
  if (error && error == failed()) return words();
  snprintf(text, sizeof text, "error %d", error);
  return text;
}
EXPORT cudaGetLastError() { return failed(); }
EXPORT cudaPeekAtLastError() { return failed(); }

// --- memory ---

EXPORT cudaMalloc(void **address, size_t size) {
  Lock lock;
  if (is_capturing(nullptr)) return CAPTURE_UNSUPPORTED;
  *address = allocate(size);
  return *address || !size ? failed() : (Error)2;
}
EXPORT cudaFree(void *address) {
  Lock lock;
  if (!address) return failed();
  if (Error error = wait_for((Stream *)nullptr)) return error;
  return release((char *)address) ? SUCCESS : INVALID_VALUE;
}
EXPORT cudaMallocHost(void **address, size_t size) {
  Lock lock;
  *address = malloc(size);
  pinned[(const char *)*address] = size;
  return failed();
}
EXPORT cudaFreeHost(void *address) {
  Lock lock;
  if (!pinned.erase((const char *)address)) return INVALID_VALUE;
  wait_for((Stream *)nullptr);
  free(address);
  return failed();
}
EXPORT cudaMemGetInfo(size_t *unused, size_t *total) {
  *unused = *total = size_t(4) << 30;
  return failed();
}
EXPORT cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *handle) {
  STREAM(handle);
  return copy_on(stream, to, from, size, kind);
}
EXPORT cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, void *handle) {
  STREAM(handle);
  return copy_on(stream, to, from, size, BY_ADDRESS);
}
EXPORT cudaMemsetAsync(void *address, int value, size_t size, void *handle) {
  STREAM(handle);
  return queue(stream, [=] {
    if (reachable("a fill", address, size)) memset(address, value, size);
  });
}

// --- streams and events ---

EXPORT cudaStreamCreate(Stream **made) {
  Lock lock;
  *made = new_stream(true);
  return failed();
}
EXPORT cudaStreamCreateWithFlags(Stream **made, unsigned flags) {
  Lock lock;
  *made = new_stream(!(flags & 1));
  return failed();
}
EXPORT cudaStreamDestroy(void *handle) {
  STREAM(handle);
  drop(stream);
  return failed();
}
EXPORT cudaStreamSynchronize(void *handle) {
  STREAM(handle);
  return wait_for(stream);
}
EXPORT cudaStreamWaitEvent(void *handle, Event *event, unsigned) {
  STREAM(handle);
  return let_wait(stream, event);
}
EXPORT cudaEventCreate(Event **event) {
  Lock lock;
  *event = new_event();
  return failed();
}
EXPORT cudaEventDestroy(Event *event) {
  Lock lock;
  drop(event);
  return failed();
}
EXPORT cudaEventRecord(Event *event, void *handle) {
  STREAM(handle);
  return record(event, stream);
}
EXPORT cudaEventSynchronize(Event *event) {
  Lock lock;
  return wait_for(event);
}
EXPORT cudaEventElapsedTime(float *milliseconds, Event *start, Event *end) {
  Lock lock;
  double seconds = 0;
  Error error = seconds_between(start, end, &seconds);
  *milliseconds = (float)(seconds * 1e3);
  return error;
}

// --- graphs ---

EXPORT cudaStreamBeginCapture(void *handle, int) {
  STREAM(handle);
  return begin_capture(stream);
}
EXPORT cudaStreamEndCapture(void *handle, Graph **graph) {
  STREAM(handle);
  return end_capture(stream, graph);
}
EXPORT cudaGraphInstantiate(Graph **made, Graph *graph, unsigned long long) {
  Lock lock;
  *made = device::copy(graph);
  return failed();
}
EXPORT cudaGraphLaunch(Graph *graph, void *handle) {
  STREAM(handle);
  return launch(graph, stream);
}
EXPORT cudaGraphDestroy(Graph *graph) {
  Lock lock;
  drop(graph);
  return failed();
}
EXPORT cudaGraphExecDestroy(Graph *graph) { return cudaGraphDestroy(graph); }
