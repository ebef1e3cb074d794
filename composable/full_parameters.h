// Whole parameters, to read or to write in place, outside of any forward: for
// initialisation, averages of weights, surgery.
//
//   {
//     composable::FullParameters scope(model, {.writeback = true});
//     torch::nn::init::xavier_uniform_(model->weight);
//     model->weight[0].zero_();
//   }   // each rank's rows are in its shards now
//   composable::ForEachFullParameter(
//       model, [](const std::string& fqn, at::Tensor& whole) {
//         std::cout << fqn << " " << whole.norm() << "\n";
//       });
//
// Known to users of FSDP1 as summon_full_params. Inside of a scope gradients are
// off in this thread, members hold whole values, and with `writeback` operators
// may write them (but not give them another shape or memory). The entries of
// module->parameters() stay the shards: named_parameters() of the scope has the
// wholes by name. Forwards run as usual, but no backward.
//
// A write-back copies this rank's rows of this rank's whole parameters: ranks
// that write other values get a patchwork. It happens at the end of the scope,
// also where an exception leaves it. See Note [Full parameter scope].
//
// Memory above the shards: a FullParameters scope holds all of its groups at
// once; ForEachFullParameter one at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "composable/module_ref.h"

namespace composable {

class HeldGroup;

struct FullParametersOptions {
  // Copy what the members hold at the end back to the shards. Without it,
  // operators that write them throw.
  bool writeback = true;
  // All groups with parameters in the module; else the group of the module's
  // own fully_shard, or those of the parameters that it holds itself.
  bool recurse = true;
};

class FullParameters {
 public:
  // (collective) Every rank opens the scope, with equal arguments. Throws
  // c10::ValueError inside of a forward (that a module boundary shows) or
  // backward of the modules.
  explicit FullParameters(const ModuleRef& module,
                          const FullParametersOptions& options = {});
  // Writes back and frees.
  ~FullParameters();
  FullParameters(const FullParameters&) = delete;
  FullParameters& operator=(const FullParameters&) = delete;

  // The members, and the plain parameters, of the module by their FQN.
  const torch::OrderedDict<std::string, at::Tensor>& named_parameters() const {
    return named_parameters_;
  }

 private:
  std::vector<HeldGroup> held_;
  torch::OrderedDict<std::string, at::Tensor> named_parameters_;
  at::NoGradGuard no_grad_;
};

// (collective) Calls `fn` for every parameter of `module`, whole, in a scope of
// its group; group by group, plain parameters last. Tied ones come once, under
// their first name.
void ForEachFullParameter(
    const ModuleRef& module,
    const std::function<void(const std::string& fqn, at::Tensor& whole)>& fn,
    const FullParametersOptions& options = {});

}  // namespace composable
