#include "composable/fsdp_module.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "composable/for_each_state.h"
#include "hooks/alone.h"
#include "hooks/finalize_backward.h"
#include "hooks/join.h"
#include "hooks/reduce.h"
#include "hooks/root_post_backward.h"
#include "hooks/root_pre_forward.h"
#include "hooks/unshard.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

// Sets what is of the whole tree that `state` belongs to now.
template <typename Visit>
void ForTree(std::shared_ptr<FSDPState> state, Visit visit) {
  while (auto parent = state->parent.lock()) state = std::move(parent);
  ForEachState(state, /*recurse=*/true, visit);
}

std::vector<std::weak_ptr<FSDPState>> StatesToPrefetch(
    const std::vector<ModuleRef>& modules, const char* call) {
  std::vector<std::weak_ptr<FSDPState>> states;
  for (const auto& module : modules) {
    const auto state = FindFSDPState(*module);
    TORCH_CHECK_VALUE(state != nullptr, call, "(): Expects FSDPModule but got ",
                      module->name(),
                      ", which fully_shard was not applied to.");
    states.emplace_back(state);
  }
  return states;
}

void CheckNotInBackward(const FSDPStateContext& context, const char* call) {
  CheckAlone(context, call, "()");
  TORCH_CHECK_VALUE(!context.is_in_backward(), call,
                    "() was called inside a backward of the tree. Call it "
                    "after the backward.");
}

}  // namespace

std::shared_ptr<FSDPState> FSDPModule::Require(const char* call) const {
  auto state = state_.lock();
  TORCH_CHECK_VALUE(state != nullptr, call,
                    "(): the sharded module of this handle was destroyed.");
  return state;
}

UnshardHandle FSDPModule::unshard(bool async_op) {
  const auto state = Require("unshard");
  if (state->group() == nullptr) return {};
  const auto context = LazyInit(*state);
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "unshard()");
  FSDPState* needed = state.get();
  const bool pinned = std::exchange(state->pinned, true);
  try {
    IssueUnshard(*context, {&needed, 1}, context->forward_order);
    JoinCall(*context);
    if (!async_op) WaitUnshard(*context, {&needed, 1});
  } catch (...) {
    state->pinned = pinned;
    throw;
  }
  state->left = false;
  state->prefetched = false;
  return async_op ? UnshardHandle(state) : UnshardHandle();
}

void FSDPModule::reshard() {
  const auto state = Require("reshard");
  const auto context = state->tree();
  if (state->group() == nullptr || context == nullptr) return;
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "reshard()");
  TORCH_CHECK_VALUE(state->full_parameter_scopes == 0,
                    "reshard() was called in a composable::FullParameters "
                    "scope, which frees the parameters at its end.");
  state->pinned = false;
  Reshard(*context, *state);
}

void FSDPModule::set_reshard_after_forward(bool reshard, bool recurse) {
  ForEachState(Require("set_reshard_after_forward"), recurse,
               [&](FSDPState& state) {
                 state.reshard_after_forward_override = reshard;
                 state.reshard_after_forward = reshard;
                 if (state.group() != nullptr) state.group()->KeepNoPart();
                 const auto context = state.tree();
                 if (context != nullptr) SetSlotCapacity(*context);
               });
}

void FSDPModule::set_reshard_after_backward(bool reshard, bool recurse) {
  ForEachState(
      Require("set_reshard_after_backward"), recurse,
      [&](FSDPState& state) { state.reshard_after_backward = reshard; });
}

void FSDPModule::set_unshard_in_backward(bool unshard, bool recurse) {
  ForEachState(Require("set_unshard_in_backward"), recurse,
               [&](FSDPState& state) { state.unshard_in_backward = unshard; });
}

void FSDPModule::set_keep_unsharded_storage(bool keep, bool recurse) {
  ForEachState(Require("set_keep_unsharded_storage"), recurse,
               [&](FSDPState& state) {
                 state.keep_unsharded_storage = keep;
                 if (state.group() == nullptr) return;
                 state.group()->set_keep_buffer(keep);
                 const auto context = state.tree();
                 if (keep || context == nullptr) return;
                 state.group()->ReleaseKeptBuffer(context->pool);
                 context->pool.Purge();
               });
}

