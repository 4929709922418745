// The threads of a block: each a fiber that runs until it waits, ends or does what it may not.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

using namespace device;

namespace {

constexpr size_t STACK = size_t(1) << 17;
constexpr unsigned MOST_THREADS = 1024, WARP = 32;

enum State { READY, AT_BARRIER, AT_SHUFFLE, ENDED };
const char *const NAMES[] = {"runs", "waits at __syncthreads", "waits at a shuffle", "has ended"};

struct Thread {
  jmp_buf context;
  bool begun;
  State state;
  Index index;
  unsigned line, mask, source;  // where it waits, for whom, and whose bits it wants
  uint64_t bits, given;
};

Thread threads[MOST_THREADS];
char *stacks;
unsigned count;        // of the block that runs
Thread *current;       // nullptr: none runs
const Launch *running;
void **arguments;
Index block;
Moment moment;
jmp_buf scheduler;

char *stack_of(unsigned number) { return stacks + number * STACK; }

void pause() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

void fiber() {
  for (;;) {
    running->kernel->call(arguments);
    current->state = ENDED;
    pause();
  }
}

[[noreturn]] void stop(Error error, const char *what, const void *address, const char *why) {
  fail(error, "%s, thread (%u, %u, %u) of block (%u, %u, %u): %s %p, %s", running->name.c_str(),
       current->index.x, current->index.y, current->index.z, block.x, block.y, block.z, what, address,
       why);
  for (Thread &thread : threads) thread.begun = false;  // all are left where they are
  _longjmp(scheduler, 2);
}

// Run a thread until it waits; false where the kernel was stopped.
bool resume(unsigned number) {
  current = &threads[number];
  moment.thread = number;
  int came = _setjmp(scheduler);
  if (!came) {
    if (current->begun) _longjmp(current->context, 1);
    current->begun = true;
    static ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stack_of(number);
    start.uc_stack.ss_size = STACK;
    makecontext(&start, fiber, 0);
    setcontext(&start);
  }
  current = nullptr;
  return came == 1;
}

// Whether all threads that a waiting one names wait with it.
bool is_complete(unsigned first, const Thread &waiting) {
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if (!(waiting.mask >> lane & 1)) continue;
    const Thread &other = threads[first + lane];
    if (first + lane >= count || other.state != AT_SHUFFLE) return false;
    if (other.line != waiting.line || other.mask != waiting.mask) return false;
  }
  return true;
}

// Let the threads of a warp go on whose shuffle is complete.
bool shuffle_warp(unsigned first) {
  bool any = false;
  for (unsigned lane = 0; lane < WARP && first + lane < count; ++lane) {
    Thread waiting = threads[first + lane];
    if (waiting.state != AT_SHUFFLE || !is_complete(first, waiting)) continue;
    any = true;
    for (unsigned i = 0; i < WARP; ++i) {
      if (!(waiting.mask >> i & 1)) continue;
      Thread &thread = threads[first + i];
      // Of a lane that takes no part anything may come; all ones are NaN as a number.
      bool takes_part = waiting.mask >> thread.source & 1;
      thread.given = takes_part ? threads[first + thread.source].bits : ~uint64_t(0);
      thread.state = READY;
    }
  }
  return any;
}

bool all_are(State state) {
  for (unsigned i = 0; i < count; ++i) {
    if (threads[i].state != state || threads[i].line != threads[0].line) return false;
  }
  return true;
}

// Let those go on who have waited for each other; false where nobody can.
bool release_threads() {
  bool any = false;
  for (unsigned first = 0; first < count; first += WARP) any |= shuffle_warp(first);
  if (any || !all_are(AT_BARRIER)) return any;
  for (unsigned i = 0; i < count; ++i) threads[i].state = READY;
  ++moment.now;
  return true;
}

