// The communicators of a sharded group, from the mesh that it is sharded over.
//
//   composable::GroupCommunicators communicators =
//       composable::MakeGroupCommunicators(mesh, c10::kCPU, reshard_after_forward);
//   communicators.shard.size();              // ranks that share the parameters
//   communicators.replicate.has_value();     // hybrid sharding (HSDP)
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <utility>

#include "collectives/communicator.h"
#include "collectives/device_mesh.h"
#include "state/reshard_after_forward.h"

namespace composable {

struct GroupCommunicators {
  // NOLINTNEXTLINE(google-explicit-constructor): sharded over all, no more.
  GroupCommunicators(Communicator all) : shard(std::move(all)) {}

  Communicator shard;
  // Those that hold the same shard; nothing if there is one replica by nature.
  std::optional<Communicator> replicate;
  // For reshard_after_forward(k).
  std::optional<Communicator> post_forward;
};

// Throws c10::ValueError if a group can't be sharded over `mesh`: not one or two
// dimensions, two without names. An empty mesh is right.
void CheckMesh(const DeviceMesh& mesh);

// (collective over the mesh) An empty mesh stands for the default process group.
// Replaces a number in `reshard` that stands for true or false. Throws
// c10::ValueError if a number is no factor of the shard ranks, or this rank is
// not part of the mesh.
GroupCommunicators MakeGroupCommunicators(const DeviceMesh& mesh,
                                          c10::DeviceType device,
                                          ReshardAfterForward& reshard);

}  // namespace composable
