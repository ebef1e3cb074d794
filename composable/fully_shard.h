// Shards a module's parameters over the ranks of a process group, in place and
// without wrapping it: the module is used, trained and called as before.
//
//   composable::init_process_group();
//   GPT model(config);
//   for (auto& block : *model->blocks) composable::fully_shard(block);
//   composable::fully_shard(model);
//   torch::optim::AdamW optimizer(model->parameters(),
//                                 torch::optim::AdamWOptions(3e-4));
//
// After a backward each rank holds its rows of every parameter and no more. (A
// forward without a backward leaves the root and up to limit_all_gathers groups
// gathered, for the next one.) Operators
// gather the group of parameters that they read, and backward leaves the mean
// of the ranks' gradients, for this rank's rows, in parameter.grad().
//
// Rules:
//  * Apply it bottom-up: to blocks, then to the whole. A call takes all
//    parameters below its modules that no earlier call took, as one group.
//  * Build the optimizer afterwards, from module->parameters().
//  * Every rank calls it on the same modules in the same order, and runs the
//    same operators on them. Rank 0's parameters and buffers become those of all
//    ranks (FullyShardOptions::sync_module_states), so the call is a collective:
//    where a rank throws, the others throw within the process group's timeout.
//  * A loss that is a mean over this rank's part of the batch gives gradients
//    of the mean over all ranks, if the parts are of equal size.
//  * A tree of sharded modules is used by one thread at a time, and so are all
//    trees over one process group, because ranks must issue its collectives in
//    one order.
//  * Parameters that no call takes, such as those of the root where only blocks
//    are sharded, stay plain: their gradients are those of this rank alone.
//
// Not noticed, and wrong:
//  * Reductions over shards or their gradients in several steps: in
//    p.grad().pow(2).sum() the operator that sums sees a plain tensor. Norms and
//    sums that are taken of them at once throw.
//  * torch::nn::init::orthogonal_ and dirac_ on a shard treat this rank's rows
//    as the whole. Initialise before fully_shard.
//  * Writes to a shard through a raw pointer, without mark_dirty() of the
//    handle; and raw pointers to a whole parameter that are kept over an
//    operator that reads others.
//  * Ranks that go different ways over a process group that was not made by
//    init_process_group: the order of its collectives is not checked.
//  * Several trees over one process group, used by several threads.
//  * Ranks that load or change the shards of one rank alone.
// docs/gotchas.md says what other code does, and what to write instead.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "composable/fsdp_module.h"
#include "composable/module_ref.h"
#include "state/fully_shard_options.h"

namespace composable {

class FSDPState;

class FullyShard {
 public:
  // (collective) Throws c10::ValueError if it was applied to the module before, for
  // parameters that can't be sharded (see state/managed_params.h) and for
  // options out of range; c10::NotImplementedError for a parameter that is not
  // on the CPU, and for CPUOffloadPolicy on a mesh of CUDA devices.
  FSDPModule operator()(const ModuleRef& module,
                        const FullyShardOptions& options = {}) const;
  // One group of all these modules' parameters.
  FSDPModule operator()(std::initializer_list<ModuleRef> modules,
                        const FullyShardOptions& options = {}) const;
  template <typename T>
  FSDPModule operator()(const std::vector<T>& modules,
                        const FullyShardOptions& options = {}) const {
    Modules list;
    for (const auto& module : modules) list.push_back(ModuleRef(module).ptr());
    return Apply(list, options);
  }

  // The state on `module`, or null. For tests and tools.
  std::shared_ptr<FSDPState> state(const ModuleRef& module) const;

 private:
  static FSDPModule Apply(const Modules& modules,
                          const FullyShardOptions& options);
};

inline constexpr FullyShard fully_shard;

}  // namespace composable
