#include "state/fsdp_state.h"

#include <torch/nn/module.h>

#include <algorithm>

namespace composable {

void FSDPStateContext::Trace(TraceEvent event, const FSDPState& state) const {
  if (observer) observer(event, state.fqn);
}

void FSDPStateContext::Forget(FSDPState* state) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (state->id >= 0) states[state->id] = nullptr;
  for (auto* list : {&current, &resident}) {
    list->erase(std::remove(list->begin(), list->end(), state), list->end());
  }
  if (reducing == state) {
    state->reduction()->Abandon(pool);
    reducing = nullptr;
  }
  if (!state->group()->is_sharded()) {
    stats.unsharded_param_bytes -=
        static_cast<int64_t>(state->group()->unsharded_bytes());
    state->group()->Reshard(pool);
  }
}

FSDPState::FSDPState(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                     FullyShardOptions options,
                     std::unique_ptr<FSDPParamGroup> group)
    : modules_(modules.begin(), modules.end()),
      options_(std::move(options)),
      group_(std::move(group)) {
  if (group_ != nullptr) {
    reduction_ = std::make_unique<GradientReduction>(*group_);
  }
}

FSDPState::~FSDPState() {
  if (context != nullptr && group_ != nullptr) context->Forget(this);
}

std::vector<std::shared_ptr<torch::nn::Module>> FSDPState::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  for (const auto& weak : modules_) {
    if (auto module = weak.lock()) alive.push_back(std::move(module));
  }
  return alive;
}

bool FSDPState::IsAncestorOf(const FSDPState& other) const {
  return std::find(other.ancestors.begin(), other.ancestors.end(), id) !=
         other.ancestors.end();
}

std::shared_ptr<FSDPState> FindFSDPState(const torch::nn::Module& module) {
  return std::static_pointer_cast<FSDPState>(
      ContractRegistry::Get().Find(module, kFullyShardApi));
}

}  // namespace composable
