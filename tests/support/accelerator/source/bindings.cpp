// What Python sees of the extension.
#include "device.h"
#include "order.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/extension.h>

namespace testacc {
namespace {

struct Engine : torch::autograd::Engine {
  // Autograd has a thread for each device, of which it asked when its first backward began: there were none then.
  static void start() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*(&Engine::device_ready_queues_)).empty()) {
      (engine.*(&Engine::start_device_threads))();
    }
  }
};

} // namespace
} // namespace testacc

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace testacc;
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", &current_device);
  m.def("set_device", &exchange_device);
  m.def("set_limit", &set_limit);
  m.def("limit", &limit_of);
  m.def("default_generator", &default_generator);
  m.def("begin_order", &begin_order);
  m.def("host_waits", &host_waits);
  m.def("start_autograd", &Engine::start, pybind11::call_guard<pybind11::gil_scoped_release>());
}
