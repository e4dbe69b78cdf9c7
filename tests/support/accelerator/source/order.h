// Streams and events as logical clocks. Operators compute at once; what is checked is that they were ordered.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace testacc {

// How many operators of each stream, by its number, have come before.
using Clock = std::vector<uint64_t>;

// One operator's use of memory: the `time`-th of its stream.
struct Access {
  int stream;
  uint64_t time;
  std::string by;
};

// Who has used a block of memory.
struct Uses {
  int home; // the stream that it was allocated on
  std::optional<Access> written;
  std::map<int, Access> read; // since then, by stream
  std::set<int> recorded; // streams for which it is kept after it was freed: record_stream
};

// From now on, whether anything is refused below; all that was before is over.
void begin_order(bool checked);

int number_of(const c10::Stream& stream);
int current_stream(c10::DeviceIndex device); // this thread's

// One more operator of `stream`.
Access advance(int stream, std::string by);

// Refuse an operator that uses memory before what it needs is computed, as far as its stream knows.
void read(Uses& uses, const Access& access);
void write(Uses& uses, const Access& access);

// `stream` uses memory whose tensors may be gone before.
void record(Uses& uses, int stream);

// A block is freed: its home hands it out again, and may do so at once.
void give_back(const Uses& uses);

// `home` hands out memory: refused while another stream may still use what it was given back.
void hand_out(int home);

// All that `stream` does from now on comes after `clock`.
void wait(int stream, const Clock& clock);
Clock clock_of(int stream);

// Act once the host has waited for it.
void once_over(const Access& access, std::function<void()> act);

// All that the process does from now on comes after it: the host has waited.
void wait_on_host(const Clock& clock);
void wait_on_host(c10::DeviceIndex device);

// Act for what is over at `clock`, of which the host knows by a question: nothing else is ordered by that. False while
// another thread acts.
bool let_act(const Clock& clock);

// How often the host has waited: for an event, a stream, a device, or a value.
int64_t host_waits();

} // namespace testacc
