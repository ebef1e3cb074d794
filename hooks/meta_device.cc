#include "hooks/meta_device.h"

#include "state/tensor_access.h"

namespace composable {

MetaDevice::MetaDevice() : include_(internal::kGuardKey) { ++depth_; }

MetaDevice::~MetaDevice() { --depth_; }

void MakeOnMeta(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  bool takes_tensor = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    takes_tensor |= stack[first + i].isTensor();
    if (arguments[i].name() != "device" || takes_tensor) continue;
    c10::IValue& device = stack[first + i];
    if (device.isNone() || (device.isDevice() && device.toDevice().is_cpu())) {
      device = c10::Device(c10::kMeta);
    }
  }
}

}  // namespace composable
