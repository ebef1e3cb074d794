// How a group of parameters is sharded, gathered and prefetched.
//
//   composable::fully_shard(block, composable::FullyShardOptions()
//                                      .reshard_after_forward(false));
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/device_mesh.h"
#include "state/all_gather_extension.h"
#include "state/mixed_precision_policy.h"
#include "state/offload_policy.h"
#include "state/placement.h"
#include "state/reshard_after_forward.h"

namespace composable {

// When the gather of the next group of a backward is issued: before the
// operators of the present group (more overlap, one more group in memory),
// after them, or only when it is read.
enum class BackwardPrefetch : uint8_t { kBackwardPre, kBackwardPost, kNone };

struct FullyShardOptions {
  // --- Behaviour ---
  // The ranks: those to shard over if it has one dimension (a process group may
  // be given instead); with two, named ones, those that hold replicas of each
  // shard, then those to shard over. By default all of the default process
  // group.
  TORCH_ARG(DeviceMesh, mesh) = DeviceMesh();
  // Whether parameters may be freed between forward and backward. true: they
  // may, as soon as another group needs the memory. false: they stay, which
  // saves the gather in backward. Default: false for the root of the tree,
  // which backward needs first, true for all others.
  // A number k: a part stays, see reshard_after_forward.h.
  TORCH_ARG(ReshardAfterForward, reshard_after_forward) = {};
  // In which dtypes parameters are gathered, used and reduced.
  TORCH_ARG(MixedPrecisionPolicy, mp_policy);
  // CPUOffloadPolicy(): shards are kept on the CPU. No effect on a mesh of CPUs.
  TORCH_ARG(OffloadPolicy, offload_policy);
  // Rank 0's parameters and buffers become those of all ranks. Costs a scatter
  // of the group and, where there are several ranks, one group's memory on rank
  // 0 while it runs. Parameters that rank 0 has on the meta device have no values
  // yet on any rank, and those that others have there get rank 0's.
  TORCH_ARG(bool, sync_module_states) = true;
  // Where they are not synchronised: throw c10::ValueError on all ranks, naming
  // them, if they differ between ranks. Costs reading them once.
  TORCH_ARG(bool, check_module_states) = true;

  // How each parameter is spread over the ranks; null: RaggedShard() for all.
  TORCH_ARG(ShardPlacementFn, shard_placement_fn) = nullptr;
  // What travels in place of a shard when it is gathered; null: the shard.
  TORCH_ARG(AllGatherExtensionFn, all_gather_extension_fn) = nullptr;
  // Parameters below the modules of this call that stay as they are: whole,
  // plain, with gradients of this rank alone. Calls on modules above leave them
  // alone too, while the modules of this call live.
  TORCH_ARG(std::vector<at::Tensor>, ignored_params) = {};

  // --- Performance; read from the root of the tree ---
  // Groups that may be gathered at one time, whether in use or ahead of use,
  // not counting those with reshard_after_forward(false). Limits prefetch only:
  // what an operator needs is always gathered. At least 1.
  TORCH_ARG(int64_t, limit_all_gathers) = 2;
  TORCH_ARG(BackwardPrefetch,
            backward_prefetch) = BackwardPrefetch::kBackwardPre;
  // Ranks may run different operators: some use groups that others do not, or in
  // another order. Each takes part in what others gather and reduce, at the price
  // of one small collective for each: see Note [Joining] in hooks/join.h. Every
  // rank runs equally many forwards of the root, through its boundary, and equally
  // many backwards that reach a sharded parameter. Nothing is gathered ahead, and
  // hooks on shards may run several times for one backward. All groups are
  // sharded over the same ranks, without replicas and reshard_after_forward(k).
  TORCH_ARG(bool, rank_dependent) = false;
  // From the second iteration on, gather ahead in the order of the one before.
  TORCH_ARG(bool, forward_prefetch) = true;
};

}  // namespace composable
