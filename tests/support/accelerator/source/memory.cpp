// Memory of the devices: blocks of the host's, counted for each device, and refused beyond its limit.
#include "device.h"
#include "order.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <mutex>
#include <set>

namespace testacc {
namespace {

constexpr size_t kLimit = size_t{16} << 30;

struct Account {
  std::mutex mutex;
  c10::CachingAllocator::Stat bytes;
  c10::CachingAllocator::Stat blocks;
  size_t limit = kLimit;
  int64_t refused = 0;
};

// Never destroyed, as tensors may outlive static objects.
std::array<Account, kDevices>& accounts() {
  static auto* all = new std::array<Account, kDevices>();
  return *all;
}

struct Block {
  c10::DataPtr host;
  size_t bytes;
  c10::DeviceIndex device;
  Uses uses;
};

void charge(c10::DeviceIndex device, size_t bytes) {
  hand_out(current_stream(device));
  Account& account = accounts().at(device);
  std::lock_guard<std::mutex> lock(account.mutex);
  auto held = static_cast<size_t>(account.bytes.current);
  if (held + bytes > account.limit) {
    account.refused++;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        c10::Device(kType, device),
        " out of memory. Tried to allocate ",
        bytes,
        " bytes; it holds ",
        held,
        " of ",
        account.limit,
        " bytes.");
  }
  account.bytes.increase(bytes);
  account.blocks.increase(1);
}

void discharge(c10::DeviceIndex device, size_t bytes) {
  Account& account = accounts().at(device);
  std::lock_guard<std::mutex> lock(account.mutex);
  account.bytes.decrease(bytes);
  account.blocks.decrease(1);
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  give_back(block->uses);
  discharge(block->device, block->bytes);
  delete block;
}

// Takes over bytes that are charged already.
c10::DataPtr wrap(c10::DeviceIndex device, size_t bytes, c10::DataPtr host) {
  auto* block = new Block{std::move(host), bytes, device, {current_stream(device), {}, {}, {}}};
  return {block->host.get(), block, &free_block, c10::Device(kType, device)};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device();
    charge(device, bytes);
    try {
      return wrap(device, bytes, c10::GetCPUAllocator()->allocate(bytes));
    } catch (...) {
      discharge(device, bytes);
      throw;
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (auto* uses = uses_of(data)) {
      record(*uses, number_of(stream));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Account& account = accounts().at(index_of(device));
    std::lock_guard<std::mutex> lock(account.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.active_bytes[0] = account.bytes;
    stats.requested_bytes[0] = stats.reserved_bytes[0] = account.bytes;
    stats.allocation[0] = stats.active[0] = account.blocks;
    stats.num_ooms = account.refused;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Account& account = accounts().at(index_of(device));
    std::lock_guard<std::mutex> lock(account.mutex);
    account.bytes.reset_accumulated();
    account.blocks.reset_accumulated();
    account.refused = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Account& account = accounts().at(index_of(device));
    std::lock_guard<std::mutex> lock(account.mutex);
    account.bytes.reset_peak();
    account.blocks.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Account& account = accounts().at(index_of(device));
    std::lock_guard<std::mutex> lock(account.mutex);
    auto held = static_cast<size_t>(account.bytes.current);
    return {account.limit > held ? account.limit - held : 0, account.limit};
  }
};

// Host memory that devices may read and write while the host goes on: as any other here, but known as such.
struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::set<const void*> blocks;

  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory();
    return *memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* host = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard<std::mutex> lock(mutex);
    blocks.insert(host->get());
    return {host->get(), host, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  static void free_pinned(void* context) {
    auto* host = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> lock(get().mutex);
      get().blocks.erase(host->get());
    }
    delete host;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

DeviceMemory memory;
REGISTER_ALLOCATOR(kType, &memory);

} // namespace

void set_limit(c10::DeviceIndex device, size_t bytes) {
  Account& account = accounts().at(device);
  std::lock_guard<std::mutex> lock(account.mutex);
  account.limit = bytes;
}

size_t limit_of(c10::DeviceIndex device) {
  Account& account = accounts().at(device);
  std::lock_guard<std::mutex> lock(account.mutex);
  return account.limit;
}

Uses* uses_of(const c10::DataPtr& data) {
  auto* block = data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
  return block == nullptr ? nullptr : &block->uses;
}

c10::DeviceAllocator* device_allocator() {
  return &memory;
}

c10::Allocator* pinned_allocator() {
  return &PinnedMemory::get();
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(PinnedMemory::get().mutex);
  return PinnedMemory::get().blocks.count(data) > 0;
}

c10::DataPtr adopt(c10::DeviceIndex device, size_t bytes, c10::DataPtr host) {
  charge(device, bytes);
  return wrap(device, bytes, std::move(host));
}

} // namespace testacc
