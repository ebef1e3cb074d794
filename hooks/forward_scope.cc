#include "hooks/forward_scope.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include "hooks/alone.h"
#include "hooks/finalize_backward.h"
#include "hooks/join.h"
#include "hooks/pre_backward.h"
#include "hooks/pre_forward.h"
#include "hooks/root_post_backward.h"
#include "hooks/root_pre_forward.h"

namespace composable {
namespace {

// Open scopes of this thread, of whatever module.
thread_local int64_t t_open_scopes = 0;

// An exception leaves the forward of a tree. It may have come from a backward
// in it, but what another thread uses stays.
void AbortForward(FSDPStateContext& context) {
  if (context.running_backward.expired() && IsAlone(context)) {
    AbortPass(context);
  }
}

// Nothing in the scopes that are still open uses `state` next.
void Leave(FSDPStateContext& context, FSDPState& state) {
  if (state.group() == nullptr || state.group()->is_sharded() ||
      state.prefetched) {
    return;
  }
  state.left = true;
  // A later read without a scope is to be noticed.
  auto& current = context.current;
  if (std::find(current.begin(), current.end(), &state) != current.end()) {
    current.clear();
  }
}

}  // namespace

namespace internal {

ForwardScope::ForwardScope(const torch::nn::Module& module)
    : state_(FindFSDPState(module)), exceptions_(std::uncaught_exceptions()) {
  if (state_ != nullptr) {
    ReadPolicy();
    Open();
  }
  ++t_open_scopes;
}

void ForwardScope::ReadPolicy() {
  const MixedPrecisionPolicy& policy = state_->options().mp_policy();
  if (policy.cast_forward_inputs()) input_dtype_ = policy.param_dtype();
  output_dtype_ = policy.output_dtype();
}

ForwardScope::~ForwardScope() noexcept(false) {
  --t_open_scopes;
  if (state_ == nullptr) return;
  const bool failed = std::uncaught_exceptions() > exceptions_;
  try {
    Close(failed);
  } catch (const std::exception& error) {
    if (!failed) throw;
    TORCH_WARN("The end of the forward of '", state_->fqn,
               "' failed: ", error.what());
  }
}

void ForwardScope::Open() {
  context_ = LazyInit(*state_);
  const std::lock_guard<std::recursive_mutex> lock(context_->mutex);
  CheckAlone(*context_, "the forward of '", state_->fqn, "' begins");
  FSDPState* state = state_.get();
  FSDPParamGroup* group = state->group();
  if (torch::autograd::get_current_graph_task_id() != -1) {
    if (group != nullptr) PreBackward(context_, {&state, 1});
    state_.reset();
    return;
  }
  if (state->is_root()) {
    context_->has_boundary = true;
    starts_evaluation_ = context_->training_state == TrainingState::kIdle &&
                         !c10::GradMode::is_enabled();
  }
  if (context_->training_state == TrainingState::kIdle) {
    CheckMayBeginForward(*context_);  // which is no reason to drop gradients
  }
  ++context_->open_scopes;
  ++state->open_scopes;
  try {
    RootPreForward(*context_);
    if (group != nullptr) {
      const auto count = static_cast<int>(group->params().size());
      for (int i = 0; c10::GradMode::is_enabled() && i < count; ++i) {
        SyncGradientEdge(*context_, *state, i);
      }
      PreForward(*context_, {&state, 1});
    }
  } catch (...) {
    --context_->open_scopes;
    --state->open_scopes;
    if (state->is_root() && state->open_scopes == 0) AbortForward(*context_);
    throw;
  }
}

void ForwardScope::Close(bool failed) {
  const std::lock_guard<std::recursive_mutex> lock(context_->mutex);
  --context_->open_scopes;
  if (--state_->open_scopes > 0) return;
  if (state_->context != context_) return;  // fully_shard made another tree
  if (!state_->is_root()) {
    Leave(*context_, *state_);
    return;
  }
  if (failed) {
    AbortForward(*context_);
    return;
  }
  try {
    JoinEnd(*context_, JoinOp::kEndForward);
  } catch (...) {
    AbortForward(*context_);
    throw;
  }
  if (starts_evaluation_ &&
      context_->training_state == TrainingState::kForward) {
    Transition(&context_->training_state, TreeEvent::kEndForward);
  }
}

}  // namespace internal

bool ReadsOutsideForward(const FSDPStateContext& context,
                         const FSDPState& state, int param,
                         const std::string& op) {
  if (!context.has_boundary || context.open_scopes > 0 || t_open_scopes > 0) {
    return false;
  }
  FSDPParamGroup& group = *state.group();
  const bool fresh =
      group.sharded_state() == ShardedState::kUnsharded && !group.dirty();
  if (state.pinned && fresh) return true;
  TORCH_CHECK_VALUE(
      false, "Rank ", group.communicator().rank(), ": ", op,
      " reads the whole parameter '", group.params()[param].fqn,
      "', which is sharded, outside any forward or backward: the forward of "
      "the root module has ended. ",
      state.pinned
          ? "unshard() was called on its group, but its shards have changed "
            "since. Call unshard() again, on every rank."
          : "A gather here would wait for all other ranks. To read it, call "
            "unshard() on the handle that fully_shard returned, on every rank, "
            "and reshard() afterwards; for values, call "
            "composable::full_state_dict. In a method of the model other than "
            "forward, open a composable::ForwardScope scope(model) first.");
}

}  // namespace composable
