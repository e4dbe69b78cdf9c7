// Four devices over host memory, as a backend of torch (PrivateUse1): what the files of this extension share.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace testacc {

constexpr c10::DeviceIndex kDevices = 4;
constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// This thread's device.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);

// `index`, or this thread's device where that is -1.
c10::DeviceIndex index_of(c10::DeviceIndex index);

// The bytes that `device` may hold at once; those that it holds count from now on, too.
void set_limit(c10::DeviceIndex device, size_t bytes);
size_t limit_of(c10::DeviceIndex device);

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// Memory of the host that now belongs to `device`: it counts there until it is freed.
c10::DataPtr adopt(c10::DeviceIndex device, size_t bytes, c10::DataPtr host);

// Who has used it; null for memory that is no device's.
struct Uses;
Uses* uses_of(const c10::DataPtr& data);

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The CPU's generator that `generator`, one of a device, draws from.
const at::Generator& host_generator(const at::Generator& generator);

} // namespace testacc
