// Device memory: one range of addresses that the host cannot touch, and who touched what.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "device.h"
#include "lock.h"

namespace device {

namespace {

constexpr size_t PAGE = 4096, ADDRESSES = size_t(1) << 40;
constexpr unsigned MANY = 2047;  // in place of a thread's number (below 1024)

// The last write and the last read of a byte: interval and thread.
struct Cell {
  uint64_t write, read;
};
uint64_t packed(uint64_t interval, unsigned thread) { return interval << 11 | thread; }

struct Memory {
  char *begin, *end;
  Cell *cells;
};

Error first_error = SUCCESS;
char first_words[1024];

std::map<const char *, Memory> live;  // by the end
Memory shared_memory, *last;  // last: that was found by an address
char *range, *next;  // all of the device's addresses; those that were given out so far
unsigned working;
struct sigaction before;

// A fault of the host's, mostly: a device pointer that was read as if it were its own.
void on_fault(int signal, siginfo_t *info, void *context) {
  if (is_device(info->si_addr) && !working) {
    char text[160];
    int size = snprintf(text, sizeof text, "cuda_on_cpu: the host touched device memory at %p\n",
                        info->si_addr);
    if (write(2, text, (size_t)size) < 0) abort();
  }
  sigaction(signal, &before, nullptr);  // which gets the same fault when the access is tried again
}

void reserve() {
  if (range) return;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  range = next = (char *)mmap(nullptr, ADDRESSES, PROT_NONE, flags, -1, 0);
  if (range == MAP_FAILED) {
    perror("cuda_on_cpu: no addresses for device memory");
    abort();
  }
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
}

Memory *memory_at(const char *address) {
  if (address >= shared_memory.begin && address < shared_memory.end) return &shared_memory;
  if (last && address >= last->begin && address < last->end) return last;
  auto found = live.upper_bound(address);
  if (found == live.end() || address < found->second.begin) return nullptr;
  return last = &found->second;
}

// In another block of this launch, or by another thread since the last barrier.
bool races(const Moment &moment, uint64_t other) {
  uint64_t interval = other >> 11;
  if (interval < moment.launch) return false;
  return interval < moment.block || (interval == moment.now && (other & MANY) != moment.thread);
}

}  // namespace

Error failed() { return first_error; }
const char *words() { return first_words; }

Error fail(Error error, const char *format, ...) {
  if (!first_error) {
    first_error = error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(first_words, sizeof first_words, format, arguments);
    va_end(arguments);
  }
  return error;
}

Working::Working() {
  if (!working++ && next != range) mprotect(range, (size_t)(next - range), PROT_READ | PROT_WRITE);
}
Working::~Working() {
  if (!--working && next != range) mprotect(range, (size_t)(next - range), PROT_NONE);
}

char *allocate(size_t size) {
  reserve();
  size_t pages = (size + PAGE - 1) / PAGE * PAGE;
  if (!size || pages > (size_t)(range + ADDRESSES - next)) return nullptr;
  char *begin = next;
  next += pages + PAGE;
  mprotect(begin, pages, PROT_READ | PROT_WRITE);
  memset(begin, 0xff, size);
  if (!working) mprotect(begin, pages, PROT_NONE);
  live[begin + size] = {begin, begin + size, (Cell *)calloc(size, sizeof(Cell))};
  return begin;
}

bool release(char *address) {
  Memory *memory = memory_at(address);
  if (!memory || memory->begin != address) return false;
  madvise(address, (size_t)(memory->end - address), MADV_DONTNEED);
  free(memory->cells);
  last = nullptr;
  live.erase(memory->end);
  return true;
}

bool is_device(const void *address) { return address >= range && address < next; }

bool reachable(const char *what, const void *address, size_t size) {
  const char *start = (const char *)address;
  Memory *memory = memory_at(start);
  if (!size || (memory && size <= (size_t)(memory->end - start))) return true;
  fail(ILLEGAL_ADDRESS, "%s of %zu bytes at %p: no device memory, or not so much", what, size, address);
  return false;
}

void share(char *begin, char *end) {
  free(shared_memory.cells);
  shared_memory = {begin, end, (Cell *)calloc((size_t)(end - begin) + 1, sizeof(Cell))};
}

const char *touch(Moment moment, const char *address, size_t size, bool write, Error *error) {
  Memory *memory = memory_at(address);
  *error = ILLEGAL_ADDRESS;
  if (!memory) return is_device(address) ? "which is not allocated" : "which is not the device's";
  if (size > (size_t)(memory->end - address)) return "past the end of an allocation";
  *error = LAUNCH_FAILURE;
  if (memory == &shared_memory) moment.launch = moment.block;  // every block has its own
  uint64_t now = packed(moment.now, moment.thread);
  for (Cell *cell = memory->cells + (address - memory->begin), *end = cell + size; cell != end; ++cell) {
    if (races(moment, cell->write)) return "which another thread writes, with no barrier between";
    if (write) {
      if (races(moment, cell->read)) return "which another thread reads, with no barrier between";
      cell->write = now;
    } else if (cell->read >> 11 != moment.now) {
      // One of another block that read it is forgotten here unless marked as MANY's.
      bool kept = cell->read >> 11 >= moment.launch && cell->read >> 11 < moment.block;
      cell->read = kept ? packed(moment.launch, MANY) : now;
    } else if (cell->read != now) {
      cell->read = packed(moment.now, MANY);
    }
  }
  return nullptr;
}

}  // namespace device

std::recursive_mutex &cuda_on_cpu_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}