void FSDPModule::set_modules_to_forward_prefetch(
    const std::vector<ModuleRef>& modules) {
  const auto state = Require("set_modules_to_forward_prefetch");
  auto states = StatesToPrefetch(modules, "set_modules_to_forward_prefetch");
  const auto lock = state->LockTree();
  state->forward_prefetch = std::move(states);
}

void FSDPModule::set_modules_to_backward_prefetch(
    const std::vector<ModuleRef>& modules) {
  const auto state = Require("set_modules_to_backward_prefetch");
  auto states = StatesToPrefetch(modules, "set_modules_to_backward_prefetch");
  const auto lock = state->LockTree();
  state->backward_prefetch = std::move(states);
}

void FSDPModule::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  ForEachState(
      Require("set_requires_gradient_sync"), recurse, [&](FSDPState& state) {
        state.requires_gradient_sync = requires_sync;
        if (state.group() != nullptr) {
          state.reduction()->settings().requires_all_reduce = requires_sync;
        }
      });
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  ForTree(Require("set_is_last_backward"), [&](FSDPState& state) {
    state.is_last_backward = is_last_backward;
    const auto context = state.tree();
    if (context != nullptr) context->is_last_backward = is_last_backward;
  });
}

void FSDPModule::set_manual_backward_finalization(bool manual) {
  ForTree(Require("set_manual_backward_finalization"), [&](FSDPState& state) {
    const auto context = state.tree();
    if (context != nullptr && context->manual_finalization != manual) {
      CheckNotInBackward(*context, "set_manual_backward_finalization");
      TORCH_CHECK_VALUE(
          !context->unfinalized,
          "set_manual_backward_finalization() was called between a backward "
          "and its finalization. Call finalize_backward() first.");
      context->manual_finalization = manual;
    }
    state.manual_finalization = manual;
  });
}

GradientReductionHandle FSDPModule::finalize_backward(bool async_op) {
  const auto state = Require("finalize_backward");
  const auto context = LazyInit(*state);
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "finalize_backward()");
  auto finalization = FinalizeBackward(*context, async_op);
  if (finalization == nullptr) return {};
  return {context, std::move(finalization)};
}

void FSDPModule::reset_iter_state() {
  const auto context = Require("reset_iter_state")->tree();
  if (context == nullptr) return;
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckNotInBackward(*context, "reset_iter_state");
  AbortPass(*context);
}

torch::OrderedDict<std::string, at::Tensor> FSDPModule::get_pending_gradients(
    bool recurse) const {
  torch::OrderedDict<std::string, at::Tensor> gradients;
  ForEachState(Require("get_pending_gradients"), recurse,
               [&](FSDPState& state) {
                 if (state.group() == nullptr) return;
                 const auto& params = state.group()->params();
                 const auto wholes = state.reduction()->Pending();
                 for (size_t i = 0; i < params.size(); ++i) {
                   if (wholes[i].defined())
                     gradients.insert(params[i].fqn, wholes[i]);
                 }
               });
  return gradients;
}

size_t FSDPModule::pending_gradient_bytes() const {
  const auto state = Require("pending_gradient_bytes");
  const auto lock = state->LockTree();
  return state->group() == nullptr ? 0 : state->reduction()->pending_bytes();
}

void FSDPModule::clear_pending_gradients(bool recurse) {
  ForEachState(Require("clear_pending_gradients"), recurse,
               [](FSDPState& state) {
                 if (state.group() != nullptr) {
                   state.reduction()->ClearPending();
                 }
               });
}

void FSDPModule::synchronize_gradients(bool recurse) {
  const auto state = Require("synchronize_gradients");
  const auto context = state->tree();
  if (context == nullptr) return;  // there was no backward
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckNotInBackward(*context, "synchronize_gradients");
  std::vector<FSDPState*> states;
  const auto alive = StatesOf(state, recurse);
  for (const auto& s : alive) {
    if (s->tree() == context) states.push_back(s.get());
  }
  AbortOnError abort(*context);
  ReducePending(*context, states);
  JoinCall(*context);
  FinishReductions(*context);
  abort.Cancel();
}

void FSDPModule::mark_dirty() {
  const auto state = Require("mark_dirty");
  const auto lock = state->LockTree();
  if (state->group() == nullptr) return;
  if (lock.owns_lock()) CheckMayWriteShards(*state, "mark_dirty()");
  state->group()->MarkAllDirty();
}

}  // namespace composable
