// Calls of operators: each is the CPU's own, on the same memory, once its operands are known to lie on one device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace testacc {

bool on_device(const at::Tensor& tensor);

// With its overload, as registrations have it.
std::string full_name(const c10::OperatorName& name);

// Refuses operands on two devices.
void check_operands(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Kernels for any operator, and for a copy, whose operands may lie anywhere.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void copy_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace testacc
