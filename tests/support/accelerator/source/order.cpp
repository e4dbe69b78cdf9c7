#include "order.h"

#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>

namespace testacc {
namespace {

std::atomic<bool> checking{false};
std::mutex mutex;

// Of all streams; none ends.
std::vector<Clock>& clocks() {
  static auto* all = new std::vector<Clock>(kDevices);
  return *all;
}

// What the host has waited for: for whatever is called later it is over, on each stream.
Clock& over() {
  static auto* clock = new Clock();
  return *clock;
}

// Uses of freed blocks that the block's home does not know to be over, by home.
std::map<int, std::vector<Access>>& unknown() {
  static auto* accesses = new std::map<int, std::vector<Access>>();
  return *accesses;
}

std::vector<c10::DeviceIndex>& devices() {
  static auto* all = new std::vector<c10::DeviceIndex>{0, 1, 2, 3};
  return *all;
}

// Called once the host has waited for them.
std::vector<std::pair<Access, std::function<void()>>>& pending() {
  static auto* acts = new std::vector<std::pair<Access, std::function<void()>>>();
  return *acts;
}

uint64_t at(const Clock& clock, int stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

void merge(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

bool is_before(const Access& access, int stream) {
  return access.stream == stream || at(clocks()[stream], access.stream) >= access.time ||
      at(over(), access.stream) >= access.time;
}

std::string named(int stream) {
  std::ostringstream text;
  int id = stream < kDevices ? 0 : stream - kDevices + 1;
  text << "stream " << id << " of " << c10::Device(kType, devices()[stream]);
  return text.str();
}

void refuse(const Access& later, const char* does, const Access& earlier, const char* did) {
  if (checking && !is_before(earlier, later.stream)) {
    TORCH_CHECK(
        false,
        "a wait is missing: ",
        later.by,
        " on ",
        named(later.stream),
        " ",
        does,
        " memory that ",
        earlier.by,
        " on ",
        named(earlier.stream),
        " ",
        did,
        ", and waits for no event that was recorded after that");
  }
}

} // namespace

void begin_order(bool checked) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& clock : clocks()) {
    merge(over(), clock);
  }
  unknown().clear();
  pending().clear();
  checking = checked;
}

int number_of(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (stream.id() == 0) {
    return stream.device_index();
  }
  auto number = static_cast<size_t>(kDevices + stream.id() - 1);
  if (number >= clocks().size()) {
    clocks().resize(number + 1);
    devices().resize(number + 1);
  }
  devices()[number] = stream.device_index();
  return static_cast<int>(number);
}

Access advance(int stream, std::string by) {
  std::lock_guard<std::mutex> lock(mutex);
  Clock& clock = clocks()[stream];
  clock.resize(std::max(clock.size(), static_cast<size_t>(stream) + 1));
  return {stream, ++clock[stream], std::move(by)};
}

void read(Uses& uses, const Access& access) {
  std::lock_guard<std::mutex> lock(mutex);
  if (uses.written) {
    refuse(access, "reads", *uses.written, "writes");
  }
  uses.read.insert_or_assign(access.stream, access);
}

void write(Uses& uses, const Access& access) {
  std::lock_guard<std::mutex> lock(mutex);
  if (uses.written) {
    refuse(access, "writes", *uses.written, "writes");
  }
  for (const auto& [stream, earlier] : uses.read) {
    refuse(access, "writes", earlier, "reads");
  }
  uses.read.clear();
  uses.written = access;
}

void record(Uses& uses, int stream) {
  std::lock_guard<std::mutex> lock(mutex);
  uses.recorded.insert(stream);
}

void give_back(const Uses& uses) {
  std::lock_guard<std::mutex> lock(mutex);
  auto note = [&](const Access& access) {
    if (!is_before(access, uses.home) && uses.recorded.count(access.stream) == 0) {
      unknown()[uses.home].push_back(access);
    }
  };
  if (uses.written) {
    note(*uses.written);
  }
  for (const auto& [stream, access] : uses.read) {
    note(access);
  }
}

void hand_out(int home) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = unknown().find(home);
  if (found == unknown().end()) {
    return;
  }
  auto accesses = std::move(found->second);
  unknown().erase(found);
  for (const auto& access : accesses) {
    TORCH_CHECK(
        !checking || is_before(access, home),
        "record_stream is missing: ",
        named(home),
        " may hand out memory that was freed while ",
        access.by,
        " used it on ",
        named(access.stream));
  }
}

void wait(int stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(clocks()[stream], clock);
}

Clock clock_of(int stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return clocks()[stream];
}

void once_over(const Access& access, std::function<void()> act) {
  std::lock_guard<std::mutex> lock(mutex);
  pending().emplace_back(access, std::move(act));
}

std::atomic<int64_t> host_waits_{0};
std::mutex acting;

void act(const Clock& clock);

int64_t host_waits() {
  return host_waits_;
}

void wait_on_host(const Clock& clock) {
  host_waits_++;
  {
    std::lock_guard<std::mutex> lock(mutex);
    merge(over(), clock);
  }
  std::lock_guard<std::mutex> whole(acting); // another thread that waits finds it done
  act(clock);
}

bool let_act(const Clock& clock) {
  // Who asks holds Python's lock, for which another thread may wait as it acts.
  std::unique_lock<std::mutex> whole(acting, std::try_to_lock);
  if (whole.owns_lock()) {
    act(clock);
  }
  return whole.owns_lock();
}

void act(const Clock& clock) {
  std::vector<std::function<void()>> acts;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto& left = pending();
    auto is_over = [&](const auto& each) { return at(clock, each.first.stream) >= each.first.time; };
    for (auto& each : left) {
      if (is_over(each)) {
        acts.push_back(std::move(each.second));
      }
    }
    left.erase(std::remove_if(left.begin(), left.end(), is_over), left.end());
  }
  for (const auto& act : acts) {
    act();
  }
}

void wait_on_host(c10::DeviceIndex device) {
  Clock clock;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t stream = 0; stream < clocks().size(); stream++) {
      if (devices()[stream] == device) {
        merge(clock, clocks()[stream]);
      }
    }
  }
  wait_on_host(clock);
}

} // namespace testacc
