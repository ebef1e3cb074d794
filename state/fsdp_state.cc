#include "state/fsdp_state.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "state/storage_registry.h"

namespace composable {

void FSDPStateContext::Trace(TraceEvent event, const FSDPState& state) const {
  if (observer) observer(event, state.fqn);
}

void FSDPStateContext::UpdateMaxReductionPayloads() {
  max_reduction_payloads = 1;
  for (const FSDPState* state : states) {
    if (state == nullptr) continue;
    max_reduction_payloads =
        std::max(max_reduction_payloads, state->max_reduction_payloads);
  }
}

void FSDPStateContext::AccountIssued(FSDPState& state, ShardedState before) {
  CheckGroupTransition(training_state, before, GroupEvent::kIssueUnshard);
  const auto bytes = static_cast<int64_t>(state.group()->unsharded_bytes());
  ++stats.num_gathers;
  stats.gathered_bytes += static_cast<int64_t>(state.group()->gathered_bytes());
  stats.unsharded_param_bytes += bytes;
  stats.peak_unsharded_bytes =
      std::max(stats.peak_unsharded_bytes, stats.unsharded_param_bytes);
  ++stats.gathers_in_flight;
  stats.peak_gathers_in_flight =
      std::max(stats.peak_gathers_in_flight, stats.gathers_in_flight);
  resident.push_back(&state);
}

void FSDPStateContext::AccountWaited() {
  CheckGroupTransition(training_state, ShardedState::kUnsharding,
                       GroupEvent::kFinishUnshard);
  --stats.gathers_in_flight;
}

void FSDPStateContext::AccountFreed(FSDPState& state, ShardedState before,
                                    GroupEvent event) {
  CheckGroupTransition(training_state, before, event);
  if (before == ShardedState::kShardedPostForward) return;
  if (before == ShardedState::kUnsharding) --stats.gathers_in_flight;
  stats.unsharded_param_bytes -=
      static_cast<int64_t>(state.group()->unsharded_bytes());
  resident.erase(std::remove(resident.begin(), resident.end(), &state),
                 resident.end());
}

void FSDPStateContext::Forget(FSDPState* state) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (state->id >= 0) states[state->id] = nullptr;
  current.erase(std::remove(current.begin(), current.end(), state),
                current.end());
  FSDPParamGroup* group = state->group();
  if (group == nullptr) return;
  reducing.erase(std::remove(reducing.begin(), reducing.end(), state),
                 reducing.end());
  state->reduction()->Abandon(pool);
  const ShardedState before = group->sharded_state();
  if (before != ShardedState::kSharded) {
    stats.kept_part_bytes -= static_cast<int64_t>(group->kept_part_bytes());
    group->Reshard(pool);
    AccountFreed(*state, before);
  }
  group->ReleaseKeptBuffer(pool);
  stats.sharded_param_bytes -= static_cast<int64_t>(group->sharded_bytes());
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
  if (context != nullptr) context->Forget(this);
}

void FSDPState::Readopt() {
  if (group_ == nullptr || !group_->stands_alone()) return;
  group_->Readopt();
  auto reduction = std::make_unique<GradientReduction>(*group_);
  reduction->settings() = std::move(reduction_->settings());
  reduction_ = std::move(reduction);
}

void FSDPState::Commit() noexcept {
  undo = nullptr;
  if (group_ != nullptr) group_->CommitAttach();
}

void FSDPState::Rollback() noexcept {
  if (undo != nullptr) undo();
  undo = nullptr;
  ignored = nullptr;
  if (group_ != nullptr) group_->UndoAttach();
}

std::vector<std::shared_ptr<torch::nn::Module>> FSDPState::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  for (const auto& weak : modules_) {
    if (auto module = weak.lock()) alive.push_back(std::move(module));
  }
  return alive;
}

std::unique_lock<std::recursive_mutex> FSDPState::LockTree() const {
  if (!has_tree.load(std::memory_order_acquire)) return {};
  return std::unique_lock<std::recursive_mutex>(context->mutex);
}

bool FSDPState::IsAncestorOf(const FSDPState& other) const {
  return std::find(other.ancestors.begin(), other.ancestors.end(), id) !=
         other.ancestors.end();
}

std::shared_ptr<FSDPState> FindFSDPState(const torch::nn::Module& module) {
  return std::static_pointer_cast<FSDPState>(
      ContractRegistry::Get().Find(module, kFullyShardApi));
}

ShardedEntry FindShardedEntry(const at::Tensor& entry) {
  GuardedStorage found;
  if (!FindGuardedStorage(entry, &found)) return {};
  auto state = found.state.lock();
  if (state == nullptr) return {};
  FSDPParamGroup& group = *state->group();
  const int64_t offset = entry.storage_offset();
  FSDPParam& param =
      group.params()[found.is_shard ? group.FindShard(found.segment, offset)
                                    : group.FindParam(found.segment, offset)];
  // Not a view of one.
  const at::Tensor stands_for =
      found.is_shard ? param.sharded : param.unsharded();
  if (!stands_for.is_same(entry)) return {};
  return {std::move(state), &param};
}

}  // namespace composable
