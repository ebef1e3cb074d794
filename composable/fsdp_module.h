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
//
// Note [Setters]
// One meaning for all: a setter may be called at any time, also before the first
// use of the tree, and counts from the next thing on that it is about. With
// `recurse`, the default, it is for this group and all groups below; what is of
// the whole tree is set through any handle of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/custom_collectives.h"
#include "composable/backward_handles.h"
#include "composable/module_ref.h"
#include "state/reduction_settings.h"

namespace composable {

class FSDPState;

class FSDPModule {
 public:
  explicit FSDPModule(std::weak_ptr<FSDPState> state)
      : state_(std::move(state)) {}

  // Gathers the whole parameters of this group, not of groups
  // below, and keeps them until reshard() or the end of the next backward. With
  // `async_op` returns at once, whatever else is being gathered: the parameters
  // are there after wait() of the handle, or when an operator reads them.
  UnshardHandle unshard(bool async_op = false);

  // Frees the whole parameters of this group at once, if they are there.
  void reshard();

  // What is to happen when the forward has left a group: with true, other groups
  // may take its memory, and it is gathered again in backward. Replaces the
  // option, also that of the root, which stays gathered by default.
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  template <typename T>
  requires(!std::same_as<T, bool>) void set_reshard_after_forward(
      T, bool recurse = true) = delete;  // no int

  // With false, groups stay gathered after backward, and the next forward
  // gathers only those whose shards have been written. For microbatches between
  // which nothing is written. Default: true.
  void set_reshard_after_backward(bool reshard, bool recurse = true);

  // With false, backward does not gather the groups ahead: for parameters that
  // it does not read, such as those of an embedding. (What an operator reads is
  // gathered all the same, and after the first iteration backward gathers ahead
  // only what the one before has read.) Default: true.
  void set_unshard_in_backward(bool unshard, bool recurse = true);

  // With true, groups keep the memory of their whole parameters while they are
  // sharded, so data pointers are the same whenever they are gathered. They are
  // not freed after forward then, which would free nothing. Turned off, the
  // memory is given back at once, or when a gathered group is freed. Default:
  // false.
  void set_keep_unsharded_storage(bool keep, bool recurse = true);

  // Where this group is first used in a forward (backward), gathers these groups
  // ahead, in this order, instead of what follows in the order of the last pass;
  // an empty list, the default, goes back to that. The list is kept to whatever
  // limit_all_gathers says: the memory is the caller's. Modules that are not
  // sharded, or gone: c10::ValueError. So are modules of another tree, where the
  // list is first used.
  void set_modules_to_forward_prefetch(const std::vector<ModuleRef>& modules);
  void set_modules_to_backward_prefetch(const std::vector<ModuleRef>& modules);

  // With false, backward adds up this rank's whole gradients instead of
  // reducing them, and the shards' grad() stays as it is. The first backward
  // with true reduces what has been added up too. For gradient accumulation
  // over several backwards, at the cost of whole gradients in memory. Sets
  // set_requires_all_reduce too. See also composable/gradient_sync_guard.h.
  // Default: true.
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

  // Of the whole tree. With false, backwards are parts of one iteration, up to
  // and with the next one after true: the order that prefetch follows goes on, groups
  // that a backward has not reached stay as far as there is memory, and gradients
  // that are kept by them stay. Gradients of what was reduced are complete after
  // each backward all the same. Default: true.
  void set_is_last_backward(bool is_last_backward);

  // Of the whole tree; supersedes set_is_last_backward(). With true, backwards do
  // not end the iteration, finalize_backward() does: see Note [Manual
  // finalization]. Throws c10::ValueError in a backward, and between one and its
  // finalization. Default: false.
  void set_manual_backward_finalization(bool manual);

  // Reduces what groups with gradient sync have kept, waits, and frees what is
  // not to stay. With `async_op` the last reduction is waited for by wait() of
  // the handle, before which no forward, backward or step of an optimizer may
  // come. Without a backward since the last call there is nothing to do. Throws
  // c10::ValueError if finalization is not manual, in a backward, or before
  // wait() of the handle before.
  GradientReductionHandle finalize_backward(bool async_op = false);

  // Drops an unfinished iteration of the whole tree: waits for what is in flight
  // and leaves the tree idle and sharded. Not needed after an exception, which
  // does the same. Gradients that are complete, or kept without sync, stay, as
  // without sharding: zero_grad() drops them. Throws c10::ValueError in a
  // backward.
  void reset_iter_state();

  // Whole gradients of this rank that set_requires_gradient_sync(false) has kept,
  // copied, by the names of the parameters (from the root of the tree, once it
  // is known); and their bytes. zero_grad() of the module or the optimizer drops
  // them, as does clear_pending_gradients().
  torch::OrderedDict<std::string, at::Tensor> get_pending_gradients(
      bool recurse = true) const;
  // Bytes also of what set_requires_all_reduce(false) has kept; of this group.
  size_t pending_gradient_bytes() const;
  void clear_pending_gradients(bool recurse = true);

  // Reduces what is kept, now, whether groups sync or not: a collective. Throws
  // c10::ValueError in a backward.
  void synchronize_gradients(bool recurse = true);

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
