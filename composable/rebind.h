// Moves an optimizer that was built too early to the shards.
//
//   torch::optim::AdamW optimizer(model->parameters());
//   composable::fully_shard(model);
//   composable::rebind(optimizer, model);
#pragma once

#include "composable/module_ref.h"

namespace torch::optim {
class Optimizer;
}

namespace composable {

// Replaces every parameter of `optimizer` that is a whole parameter of a sharded
// module in `module` by its shard, and the state kept for it by this rank's
// rows. Others, shards among them, stay. No communication.
//
// Throws c10::ValueError, and changes nothing, for state that is not that of
// SGD, Adam, AdamW, RMSprop or Adagrad; other optimizers can be rebound before
// their first step.
void rebind(torch::optim::Optimizer& optimizer, const ModuleRef& module);

}  // namespace composable
