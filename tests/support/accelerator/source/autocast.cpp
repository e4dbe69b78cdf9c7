// Autocast, with the CPU's lists of operators.
#include "call.h"
#include "device.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <unordered_set>

namespace testacc {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Boxed = torch::CppFunction;

const std::unordered_set<std::string>& in_lower_precision() {
  static const std::unordered_set<std::string> names{
      "aten::conv1d",
      "aten::conv2d",
      "aten::conv3d",
      "aten::conv_transpose1d",
      "aten::conv_transpose2d",
      "aten::conv_transpose3d",
      "aten::bmm",
      "aten::mm",
      "aten::linalg_vecdot",
      "aten::baddbmm",
      "aten::addmm",
      "aten::addbmm",
      "aten::linear",
      "aten::_convolution",
      "aten::matmul",
      "aten::conv_tbc",
      "aten::mkldnn_rnn_layer",
      "aten::scaled_dot_product_attention",
      "aten::_native_multi_head_attention"};
  return names;
}

const std::unordered_set<std::string>& in_widest_precision() {
  static const std::unordered_set<std::string> names{"aten::stack", "aten::cat", "aten::index_copy"};
  return names;
}

void autocast(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  const auto& name = op.schema().name();
  size_t first = stack->size() - op.schema().arguments().size();
  auto type = at::kFloat;
  if (in_lower_precision().count(name)) {
    type = at::autocast::get_autocast_dtype(kType);
  } else if (in_widest_precision().count(name)) {
    type = at::autocast::get_autocast_dtype(kType);
    for (size_t i = first; i < stack->size(); i++) {
      const IValue& value = (*stack)[i];
      if (value.isTensor()) {
        type = at::autocast::prioritize(type, value.toTensor(), kType);
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) {
          type = at::autocast::prioritize(type, tensor, kType);
        }
      }
    }
  }
  for (size_t i = first; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = at::autocast::cached_cast(type, value.toTensor(), kType);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(at::autocast::cached_cast(type, tensor, kType));
      }
      value = tensors;
    }
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(Boxed::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (op && name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) {
      m.impl(full_name(name).c_str(), Boxed::makeFromBoxedFunction<&autocast>());
    }
  }
}

} // namespace
} // namespace testacc
