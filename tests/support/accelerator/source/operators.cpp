// The operators of the devices: the CPU's, but for those that make memory or that torch would choose otherwise here.
#include "call.h"
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <array>
#include <unordered_set>

namespace testacc {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Boxed = torch::CppFunction;

constexpr c10::DispatchKeySet kDevice(c10::DispatchKey::PrivateUse1);

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return target.copy_(from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::Tensor target = to;
  return target.resize_(from.sizes()).copy_(from);
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pinned,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(at::kStrided) == at::kStrided, "the test accelerator has strided tensors only");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), kDevice, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> /*pinned*/) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kDevice, at::dtype_or_default(dtype));
}

at::Tensor& set_to(
    at::Tensor& self,
    const at::Storage& storage,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  TORCH_CHECK(
      storage.device() == self.device(),
      "Attempted to set the storage of a tensor on device \"",
      self.device(),
      "\" to a storage on different device \"",
      storage.device(),
      "\"");
  auto needed = at::detail::computeStorageNbytes(size, stride, self.itemsize(), offset);
  if (needed > storage.nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, needed);
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_source(
    at::Tensor& self,
    at::Storage storage,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  if (stride.empty()) {
    auto dense = c10::contiguous_strides(size);
    return set_to(self, storage, offset, size, dense);
  }
  return set_to(self, storage, offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_to(self, storage, 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_to(self, none, 0, {0}, {1});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// For `tensor.data = other`: as between the CPU and a GPU, and not as torch has it for backends that are not its own.
bool may_take_data_of(const at::Tensor& self, const at::Tensor& other) {
  auto dense = [](const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.is_meta(); };
  return dense(self) && dense(other);
}

// torch's kernel for accelerators draws and rounds otherwise than the CPU's.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  return input * at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// torch chooses among kernels for attention by the kind of device; here as on the CPU.
int64_t attention_kernel(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout_p,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  if (mask && mask->requires_grad()) {  // which the CPU's operator is not told of
    return static_cast<int64_t>(at::SDPBackend::math);
  }
  return at::_fused_sdp_choice(query, key, value, mask, dropout_p, causal, scale, grouped);
}

// For operators that torch makes of others, and for accelerators of others than for CPUs: on copies there.
void through_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  check_operands(op, stack);
  size_t first = stack->size() - arguments.size();
  std::optional<c10::Device> device;
  auto moved = [&](const at::Tensor& tensor) {
    if (on_device(tensor)) {
      device = tensor.device();
      return tensor.to(at::kCPU);
    }
    return tensor;
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = moved(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(moved(tensor));
      }
      value = tensors;
    }
  }
  op.callBoxed(stack);
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    if ((*stack)[i].isTensor() && device) {
      (*stack)[i] = (*stack)[i].toTensor().to(*device);
    }
  }
}

const std::unordered_set<std::string>& written_here() {
  static const std::unordered_set<std::string> names{
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Storage",
      "aten::set_.source_Tensor",
      "aten::set_",
      "aten::record_stream",
      "aten::copy_",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
      "aten::native_dropout",
      "aten::is_pinned",
      "aten::_pin_memory"};
  return names;
}

constexpr std::array kRecurrent{"lstm.input", "lstm.data", "gru.input", "gru.data", "lstm_cell", "gru_cell"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(Boxed::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("copy_", Boxed::makeFromBoxedFunction<&copy_on_host>());
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("native_dropout", &native_dropout);
  m.impl("dropout", &dropout);
  m.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
  for (const char* name : kRecurrent) {
    m.impl(name, Boxed::makeFromBoxedFunction<&run_on_host>());
  }
  m.impl("convolution", Boxed::makeFromBoxedFunction<&run_on_host>());
  m.impl("convolution_backward", Boxed::makeFromBoxedFunction<&run_on_host>());
  // Whole, and not as torch would take them apart for a backend that has none of their parts.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || written_here().count(full_name(name)) != 0) {
      continue;
    }
    auto op = dispatcher.findOp(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      m.impl(full_name(name).c_str(), Boxed::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
  m.impl("dropout", &dropout);
  for (const char* name : kRecurrent) {
    m.impl(name, Boxed::makeFromBoxedFunction<&through_host>());
  }
}

} // namespace
} // namespace testacc

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &testacc::attention_kernel);

} // namespace at::native