bool run_block() {
  moment.block = ++moment.now;
  const Kernel &kernel = *running->kernel;
  if (kernel.shared != kernel.shared_end) {
    memset(kernel.shared, 0xff, (size_t)(kernel.shared_end - kernel.shared));
  }
  for (unsigned i = 0; i < count; ++i) {
    Index size = running->block;
    threads[i].state = READY;
    threads[i].line = 0;
    threads[i].index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
  }
  do {
    for (unsigned i = 0; i < count; ++i) {
      if (threads[i].state == READY && !resume(i)) return false;
      if (threads[i].state == ENDED) threads[i].line = 0;
    }
    if (all_are(ENDED)) return true;
  } while (release_threads());
  unsigned other = 0;
  while (threads[other].state == threads[0].state && threads[other].line == threads[0].line) ++other;
  const Thread &a = threads[0], &b = threads[other % count];
  fail(LAUNCH_FAILURE,
       "%s, block (%u, %u, %u): threads wait for each other for ever: thread 0 %s (line %u), thread %u "
       "%s (line %u)",
       running->name.c_str(), block.x, block.y, block.z, NAMES[a.state], a.line, other % count,
       NAMES[b.state], b.line);
  for (Thread &thread : threads) thread.begun = false;
  return false;
}

void touch_here(const void *address, size_t size, bool write) {
  if (!current) return;  // a module that is being loaded
  const char *start = (const char *)address, *own = stack_of(moment.thread);
  if (start >= own && start < own + STACK) return;
  Error error;
  if (const char *why = touch(moment, start, size, write, &error)) {
    char what[40];
    snprintf(what, sizeof what, "%s %zu bytes at", write ? "writes" : "reads", size);
    stop(error, what, address, why);
  }
}

}  // namespace

void Launch::run() const {
  if (failed()) return;
  if (!stacks) {
    stacks = (char *)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
  }
  std::vector<void *> places;
  char *place = const_cast<char *>(this->arguments.data());
  for (size_t i = 0; i < kernel->count; ++i, place += 16) places.push_back(place);
  running = this;
  ::arguments = places.data();
  count = this->block.x * this->block.y * this->block.z;
  moment.launch = moment.now + 1;
  share(kernel->shared, kernel->shared_end);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        ::block = {x, y, z};
        if (!run_block()) return;
      }
    }
  }
}

// --- what kernels call ---

extern "C" {

Index cuda_on_cpu_thread() { return current->index; }
Index cuda_on_cpu_block() { return block; }
Index cuda_on_cpu_block_size() { return running->block; }
Index cuda_on_cpu_grid_size() { return running->grid; }

void cuda_on_cpu_barrier(unsigned line) {
  current->state = AT_BARRIER;
  current->line = line;
  pause();
}

uint64_t cuda_on_cpu_shuffle(unsigned line, unsigned mask, unsigned source, uint64_t bits) {
  if (!(mask >> moment.thread % WARP & 1)) stop(LAUNCH_FAILURE, "shuffles with a mask", nullptr, "which lacks it");
  current->state = AT_SHUFFLE;
  current->line = line;
  current->mask = mask;
  current->source = source;
  current->bits = bits;
  pause();
  return current->given;
}

// What g++ -fsanitize=thread and -fsanitize=alignment call; their own libraries are not there.
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
#define ACCESS(bytes)                                                                  \
  void __tsan_read##bytes(void *p) { touch_here(p, bytes, false); }                    \
  void __tsan_write##bytes(void *p) { touch_here(p, bytes, true); }                    \
  void __tsan_unaligned_read##bytes(void *p) { touch_here(p, bytes, false); }          \
  void __tsan_unaligned_write##bytes(void *p) { touch_here(p, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *p, size_t size) { touch_here(p, size, false); }
void __tsan_write_range(void *p, size_t size) { touch_here(p, size, true); }
void __ubsan_handle_type_mismatch_v1(void *, void *address) {
  stop(MISALIGNED_ADDRESS, "takes a vector at", address, "which is not aligned for it");
}
}
