// libcuda.so.1, as far as libtvm_runtime_cuda asks: modules and launches.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"
#include "lock.h"

using namespace device;

namespace {

struct Function {
  std::string name;
  const Kernel *kernel;
};

// The start of CUlaunchConfig.
struct Config {
  Index grid, block;
  unsigned shared_bytes;
  void *stream;
};

// FNV-1a of a fatbin: the name that nvcc.py gave to the kernels of its text.
uint64_t hash_of(const unsigned char *image) {
  uint16_t header;
  uint64_t size, hash = 0xcbf29ce484222325;
  memcpy(&header, image + 6, sizeof header);
  memcpy(&size, image + 8, sizeof size);
  for (size_t i = 0; i < header + size; ++i) hash = (hash ^ image[i]) * 0x100000001b3;
  return hash;
}

}  // namespace

extern "C" {

int cuModuleLoadData(void **module, const void *image) {
  Lock lock;
  const uint32_t FATBIN = 0xba55ed50;
  if (memcmp(image, &FATBIN, sizeof FATBIN)) return INVALID_IMAGE;
  const char *folder = getenv("CUDA_ON_CPU_KERNELS");
  char path[4096];
  snprintf(path, sizeof path, "%s/%016llx.so", folder ? folder : ".",
           (unsigned long long)hash_of((const unsigned char *)image));
  *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (*module) return failed();
  fprintf(stderr, "cuda_on_cpu: %s\n", dlerror());
  return INVALID_IMAGE;
}

int cuModuleUnload(void *) { return failed(); }

int cuModuleGetFunction(void **function, void *module, const char *name) {
  Lock lock;
  auto *kernel = (const Kernel *)dlsym(module, (std::string(name) + "_info").c_str());
  if (!kernel) return NOT_FOUND;
  *function = new Function{name, kernel};
  return failed();
}

int cuFuncSetAttribute(void *, int, int) { return failed(); }

int cuLaunchKernelEx(const Config *config, const Function *function, void **arguments, void **) {
  Lock lock;
  Stream *stream = stream_of(config->stream);
  if (!stream) return INVALID_HANDLE;
  const Index &grid = config->grid, &block = config->block;
  size_t threads = (size_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024) return INVALID_VALUE;
  if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) return INVALID_VALUE;
  const Kernel *kernel = function->kernel;
  if (kernel->most_threads && threads > kernel->most_threads) return OUT_OF_RESOURCES;
  Launch launch{function->name, kernel, grid, block, std::vector<char>(16 * kernel->count)};
  for (size_t i = 0; i < kernel->count; ++i) {
    memcpy(&launch.arguments[16 * i], arguments[i], kernel->sizes[i]);
  }
  return queue(stream, [launch] { launch.run(); });
}

int cuGetErrorName(int error, const char **text) {
  *text = error ? "CUDA_ERROR" : "CUDA_SUCCESS";
  return 0;
}

int cuGetErrorString(int error, const char **text) {
  *text = error && error == failed() ? words() : "see the numbers in device.h";
  return 0;
}

int cuDeviceGetName(char *name, int size, int) {
  snprintf(name, (size_t)size, "this CPU");
  return 0;
}

int cuInit(unsigned) { return 0; }

int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}

int cuDeviceGetAttribute(int *value, int number, int) {
  const int MAJOR = 75, MINOR = 76;
  const char *arch = getenv("CUDA_ON_CPU_ARCH");
  int version = arch ? atoi(arch) : 90;
  if (number != MAJOR && number != MINOR) return INVALID_VALUE;
  *value = number == MAJOR ? version / 10 : version % 10;
  return 0;
}

int cuTensorMapEncodeTiled(void *) { return INVALID_VALUE; }
}
