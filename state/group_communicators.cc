#include "state/group_communicators.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "collectives/subgroups.h"

namespace composable {
namespace {

void WarnOfOne() {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  TORCH_WARN(
      "reshard_after_forward=1 (int) means resharding parameters to world size "
      "1, that is, keeping them, instead of reshard_after_forward=true "
      "(bool).");
}

// The ranks of `shard` among which the part is gathered.
ProcessGroupPtr PostForwardGroup(const ProcessGroupPtr& shard, int64_t size) {
  std::vector<int64_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), shard->getRank() / size * size);
  return SubgroupOf(shard, ranks);
}

}  // namespace

void CheckMesh(const DeviceMesh& mesh) {
  if (!mesh.defined()) return;
  TORCH_CHECK_VALUE(mesh.ndim() == 1 || mesh.ndim() == 2,
                    "fully_shard expects a 1D or 2D DeviceMesh but got ",
                    mesh.text(),
                    ". Slice one: mesh[{\"replicate\", "
                    "\"shard\"}].");
  TORCH_CHECK_VALUE(
      mesh.ndim() == 1 || !mesh.mesh_dim_names().empty(),
      "Please init the 2D mesh for HSDP with mesh_dim_names specified: the "
      "first names the replicas, the second the ranks to shard over. Got ",
      mesh.text(), ".");
}

GroupCommunicators MakeGroupCommunicators(const DeviceMesh& mesh,
                                          c10::DeviceType device,
                                          ReshardAfterForward& reshard) {
  CheckMesh(mesh);
  const DeviceMesh used =
      mesh.defined() ? mesh : DeviceMesh(default_process_group());
  const ProcessGroupPtr shard = used.get_group(-1);
  GroupCommunicators communicators(Communicator(shard, device));
  if (used.ndim() == 2) {
    communicators.replicate = Communicator(used.get_group(0), device);
  }
  if (!reshard.group_size()) return communicators;
  const int64_t size = *reshard.group_size();
  const int64_t shards = shard->getSize();
  TORCH_CHECK_VALUE(
      1 <= size && size <= shards && shards % size == 0,
      "If passing reshard_after_forward as an int, it should be a factor of ",
      shards, ", the number of ranks that are sharded over, not ", size, ".");
  if (size == 1) WarnOfOne();
  if (size == 1 || size == shards) {
    reshard = size != 1;
  } else {
    communicators.post_forward =
        Communicator(PostForwardGroup(shard, size), device);
  }
  return communicators;
}

}  // namespace composable
