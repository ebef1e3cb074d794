#include "collectives/process_group_memory.h"

#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace composable {
namespace {

at::Tensor AllocateFrom(const ProcessGroupPtr& group, int64_t size,
                        c10::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions(dtype).device(device);
  const auto backend = group->getBackend(device.type());
  return backend->supportsTensorAlloc(device.index())
             ? backend->allocateTensor(size, options)
             : at::empty({size}, options);
}

}  // namespace

bool SupportsAllocation(const ProcessGroupPtr& group, c10::DeviceType device) {
  return group->getBackend(device)->supportsTensorAlloc(
      device == c10::kCPU ? -1 : 0);
}

at::Tensor ProcessGroupAllocAllGather::allocate(int64_t size,
                                                c10::ScalarType dtype,
                                                c10::Device device) {
  return AllocateFrom(group_, size, dtype, device);
}

at::Tensor ProcessGroupAllocReduceScatter::allocate(int64_t size,
                                                    c10::ScalarType dtype,
                                                    c10::Device device) {
  return AllocateFrom(group_, size, dtype, device);
}

}  // namespace composable
