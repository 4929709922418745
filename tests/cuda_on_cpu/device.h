// A GPU for tests, played by this CPU: its memory (memory.cpp), the threads of a block (block.cpp),
// streams and graphs (streams.cpp), behind the driver's (driver.cpp) and the runtime's (runtime.cpp)
// functions that libtvm_runtime_cuda and tests call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernel_info.h"

namespace device {

enum Error {  // numbers that the driver and the runtime share
  SUCCESS = 0,
  INVALID_VALUE = 1,
  NO_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  OUT_OF_RESOURCES = 701,
  MISALIGNED_ADDRESS = 716,
  LAUNCH_FAILURE = 719,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_IMPLICIT = 906,
};

// What went wrong first, in words; all calls return its number from then on.
Error failed();
const char *words();
Error fail(Error error, const char *format, ...) __attribute__((format(printf, 2, 3)));

// --- memory.cpp ---

// Out of the host's reach but while the device works, never at an address that was used before,
// full of 0xff: NaN as numbers.
char *allocate(size_t size);
bool release(char *address);
bool is_device(const void *address);
// Inside, this thread is the device.
struct Working {
  Working();
  ~Working();
};
// Whether bytes of the device can be copied from or to here; if not, the device has failed.
bool reachable(const char *what, const void *address, size_t size);

// Who touches memory: a thread of a block between two barriers. Intervals are numbered through all
// launches.
struct Moment {
  uint64_t launch, block, now;  // the first interval of the launch and of the block; this one
  unsigned thread;
};
// Why a thread may not touch these bytes now, in words; nullptr where it may, which is then noted.
const char *touch(Moment moment, const char *address, size_t size, bool write, Error *error);
// Memory beside the allocations: what `__shared__` variables of a kernel are.
void share(char *begin, char *end);

// --- block.cpp ---

struct Launch {
  std::string name;
  const Kernel *kernel;
  Index grid, block;
  std::vector<char> arguments;  // copies, as the driver makes them
  void run() const;
};

// --- streams.cpp: work is done when somebody waits for it, and not before ---

struct Stream;
struct Graph;
struct Event;
using Work = std::function<void()>;

Stream *stream_of(void *handle);  // nullptr where it is none
Stream *new_stream(bool blocking);
void drop(Stream *stream);
Error queue(Stream *stream, Work work);
Error wait_for(Stream *stream);  // nullptr: for all
Error begin_capture(Stream *stream);
Error end_capture(Stream *stream, Graph **graph);
bool is_capturing(Stream *stream);  // nullptr: any
Graph *copy(const Graph *graph);
void drop(Graph *graph);
Error launch(const Graph *graph, Stream *stream);
Event *new_event();
void drop(Event *event);
Error record(Event *event, Stream *stream);
Error wait_for(Event *event);
Error let_wait(Stream *stream, Event *event);
Error seconds_between(const Event *start, const Event *end, double *seconds);

}  // namespace device
