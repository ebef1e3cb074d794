#include "hooks/root_pre_forward.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "hooks/alone.h"
#include "hooks/finalize_backward.h"
#include "hooks/missing_values.h"
#include "hooks/root_post_backward.h"
#include "hooks/tree_report.h"

namespace composable {
namespace {

// Serialises the making of trees; held for the first use only.
std::mutex& InitMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

class TreeBuilder {
 public:
  explicit TreeBuilder(std::shared_ptr<FSDPStateContext> context)
      : context_(std::move(context)) {}

  void Visit(const torch::nn::Module& module, const std::string& prefix) {
    auto state = FindFSDPState(module);
    // A module that two roots share belongs to the tree that came first. Its
    // operators use that tree, whichever root calls them.
    if (state != nullptr && state->context != nullptr &&
        state->context != context_) {
      state = nullptr;
    }
    if (state != nullptr) Enter(*state, prefix);
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      FSDPParam* param = FindShardedEntry(entry.value()).param;
      if (param != nullptr && param->sharded.is_same(entry.value()) &&
          named_.insert(param).second) {
        param->fqn = Join(prefix, entry.key());
      }
    }
    for (const auto& child : module.named_children()) {
      Visit(*child.value(), Join(prefix, child.key()));
    }
    if (state != nullptr) path_.pop_back();
  }

 private:
  static std::string Join(const std::string& prefix, const std::string& key) {
    return prefix.empty() ? key : prefix + "." + key;
  }

  void Enter(FSDPState& state, const std::string& prefix) {
    if (state.context != context_) {
      state.context = context_;
      state.id = static_cast<int>(context_->states.size());
      state.fqn = prefix;
      state.ancestors.clear();
      context_->states.push_back(&state);
    }
    for (const int id : path_) {
      if (id != state.id) state.ancestors.push_back(id);
    }
    path_.push_back(state.id);
  }

  std::shared_ptr<FSDPStateContext> context_;
  std::vector<int> path_;                        // ids of the states above
  absl::flat_hash_set<const FSDPParam*> named_;  // tied ones: by the first
};

// Rounds are held by the ranks of one communicator, which all collectives of the
// tree must then use.
void CheckCanJoin(const FSDPStateContext& context) {
  if (!context.options.rank_dependent()) return;
  FSDPParamGroup* first = nullptr;
  for (const FSDPState* state : context.states) {
    FSDPParamGroup* group = state->group();
    if (group == nullptr) continue;
    if (first == nullptr) first = group;
    TORCH_CHECK_NOT_IMPLEMENTED(
        group->communicator() == first->communicator() &&
            group->replicate_communicator() == nullptr && !group->keeps_part(),
        "fully_shard: rank_dependent(true) needs all groups of a tree to be "
        "sharded over the same ranks, without replicas (a 2-D mesh) and "
        "without "
        "reshard_after_forward(k), but '",
        group->params().front().fqn, "' is not.");
  }
}

void Configure(FSDPStateContext& context, FSDPState& root) {
  context.options = root.options();
  for (FSDPState* state : context.states) {
    state->reshard_after_forward =
        state->reshard_after_forward_override.value_or(
            state->options().reshard_after_forward().frees().value_or(state !=
                                                                      &root));
    state->Readopt();
    context.is_last_backward &= state->is_last_backward;
    context.manual_finalization |= state->manual_finalization;
    if (state->group() == nullptr) continue;
    state->group()->SetNames(state->fqn.empty() ? "(root)" : state->fqn);
    context.stats.sharded_param_bytes +=
        static_cast<int64_t>(state->group()->sharded_bytes());
  }
  SetSlotCapacity(context);
  context.UpdateMaxReductionPayloads();
  CheckCanJoin(context);
  for (FSDPState* state : context.states) {
    state->has_tree.store(true, std::memory_order_release);
  }
}

}  // namespace

void SetSlotCapacity(FSDPStateContext& context) {
  size_t bytes = 0;
  for (const FSDPState* state : context.states) {
    if (state == nullptr || state->group() == nullptr) continue;
    if (state->reshard_after_forward) {
      bytes = std::max(bytes, state->group()->unsharded_bytes());
    }
  }
  context.pool.set_min_capacity(bytes);
}

std::shared_ptr<FSDPStateContext> LazyInit(FSDPState& state) {
  if (auto tree = state.tree()) return tree;
  std::shared_ptr<FSDPState> keep;  // released after the lock
  const std::lock_guard<std::mutex> lock(InitMutex());
  if (state.context != nullptr) return state.context;
  FSDPState* root = &state;
  while (auto parent = root->parent.lock()) {
    keep = std::move(parent);
    root = keep.get();
  }
  auto context = std::make_shared<FSDPStateContext>();
  TreeBuilder builder(context);
  for (const auto& module : root->modules()) {
    builder.Visit(*module, "");
    context->roots.push_back(module);
  }
  if (!context->states.empty()) {
    Configure(*context, *root);
    ReportTree(*context);
  }
  if (state.context == nullptr) {
    // The module was taken out of the tree since, or is used by a list whose
    // first module is gone: it is a tree of its own.
    context = std::make_shared<FSDPStateContext>();
    for (const auto& module : state.modules()) {
      context->roots.push_back(module);
    }
    state.context = context;
    state.id = 0;
    context->states.push_back(&state);
    Configure(*context, state);
  }
  return context;
}

void SyncGradientEdge(FSDPStateContext& context, FSDPState& state, int param) {
  if (!state.group()->SyncGradientEdge(param)) return;
  // Another backward than the recorded one is to be expected.
  context.backward_order.Clear();
  context.seed_backward_order = false;
}

void RootPreForward(FSDPStateContext& context) {
  switch (context.training_state) {
    case TrainingState::kForward:
      return;
    case TrainingState::kPreBackward:
    case TrainingState::kPostBackward:
      TORCH_CHECK_VALUE(
          false,
          "A forward of sharded modules has started in one thread while their "
          "backward runs in another. Use a tree of sharded modules from one "
          "thread at a time.");
    case TrainingState::kIdle:
      break;
  }
  CheckMayBeginForward(context);
  context.snapshot.Check(context.roots);
  CheckHasValues(context.states);
  for (FSDPState* state : context.states) {
    if (state == nullptr || state->group() == nullptr) continue;
    state->group()->CheckParams();
    const auto count = static_cast<int>(state->group()->params().size());
    for (int i = 0; i < count; ++i) SyncGradientEdge(context, *state, i);
  }
  Transition(&context.training_state, TreeEvent::kBeginForward);
  context.current.clear();
  context.forward_order.Begin();
}

void ResetTree(const std::shared_ptr<FSDPStateContext>& context) {
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "fully_shard");
  TORCH_CHECK_VALUE(
      context->running_backward.expired(),
      "fully_shard: a backward through modules that are being sharded is "
      "running. Shard all modules before training.");
  TORCH_CHECK_VALUE(context->full_parameter_scopes == 0,
                    "fully_shard: a composable::FullParameters scope is open "
                    "of modules that are being sharded. Close it first.");
  AbortPass(*context);
  for (FSDPState* state : context->states) {
    if (state == nullptr) continue;
    if (state->group() != nullptr) {
      state->group()->ReleaseKeptBuffer(context->pool);
    }
    state->id = -1;
    state->has_tree.store(false, std::memory_order_release);
    state->context = nullptr;
  }
}

}  // namespace composable
