// How a group of parameters is sharded, gathered and prefetched.
//
//   composable::fully_shard(block, composable::FullyShardOptions()
//                                      .reshard_after_forward(false));
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <optional>

#include "collectives/process_group.h"

namespace composable {

// When the gather of the next group of a backward is issued: before the
// operators of the present group (more overlap, one more group in memory),
// after them, or only when it is read.
enum class BackwardPrefetch : uint8_t { kBackwardPre, kBackwardPost, kNone };

struct FullyShardOptions {
  // --- Behaviour ---
  // The ranks to shard over; the default process group if null.
  TORCH_ARG(ProcessGroupPtr, process_group) = nullptr;
  // Whether parameters may be freed between forward and backward. true: they
  // may, as soon as another group needs the memory. false: they stay, which
  // saves the gather in backward. Default: false for the root of the tree,
  // which backward needs first, true for all others.
  TORCH_ARG(std::optional<bool>, reshard_after_forward) = std::nullopt;
  // Rank 0's parameters and buffers become those of all ranks. Costs a scatter
  // of the group and, where there are several ranks, one group's memory on rank
  // 0 while it runs. Parameters that rank 0 has on the meta device have no values
  // yet on any rank, and those that others have there get rank 0's.
  TORCH_ARG(bool, sync_module_states) = true;
  // Where they are not synchronised: throw c10::ValueError on all ranks, naming
  // them, if they differ between ranks. Costs reading them once.
  TORCH_ARG(bool, check_module_states) = true;

  // --- Performance; read from the root of the tree ---
  // Groups that may be gathered at one time, whether in use or ahead of use,
  // not counting those with reshard_after_forward(false). Limits prefetch only:
  // what an operator needs is always gathered. At least 1.
  TORCH_ARG(int64_t, limit_all_gathers) = 2;
  TORCH_ARG(BackwardPrefetch,
            backward_prefetch) = BackwardPrefetch::kBackwardPre;
  // From the second iteration on, gather ahead in the order of the one before.
  TORCH_ARG(bool, forward_prefetch) = true;
};

}  // namespace composable
