// The handle on a sharded module that fully_shard returns.
//
//   composable::FSDPModule handle = composable::fully_shard(block);
//   handle.unshard();
//   std::cout << block->fc->weight << "\n";   // whole values
//   handle.reshard();
//
// A handle does not keep its module alive; on a module that is gone its calls
// throw c10::ValueError. Every rank must make the same calls in the same order:
// unshard() is a collective, and the others decide which collectives follow.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "collectives/custom_collectives.h"
#include "state/reduction_settings.h"

namespace composable {

class FSDPState;

class FSDPModule {
 public:
  explicit FSDPModule(std::weak_ptr<FSDPState> state)
      : state_(std::move(state)) {}

  // Gathers the whole parameters of this group, not of groups
  // below, and keeps them until reshard() or the end of the next backward.
  void unshard();

  // Frees the whole parameters of this group at once, if they are there.
  void reshard();

  // With false, backward adds up this rank's whole gradients instead of
  // reducing them, and the shards' grad() stays as it is. The first backward
  // with true reduces what has been added up too. For gradient accumulation
  // over several backwards, at the cost of whole gradients in memory. With
  // `recurse` also for all groups below. Default: true. Sets
  // set_requires_all_reduce too.
  void set_requires_gradient_sync(bool requires_sync, bool recurse = true);

  // With false, groups with replicas (HSDP) reduce over the ranks that share a
  // replica only, and add that up at 1 / shards of the memory of whole
  // gradients; the shards' grad() stays as it is. The first backward with true
  // adds it before it reduces over replicas. Nothing to other groups. Default:
  // true.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);

  // --- How gradients are reduced; see Note [Gradient division] ---
  // What their sum over ranks is divided by, replicas included. Nothing, the
  // default: the number of ranks. 1 for a loss that is a sum.
  void set_gradient_divide_factor(std::optional<double> factor,
                                  bool recurse = true);
  // Deprecated name of the same.
  void set_reduce_scatter_divide_factor(double factor, bool recurse = true);
  // Whether a division comes after the all-reduce hook, instead of before it.
  // Collectives are sums either way.
  void set_force_sum_reduction_for_comms(bool enable, bool recurse = true);
  // Called after the reductions over ranks and replicas, once for each dtype of
  // a group, with this rank's rows in the dtype that was reduced, flat and with
  // padding; it changes them in place, as by an all-reduce of its own over
  // replicas that the mesh does not know. Null: none. A `stream` of CUDA is for
  // groups without replicas.
  void set_all_reduce_hook(const AllReduceHook& hook, bool recurse = true,
                           std::optional<c10::Stream> stream = std::nullopt);

  // --- By what means; see collectives/custom_collectives.h ---
  // From the next collective on; null: the library's own.
  void set_custom_all_gather(const std::shared_ptr<AllGather>& comm,
                             bool recurse = true);
  void set_custom_reduce_scatter(const std::shared_ptr<ReduceScatter>& comm,
                                 bool recurse = true);
  // Memory for collectives comes from the process group's backend, if that
  // allocates. Throws c10::ValueError where a collective is custom.
  void set_allocate_memory_from_process_group_for_comm(bool enable,
                                                       bool recurse = true);
  // (collective) Reduce-scatters use a process group of their own, so that they
  // do not queue behind gathers. It is shared by all groups over the same ranks,
  // and ends with the last of them.
  void set_separate_reduce_scatter_group(bool enable = true,
                                         bool recurse = true);
  // How many payloads of reduce-scatters may be in memory at one time: more let
  // backward run ahead of slow ones. The tree takes the most that any of its
  // modules asks for, at once. Default: 1.
  void set_reduce_scatter_max_input_buffers(int64_t count, bool recurse = true);

  // Bytes of gradients kept by set_requires_gradient_sync(false) and
  // set_requires_all_reduce(false), in this
  // group; and drops them (zero_grad() of the model does not see them).
  size_t pending_gradient_bytes() const;
  void clear_pending_gradients(bool recurse = true);

  // Call after writing to the shards of this group through a raw pointer: the
  // next use gathers them anew. Operators that write are noticed without it.
  void mark_dirty();

  // Null if the module is gone. For tests and tools.
  std::shared_ptr<FSDPState> state() const { return state_.lock(); }

 private:
  std::shared_ptr<FSDPState> Require(const char* call) const;

  std::weak_ptr<FSDPState> state_;
};

}  // namespace composable
