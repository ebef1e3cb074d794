#include "state/offload_policy.h"

#include <c10/util/Exception.h>

namespace composable {

void CheckOffloadPolicy(const OffloadPolicy& policy, const DeviceMesh& mesh) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !policy.to_cpu() || !mesh.defined() || mesh.device_type() == "cpu",
      "fully_shard: offload_policy is CPUOffloadPolicy on ",
      mesh.defined() ? mesh.text() : std::string(),
      ", and shards of parameters on CUDA devices can't be kept on the CPU "
      "yet. "
      "Leave offload_policy at OffloadPolicy(), or use a mesh of device type "
      "\"cpu\", where the shards are on the CPU anyway.");
}

}  // namespace composable
