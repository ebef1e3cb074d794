// Memory for collectives from the allocator of the process group, where its
// backend has one: NCCL registers such memory with the network.
//
//   if (composable::SupportsAllocation(group, c10::kCUDA)) {
//     handle.set_custom_all_gather(
//         std::make_shared<composable::ProcessGroupAllocAllGather>(group));
//   }
#pragma once

#include <utility>

#include "collectives/custom_collectives.h"

namespace composable {

// Whether the backend of `group` for the present device of that type allocates.
bool SupportsAllocation(const ProcessGroupPtr& group, c10::DeviceType device);

class ProcessGroupAllocAllGather final : public DefaultAllGather {
 public:
  explicit ProcessGroupAllocAllGather(ProcessGroupPtr group)
      : group_(std::move(group)) {}
  at::Tensor allocate(int64_t size, c10::ScalarType dtype,
                      c10::Device device) override;

 private:
  ProcessGroupPtr group_;
};

class ProcessGroupAllocReduceScatter final : public DefaultReduceScatter {
 public:
  explicit ProcessGroupAllocReduceScatter(ProcessGroupPtr group)
      : group_(std::move(group)) {}
  at::Tensor allocate(int64_t size, c10::ScalarType dtype,
                      c10::Device device) override;

 private:
  ProcessGroupPtr group_;
};

}  // namespace composable
