// Where the shards live between steps, and so their gradients and the optimizer's
// state: with their parameters, or on the CPU.
//
//   composable::fully_shard(block,
//                           composable::FullyShardOptions().offload_policy(
//                               composable::CPUOffloadPolicy()));
//
// On a mesh of CPUs the shards are on the CPU anyway: the policy is accepted and
// changes nothing. On a mesh of CUDA devices a CPUOffloadPolicy is not
// implemented: fully_shard throws c10::NotImplementedError.
#pragma once

#include <string>

#include "collectives/device_mesh.h"

namespace composable {

// No offload.
class OffloadPolicy {
 public:
  OffloadPolicy() = default;
  bool to_cpu() const { return to_cpu_; }
  bool pin_memory() const { return pin_memory_; }
  // "none", "cpu" or "cpu, pin_memory".
  std::string text() const {
    if (!to_cpu_) return "none";
    return pin_memory_ ? "cpu, pin_memory" : "cpu";
  }

 protected:
  OffloadPolicy(bool to_cpu, bool pin_memory)
      : to_cpu_(to_cpu), pin_memory_(pin_memory) {}

 private:
  bool to_cpu_ = false;
  bool pin_memory_ = false;
};

// All of it is in the base, so that a copy of that is as good.
class CPUOffloadPolicy : public OffloadPolicy {
 public:
  // `pin_memory`: in page-locked memory, which copies to a device need to overlap
  // with computation.
  explicit CPUOffloadPolicy(bool pin_memory = true)
      : OffloadPolicy(/*to_cpu=*/true, pin_memory) {}
};

// Throws c10::NotImplementedError for what the devices of `mesh` can't do; an
// undefined mesh is one of CPUs.
void CheckOffloadPolicy(const OffloadPolicy& policy, const DeviceMesh& mesh);

}  // namespace composable
