// Devices, streams, events and random generators, as torch asks a backend for them.
#include "device.h"
#include "order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>

namespace testacc {
namespace {

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kDevices> these_streams{};
std::atomic<c10::StreamId> streams{0};

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override {
    return {kType, current_device()};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    this_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    auto index = index_of(device.index());
    return stream(index, these_streams.at(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*urgent*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream(index_of(device.index()), ++streams);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto index = next.device_index();
    return stream(index, std::exchange(these_streams.at(index), next.id()));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true; // who has not waited knows nothing, all the same
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(clock_of(number_of(stream)));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    wait_on_host(index_of(device));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/)
      const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto* recorded = static_cast<Event*>(*event);
    recorded->clock = clock_of(number_of(stream));
    recorded->when = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait(number_of(stream), static_cast<Event*>(event)->clock);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || let_act(static_cast<Event*>(event)->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait_on_host(static_cast<Event*>(event)->clock);
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*device*/) const override {
    std::chrono::duration<double, std::milli> between = static_cast<Event*>(to)->when - static_cast<Event*>(from)->when;
    return between.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }

 private:
  static c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws what the CPU's generator with its seed would draw.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device, at::Generator drawing = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(drawing)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.unsafeGetGeneratorImpl()->seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator host;

 private:
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device_.index(), host.clone());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(index_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(index_of(device));
  }
  at::Device getDeviceFromPtr(void* /*data*/) const override {
    return {kType, current_device()};
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto before = exchange_device(impl->device().index());
    c10::DataPtr fresh;
    try {
      fresh = device_allocator()->allocate(bytes);
    } catch (...) {
      exchange_device(before);
      throw;
    }
    exchange_device(before);
    if (auto kept = std::min(bytes, impl->nbytes())) {
      device_allocator()->copy_data(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

struct Registered {
  Registered() {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} registered;

} // namespace

c10::DeviceIndex current_device() {
  return this_device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  if (index < 0) { // none: the device stays
    return this_device;
  }
  TORCH_CHECK(index < kDevices, "there are ", int{kDevices}, " devices, and none of index ", int{index});
  return std::exchange(this_device, index);
}

int current_stream(c10::DeviceIndex device) {
  return number_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), these_streams.at(device)));
}

c10::DeviceIndex index_of(c10::DeviceIndex index) {
  return index < 0 ? this_device : index;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::array<at::Generator, kDevices>{
      at::make_generator<DeviceGenerator>(0),
      at::make_generator<DeviceGenerator>(1),
      at::make_generator<DeviceGenerator>(2),
      at::make_generator<DeviceGenerator>(3)};
  return all->at(device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device);
}

const at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

} // namespace testacc
