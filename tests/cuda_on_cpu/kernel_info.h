// What kernels and the device that runs them know of each other.
#pragma once
#include <cstddef>
#include <cstdint>

struct Index {
  unsigned x, y, z;
};

struct Kernel {
  void (*call)(void **arguments);
  const size_t *sizes;  // of the arguments
  size_t count;
  unsigned most_threads;  // of __launch_bounds__; 0: as many as a block may have
  char *shared, *shared_end;
};

extern "C" {
// The same for all of a thread's life, whatever other threads do meanwhile: so "const".
Index cuda_on_cpu_thread() __attribute__((const));
Index cuda_on_cpu_block() __attribute__((const));
Index cuda_on_cpu_block_size() __attribute__((const));
Index cuda_on_cpu_grid_size() __attribute__((const));
// line: of the kernel's text, by which waiting threads are told apart and named.
void cuda_on_cpu_barrier(unsigned line);
uint64_t cuda_on_cpu_shuffle(unsigned line, unsigned mask, unsigned source, uint64_t bits);
}
