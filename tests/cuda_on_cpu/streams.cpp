// Streams as queues whose work is done when somebody waits for it, youngest stream first: what was
// not ordered or not waited for shows as wrong results.
#include <chrono>
#include <deque>
#include <memory>
#include <set>
#include <utility>

#include "device.h"

namespace device {

struct Graph {
  std::vector<Work> nodes;
};

struct Stream {
  bool blocking;  // ordered with the default stream
  std::unique_ptr<Graph> capturing;
  struct Item {
    std::vector<std::pair<Stream *, uint64_t>> after;
    Work work;
  };
  std::deque<Item> queue;
  uint64_t done = 0, given = 0;
};

struct Event {
  Stream *stream = nullptr;
  uint64_t number = 0;
  double time = -1;
};

namespace {

Stream default_stream{true, nullptr, {}};
std::vector<Stream *> streams;  // the others, by age
std::set<Stream *> dropped;     // kept, since events may name them

void run_until(Stream *stream, uint64_t number) {
  if (stream->done >= number) return;
  Working here;
  while (stream->done < number) {
    Stream::Item item = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (auto &[other, until] : item.after) run_until(other, until);
    if (item.work && !failed()) item.work();
    ++stream->done;
  }
}

Error put(Stream *stream, Stream::Item item) {
  if (failed()) return failed();
  if (stream->capturing) {
    if (!item.after.empty()) return CAPTURE_UNSUPPORTED;
    stream->capturing->nodes.push_back(item.work);
    return SUCCESS;
  }
  if (stream == &default_stream) {
    for (Stream *other : streams) {
      if (!other->blocking) continue;
      if (other->capturing) return CAPTURE_IMPLICIT;
      item.after.push_back({other, other->given});
    }
  } else if (stream->blocking) {
    item.after.push_back({&default_stream, default_stream.given});
  }
  stream->queue.push_back(std::move(item));
  ++stream->given;
  return SUCCESS;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Stream *stream_of(void *handle) {
  if (!handle || handle == (void *)1) return &default_stream;  // 1: cudaStreamLegacy
  for (Stream *stream : streams) {
    if (stream == handle && !dropped.count(stream)) return stream;
  }
  return nullptr;
}

Stream *new_stream(bool blocking) {
  streams.push_back(new Stream{blocking, nullptr, {}});
  return streams.back();
}

void drop(Stream *stream) { dropped.insert(stream); }

Error queue(Stream *stream, Work work) { return put(stream, {{}, std::move(work)}); }

Error wait_for(Stream *stream) {
  if (is_capturing(stream)) return CAPTURE_UNSUPPORTED;
  if (stream) {
    run_until(stream, stream->given);
  } else {
    for (size_t i = streams.size(); i--;) run_until(streams[i], streams[i]->given);
    run_until(&default_stream, default_stream.given);
  }
  return failed();
}

Error begin_capture(Stream *stream) {
  if (stream == &default_stream || stream->capturing) return CAPTURE_UNSUPPORTED;
  stream->capturing = std::make_unique<Graph>();
  return failed();
}

Error end_capture(Stream *stream, Graph **graph) {
  if (!stream->capturing) return INVALID_VALUE;
  *graph = stream->capturing.release();
  return failed();
}

bool is_capturing(Stream *stream) {
  if (stream) return stream->capturing != nullptr;
  for (Stream *other : streams) {
    if (other->capturing) return true;
  }
  return false;
}

Graph *copy(const Graph *graph) { return new Graph(*graph); }
void drop(Graph *graph) { delete graph; }

Error launch(const Graph *graph, Stream *stream) {
  return queue(stream, [nodes = graph->nodes] {
    for (const Work &node : nodes) node();
  });
}

Event *new_event() { return new Event; }
void drop(Event *event) { (void)event; }  // kept: queued work may still write its time

Error record(Event *event, Stream *stream) {
  if (stream->capturing) return CAPTURE_UNSUPPORTED;
  event->time = -1;
  Error error = queue(stream, [event] { event->time = now(); });
  *event = {stream, stream->given, event->time};
  return error;
}

Error wait_for(Event *event) {
  if (event->stream) run_until(event->stream, event->number);
  return failed();
}

Error let_wait(Stream *stream, Event *event) {
  if (!event->stream) return failed();
  return put(stream, {{{event->stream, event->number}}, nullptr});
}

Error seconds_between(const Event *start, const Event *end, double *seconds) {
  if (!start->stream || !end->stream) return INVALID_HANDLE;
  if (start->time < 0 || end->time < 0) return NOT_READY;
  *seconds = end->time - start->time;
  return failed();
}

}  // namespace device
