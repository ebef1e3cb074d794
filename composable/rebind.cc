#include "composable/rebind.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

using torch::optim::OptimizerParamState;

// The tensors of a state that are shaped like the parameter.
std::vector<at::Tensor*> TensorsOf(OptimizerParamState& state) {
  if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    return {&sgd->momentum_buffer()};
  }
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) {
    return {&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()};
  }
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state)) {
    return {&adamw->exp_avg(), &adamw->exp_avg_sq(), &adamw->max_exp_avg_sq()};
  }
  if (auto* rms = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    return {&rms->square_avg(), &rms->momentum_buffer(), &rms->grad_avg()};
  }
  if (auto* ada = dynamic_cast<torch::optim::AdagradParamState*>(&state)) {
    return {&ada->sum()};
  }
  TORCH_CHECK_VALUE(false,
                    "rebind: expected the state of SGD, Adam, AdamW, "
                    "RMSprop or Adagrad, got ",
                    typeid(state).name(),
                    ". Build this optimizer after fully_shard, from "
                    "module->parameters().");
}

struct Move {
  at::Tensor whole;
  FSDPParam* param;
  std::unique_ptr<OptimizerParamState> state;  // of the shard; may be null
};

}  // namespace

void rebind(torch::optim::Optimizer& optimizer, const ModuleRef& module) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  absl::flat_hash_map<const c10::TensorImpl*, FSDPParam*> by_member;
  std::vector<std::shared_ptr<FSDPState>> alive;
  for (const auto& shard : module->parameters()) {
    auto entry = FindShardedEntry(shard);
    if (entry.param == nullptr) continue;
    by_member[entry.param->unsharded().unsafeGetTensorImpl()] = entry.param;
    alive.push_back(std::move(entry.state));
  }
  auto& states = optimizer.state();
  std::vector<Move> moves;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto it = by_member.find(parameter.unsafeGetTensorImpl());
      if (it == by_member.end()) continue;
      Move move{parameter, it->second, nullptr};
      const auto state = states.find(parameter.unsafeGetTensorImpl());
      if (state != states.end()) {
        move.state = state->second->clone();
        for (at::Tensor* tensor : TensorsOf(*move.state)) {
          if (tensor->defined()) *tensor = move.param->RowsOf(*tensor);
        }
      }
      moves.push_back(std::move(move));
    }
  }
  for (Move& move : moves) {
    if (move.state == nullptr) continue;
    states.erase(move.whole.unsafeGetTensorImpl());
    states[move.param->sharded.unsafeGetTensorImpl()] = std::move(move.state);
  }
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      const auto it = by_member.find(parameter.unsafeGetTensorImpl());
      if (it != by_member.end()) parameter = it->second->sharded;
    }
  }
}

}  // namespace composable
