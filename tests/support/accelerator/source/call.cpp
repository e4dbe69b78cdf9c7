#include "call.h"

#include "device.h"
#include "order.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <unordered_map>

namespace testacc {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kHost(c10::DispatchKey::CPU);
constexpr c10::DispatchKeySet kDevice(c10::DispatchKey::PrivateUse1);

// One call of an operator: its device, and the host's tensors over the same memory as its operands.
class Call {
 public:
  Call(const c10::OperatorHandle& op, bool mixed)
      : op_(op),
        indices_(
            op.schema().name().rfind("aten::index", 0) == 0 || op.schema().name() == "aten::_index_put_impl_"),
        mixed_(mixed) {}

  void check(const at::Tensor& tensor, bool written, bool index) {
    if (!tensor.defined()) {
      return;
    }
    if (on_device(tensor)) {
      note(tensor.device());
      used_.emplace_back(tensor, written);
    } else if (!mixed_ && !(index && indices_) && (tensor.dim() > 0 || written)) {
      other_ = tensor.device();
    }
    if (device_ && other_) {
      TORCH_CHECK(
          mixed_,
          "Expected all tensors to be on the same device, but found at least two devices, ",
          *device_,
          " and ",
          *other_,
          "! (operator ",
          op_.operator_name(),
          ")");
    }
  }

  // On the stream of its device, in order with what other streams do to its operands.
  void begin() {
    if (device_ && !views()) {
      access_ = advance(current_stream(device_->index()), op_.schema().name());
      use(*access_);
    }
  }

  // A copy from a device to another one runs on a stream of the first, and streams of both wait for each other.
  void begin_copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    auto stream = [](const at::Tensor& tensor) { return current_stream(tensor.device().index()); };
    int runs = stream(on_device(from) ? from : to);
    if (on_device(from) && on_device(to)) {
      wait(runs, clock_of(stream(to)));
    }
    access_ = advance(runs, op_.schema().name());
    use(*access_);
    if (on_device(from) && on_device(to)) {
      wait(stream(to), clock_of(runs));
    } else if (!non_blocking || (on_device(from) && !is_pinned(to.storage().data()))) {
      wait_on_host(clock_of(runs));
    }
  }

  const Access& access() const {
    return *access_;
  }

  void place(c10::Device device) {
    if (device.type() == kType && !device_) {
      device_ = c10::Device(kType, index_of(device.index()));
    }
  }

