// Models that are made without memory: on the meta device, sharded there, and
// given values shard by shard, so that no rank ever holds the whole.
//
//   GPT model(nullptr);
//   {
//     const composable::MetaDevice meta;
//     model = GPT(config);
//   }
//   for (auto& block : *model->blocks) composable::fully_shard(block);
//   composable::fully_shard(model);
//   composable::materialize(model, [](torch::nn::Module& module) {
//     if (auto* linear = module.as<torch::nn::Linear>()) {
//       linear->reset_parameters();
//     }
//   });
//
// Until then shards have no memory, and a forward throws and lists the
// parameters; an optimizer may be built before or after. Instead of
// materialize(), load_full_state_dict() may bring the values, or a
// torch::load of a whole model's archive.
#pragma once

#include <functional>

#include "composable/module_ref.h"
#include "hooks/meta_device.h"

namespace composable {

// (collective) Calls `init_fn` for every module in `module` that holds, itself,
// a parameter or buffer without values, in the order of module->modules(). It
// writes those of that module, whole, and may read and write all others of the
// same group; gradients are off.
//
// Rank 0's values count, and go to the shards of all ranks; so they do not
// depend on how many there are, and are those that the same calls give an
// unsharded model. (Where a group was sharded with sync_module_states(false)
// each rank keeps its own rows of what it has drawn itself.)
//
// Where parameters are gathered in another dtype (MixedPrecisionPolicy), the
// members are in that of their shards while `init_fn` runs, so no value is
// rounded.
//
// One group is whole at a time, in the dtype of its shards: the peak above the
// shards is the largest group, and what is on its way, a sixteenth of it. A group
// whose modules are not next to each other, as those of a root before and after
// the blocks, is gathered again.
//
// Throws c10::ValueError that lists the parameters and buffers that `init_fn`
// has not written, if there are some; they stay without values, all others have
// theirs, and another call with another function can go on. If `init_fn`
// throws, what is without values then can be materialised by another call.
// Buffers of integers or booleans count as written also if all their bytes are
// 0xff, since an operator did that.
void materialize(const ModuleRef& module,
                 const std::function<void(torch::nn::Module&)>& init_fn);

}  // namespace composable
