#include "composable/fsdp_module.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <mutex>

#include "hooks/alone.h"
#include "hooks/root_pre_forward.h"
#include "hooks/unshard.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

// Calls `visit` for the state and, with `recurse`, for every state below it.
template <typename Visit>
void ForEachState(const std::shared_ptr<FSDPState>& state, bool recurse,
                  Visit visit) {
  if (!recurse) {
    visit(*state);
    return;
  }
  for (const auto& root : state->modules()) {
    for (const auto& module : root->modules()) {
      if (const auto found = FindFSDPState(*module)) visit(*found);
    }
  }
}

}  // namespace

std::shared_ptr<FSDPState> FSDPModule::Require(const char* call) const {
  auto state = state_.lock();
  TORCH_CHECK_VALUE(state != nullptr, call,
                    "(): the sharded module of this handle was destroyed.");
  return state;
}

void FSDPModule::unshard() {
  const auto state = Require("unshard");
  if (state->group() == nullptr) return;
  const auto context = LazyInit(*state);
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "unshard()");
  FSDPState* needed = state.get();
  IssueUnshard(*context, {&needed, 1}, context->forward_order);
  WaitUnshard(*context, {&needed, 1});
  state->pinned = true;
  state->left = false;
  state->prefetched = false;
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

void FSDPModule::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  ForEachState(
      Require("set_requires_gradient_sync"), recurse,
      [&](FSDPState& state) { state.requires_gradient_sync = requires_sync; });
}

size_t FSDPModule::pending_gradient_bytes() const {
  const auto state = Require("pending_gradient_bytes");
  return state->group() == nullptr ? 0 : state->reduction()->pending_bytes();
}

void FSDPModule::clear_pending_gradients(bool recurse) {
  ForEachState(Require("clear_pending_gradients"), recurse,
               [](FSDPState& state) {
                 const auto lock = state.LockTree();
                 if (state.group() != nullptr) {
                   state.reduction()->ClearPending();
                 }
               });
}

void FSDPModule::mark_dirty() {
  const auto state = Require("mark_dirty");
  const auto lock = state->LockTree();
  if (state->group() != nullptr) state->group()->MarkAllDirty();
}

}  // namespace composable