  at::Tensor host(const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      given_.emplace(tensor.unsafeGetTensorImpl(), tensor);
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == at::kStrided, "the test accelerator has strided tensors only (", op_.operator_name(), ")");
    auto found = operands_.find(tensor.unsafeGetTensorImpl());
    if (found == operands_.end()) {
      auto alias = make(storage(tensor.storage()), kHost, tensor);
      viewed_.emplace(alias.storage().unsafeGetStorageImpl(), tensor.key_set());
      found = operands_.emplace(tensor.unsafeGetTensorImpl(), Operand{tensor, std::move(alias)}).first;
      given_.emplace(found->second.alias.unsafeGetTensorImpl(), tensor);
    }
    return found->second.alias;
  }

  IValue host(const IValue& value, bool generator) {
    if (value.isTensor()) {
      return host(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        hosts.push_back(host(tensor));
      }
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        hosts.push_back(tensor ? std::optional<at::Tensor>(host(*tensor)) : std::nullopt);
      }
      return hosts;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      return c10::Device(c10::kCPU);
    }
    if (generator && device_) {
      if (value.isNone()) {
        return host_generator(default_generator(device_->index()));
      }
      auto given = value.toGenerator();
      TORCH_CHECK(
          given.device() == *device_,
          "Expected a '",
          *device_,
          "' device type for generator but found '",
          given.device(),
          "'");
      return host_generator(given);
    }
    return value;
  }

  // Operands may have been resized, and the host reads what is no tensor.
  void end() {
    if (access_ && (op_.schema().name() == "aten::_local_scalar_dense" || op_.schema().name() == "aten::equal")) {
      wait_on_host(clock_of(access_->stream));
    }
    for (auto& [impl, operand] : operands_) {
      auto* mine = operand.alias.unsafeGetTensorImpl();
      auto* theirs = storages_.at(operand.tensor.storage().unsafeGetStorageImpl()).unsafeGetStorageImpl();
      auto* storage = operand.tensor.storage().unsafeGetStorageImpl();
      if (theirs->nbytes() != storage->nbytes()) {
        auto bytes = theirs->nbytes();
        storage->set_data_ptr_noswap(
            adopt(storage->device().index(), bytes, theirs->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU))));
        storage->set_nbytes(bytes);
        theirs->set_data_ptr_noswap(c10::DataPtr(storage->mutable_data(), c10::kCPU));
      }
      if (mine->sizes() != impl->sizes() || mine->strides() != impl->strides()) {
        impl->set_storage_offset(mine->storage_offset());
        impl->set_sizes_and_strides(mine->sizes(), mine->strides());
      }
    }
  }

  IValue device(const IValue& value) {
    if (value.isTensor()) {
      return device(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(device(tensor));
      }
      return tensors;
    }
    return value;
  }

 private:
  struct Operand {
    at::Tensor tensor;
    at::Tensor alias;
  };

  void note(c10::Device device) {
    if (!device_) {
      device_ = device;
    } else if (*device_ != device) {
      other_ = device;
    }
  }

  static at::Tensor make(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
    return with_layout(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype()), like);
  }

  static at::Tensor with_layout(at::Tensor made, const at::Tensor& like) {
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    impl->_set_conj(like.is_conj());
    impl->_set_neg(like.is_neg());
    return made;
  }

  c10::Storage storage(const c10::Storage& own) {
    auto* impl = own.unsafeGetStorageImpl();
    auto found = storages_.find(impl);
    if (found == storages_.end()) {
      c10::Storage host(
          c10::Storage::use_byte_size_t(),
          impl->nbytes(),
          c10::DataPtr(impl->mutable_data(), c10::kCPU),
          c10::GetCPUAllocator(),
          /*resizable=*/true);
      owners_.emplace(host.unsafeGetStorageImpl(), own);
      found = storages_.emplace(impl, std::move(host)).first;
    }
    return found->second;
  }

  // What the operator has returned: an operand, a view of one, or new.
  at::Tensor device(const at::Tensor& made) {
    if (!made.defined() || !device_ || made.device().type() != c10::kCPU) {
      return made;
    }
    auto same = given_.find(made.unsafeGetTensorImpl());
    if (same != given_.end()) {
      return same->second;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        made.layout() == at::kStrided, "the test accelerator has strided tensors only (", op_.operator_name(), ")");
    auto* impl = made.storage().unsafeGetStorageImpl();
    auto owner = owners_.find(impl);
    auto viewed = viewed_.find(impl);
    if (viewed != viewed_.end()) { // in inference mode, too, it is a view of what that is
      return with_layout(
          at::detail::make_tensor<c10::TensorImpl>(
              c10::TensorImpl::VIEW, c10::Storage(owner->second), viewed->second, made.dtype()),
          made);
    }
    if (owner == owners_.end()) {
      auto bytes = impl->nbytes();
      c10::Storage own(
          c10::Storage::use_byte_size_t(),
          bytes,
          adopt(device_->index(), bytes, impl->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU))),
          device_allocator(),
          /*resizable=*/true);
      if (access_) {
        write(*uses_of(own.data_ptr()), *access_);
      }
      owner = owners_.emplace(impl, std::move(own)).first;
      kept_.push_back(made); // its storage's address names it
    }
    return make(owner->second, kDevice, made);
  }

  // Whether it hands on memory without a look at it.
  bool views() const {
    const auto& returns = op_.schema().returns();
    return op_.schema().name() == "aten::resize_" || std::any_of(returns.begin(), returns.end(), [](const auto& each) {
             return each.alias_info() != nullptr && !each.alias_info()->isWrite();
           });
  }

  void use(const Access& access) {
    for (bool written : {false, true}) { // who reads and writes has read first
      for (const auto& [tensor, writes] : used_) {
        auto* uses = uses_of(tensor.storage().data_ptr());
        if (uses != nullptr && writes == written) {
          written ? write(*uses, access) : read(*uses, access);
        }
      }
    }
  }

  const c10::OperatorHandle& op_;
  std::vector<std::pair<at::Tensor, bool>> used_;
  std::optional<Access> access_;
  bool indices_;
  bool mixed_;
  std::optional<c10::Device> device_;
  std::optional<c10::Device> other_;
  std::unordered_map<c10::TensorImpl*, Operand> operands_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> given_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_; // the host's by the device's
  std::unordered_map<c10::StorageImpl*, c10::Storage> owners_; // the device's by the host's
  std::unordered_map<c10::StorageImpl*, c10::DispatchKeySet> viewed_; // of an operand, by its storage on the host
  std::vector<at::Tensor> kept_;
};

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

void check(Call& call, const c10::Argument& argument, const IValue& value) {
  bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  if (value.isTensor()) {
    call.check(value.toTensor(), written, false);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      call.check(tensor, written, false);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor) {
        call.check(*tensor, written, true);
      }
    }
  } else if (value.isDevice()) {
    call.place(value.toDevice());
  }
}

void run(const c10::OperatorHandle& op, Stack* stack, bool mixed) {
  const auto& arguments = op.schema().arguments();
  Call call(op, mixed);
  size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    check(call, arguments[i], (*stack)[first + i]);
  }
  std::optional<at::Tensor> pinned; // which has the values once the host waits
  if (mixed) {
    at::Tensor to = (*stack)[first].toTensor();
    const at::Tensor from = (*stack)[first + 1].toTensor();
    bool non_blocking = (*stack)[first + 2].toBool();
    call.begin_copy(to, from, non_blocking);
    if (non_blocking && !on_device(to) && is_pinned(to.storage().data()) && to.is_non_overlapping_and_dense()) {
      pinned = to;
      (*stack)[first] = at::empty_strided(to.sizes(), to.strides(), to.options().pinned_memory(false));
    }
  } else {
    call.begin();
  }
  for (size_t i = 0; i < arguments.size(); i++) {
    (*stack)[first + i] = call.host((*stack)[first + i], takes_generator(arguments[i]));
  }
  op.redispatchBoxed(kHost, stack);
  call.end();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    (*stack)[i] = call.device((*stack)[i]);
  }
  if (pinned) {
    std::memset(pinned->mutable_data_ptr(), 0xff, pinned->nbytes()); // who is too early finds no numbers
    once_over(call.access(), [to = *pinned, values = stack->back().toTensor()] {
      std::memcpy(to.mutable_data_ptr(), values.const_data_ptr(), to.nbytes());
    });
    stack->back() = *pinned;
  }
}

} // namespace

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void check_operands(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  Call call(op, false);
  for (size_t i = 0; i < arguments.size(); i++) {
    check(call, arguments[i], (*stack)[stack->size() - arguments.size() + i]);
  }
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, false);
}

void copy_on_host(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, true);
}

} // namespace testacc
