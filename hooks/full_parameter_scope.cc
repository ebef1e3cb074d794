#include "hooks/full_parameter_scope.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "hooks/alone.h"
#include "hooks/finalize_backward.h"
#include "hooks/join.h"
#include "hooks/root_pre_forward.h"
#include "hooks/unshard.h"

namespace composable {
void CheckBetweenPasses(const FSDPStateContext& context, const FSDPState& state,
                        const std::string& api) {
  CheckAlone(context, api);
  const bool backward = torch::autograd::get_current_graph_task_id() != -1 ||
                        !context.running_backward.expired() ||
                        context.training_state == TrainingState::kPreBackward ||
                        context.training_state == TrainingState::kPostBackward;
  TORCH_CHECK_VALUE(!backward && context.open_scopes == 0, api,
                    " was called inside of a ",
                    backward ? "backward" : "forward",
                    " of the tree of the sharded module '", state.fqn,
                    "', which frees and gathers parameters by itself. Call it "
                    "between iterations.");
}

HeldGroup::HeldGroup(std::shared_ptr<FSDPState> state, bool writeback,
                     const std::string& api)
    : state_(std::move(state)), context_(LazyInit(*state_)) {
  const std::lock_guard<std::recursive_mutex> lock(context_->mutex);
  try {
    CheckBetweenPasses(*context_, *state_, api);
    if (writeback) CheckMayWriteShards(*state_, api);
  } catch (...) {
    state_.reset();
    throw;
  }
  was_pinned_ = state_->pinned;
  may_write_ = writes_back_ = writeback;
  state_->pinned = true;
  ++state_->full_parameter_scopes;
  state_->full_parameter_writers += may_write_ ? 1 : 0;
  ++context_->full_parameter_scopes;
}

HeldGroup::~HeldGroup() {
  if (state_ == nullptr) return;
  try {
    LetGo();
  } catch (const std::exception& error) {
    TORCH_WARN("The whole parameters of '", state_->fqn,
               "' could not be let go: ", error.what());
  }
}

void HeldGroup::LetGo() {
  const std::lock_guard<std::recursive_mutex> lock(context_->mutex);
  --context_->full_parameter_scopes;
  --state_->full_parameter_scopes;
  state_->full_parameter_writers -= may_write_ ? 1 : 0;
  FSDPParamGroup& group = *state_->group();
  if (writes_back_ && group.sharded_state() == ShardedState::kUnsharded) {
    const auto count = static_cast<int>(group.params().size());
    for (int i = 0; i < count; ++i) group.WriteBack(i);
  }
  if (state_->full_parameter_scopes > 0) return;
  state_->pinned = was_pinned_;
  if (was_pinned_ && !may_write_) return;
  Reshard(*context_, *state_);
  context_->pool.Purge();
}

std::vector<HeldGroup> HoldWhole(
    const std::vector<std::shared_ptr<FSDPState>>& states, bool writeback,
    const std::string& api) {
  std::vector<HeldGroup> held;
  try {
    for (const auto& state : states) {
      held.push_back(HeldGroup(state, writeback, api));
      FSDPStateContext& context = *held.back().context_;
      const std::lock_guard<std::recursive_mutex> lock(context.mutex);
      FSDPState* needed = state.get();
      IssueUnshard(context, {&needed, 1}, context.forward_order);
      JoinCall(context);
    }
    for (const auto& group : held) {
      const std::lock_guard<std::recursive_mutex> lock(group.context_->mutex);
      FSDPState* needed = group.state_.get();
      WaitUnshard(*group.context_, {&needed, 1});
      needed->left = false;
      needed->prefetched = false;
    }
  } catch (...) {
    for (auto& group : held) group.Discard();
    throw;
  }
  return held;
}

HeldGroup HoldForInit(const std::shared_ptr<FSDPState>& state,
                      const std::string& api) {
  TORCH_CHECK_VALUE(state->full_parameter_scopes == 0, api,
                    " was called while the whole parameters of '", state->fqn,
                    "' are held by a scope or another call of it.");
  HeldGroup held(state, /*writeback=*/true, api);
  held.Discard();
  FSDPStateContext& context = *held.context_;
  const std::lock_guard<std::recursive_mutex> lock(context.mutex);
  FSDPParamGroup& group = *state->group();
  group.AllocateShards();
  const bool any_values =
      std::any_of(group.params().begin(), group.params().end(),
                  [](const FSDPParam& param) { return param.has_values; });
  const ShardedState before = group.sharded_state();
  if (any_values || group.is_cast()) {
    group.UnshardOriginal(context.pool);
  } else {
    group.UnshardWithoutGather(context.pool);
  }
  context.AccountIssued(*state, before);
  context.AccountWaited();
  for (const auto& param : group.params()) {
    if (!param.has_values) FillUnwritten(group.GatheredValue(param));
  }
  return held;
}

void FillUnwritten(const at::Tensor& dense) {
  std::memset(dense.mutable_data_ptr(), kUnwritten, dense.nbytes());
}

bool IsUnwritten(const at::Tensor& dense) {
  const auto* begin = static_cast<const unsigned char*>(dense.const_data_ptr());
  return std::all_of(begin, begin + dense.nbytes(),
                     [](unsigned char byte) { return byte == kUnwritten; });
}

}  // namespace composable
