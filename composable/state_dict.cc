#include "composable/state_dict.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "hooks/alone.h"
#include "hooks/finalize_backward.h"
#include "hooks/join.h"
#include "hooks/root_pre_forward.h"
#include "hooks/unshard.h"
#include "state/fsdp_state.h"
#include "state/payload_pieces.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

// A parameter or buffer under its name.
struct Item {
  std::string fqn;
  at::Tensor tensor;                 // plain value, shard, or whole (tied)
  std::shared_ptr<FSDPState> state;  // null: plain
  const FSDPParam* param = nullptr;
  at::IntArrayRef sizes() const {
    return param == nullptr ? tensor.sizes() : param->sizes();
  }
};

std::vector<Item> Items(const torch::nn::Module& module) {
  std::vector<Item> items;
  for (const auto& entry : module.named_parameters()) {
    auto sharded = FindShardedEntry(entry.value());
    items.push_back(
        {entry.key(), entry.value(), std::move(sharded.state), sharded.param});
  }
  for (const auto& entry : module.named_buffers()) {
    if (entry.value().defined()) {
      items.push_back({entry.key(), entry.value(), nullptr, nullptr});
    }
  }
  return items;
}

// Copies the whole values of all items of `state` into `values`, in the dtype
// of their shards.
void GatherInto(FSDPState& state, const std::vector<Item>& items,
                std::vector<at::Tensor>& values) {
  const auto context = LazyInit(state);
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckAlone(*context, "full_state_dict");
  FSDPParamGroup& group = *state.group();
  if (group.is_cast()) {  // what operators use is not what shards hold
    const auto wholes = group.GatherShards();
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].state.get() != &state) continue;
      const FSDPParam& param = *items[i].param;
      const int64_t shard_numel =
          group.segments()[param.segment()].layout.shard_numel();
      values[i] = WholeOfPayload(param, {shard_numel, shard_numel},
                                 wholes[param.segment()]);
    }
    return;
  }
  FSDPState* needed = &state;
  const bool was_sharded = group.is_sharded();
  IssueUnshard(*context, {&needed, 1}, context->forward_order);
  JoinCall(*context);
  WaitUnshard(*context, {&needed, 1});
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].state.get() != &state) continue;
    const FSDPParam& param = *items[i].param;
    values[i] = group.GatheredValue(param).clone();
  }
  if (was_sharded) {
    Reshard(*context, state);
    context->pool.Purge();
  }
}

}  // namespace

StateDict full_state_dict(const ModuleRef& module) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const auto items = Items(*module);
  std::vector<at::Tensor> values(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (values[i].defined()) continue;
    if (items[i].state == nullptr) {
      values[i] = items[i].tensor.detach().clone();
    } else {
      GatherInto(*items[i].state, items, values);
    }
  }
  StateDict result;
  for (size_t i = 0; i < items.size(); ++i) {
    result.insert(items[i].fqn, std::move(values[i]));
  }
  return result;
}

LoadResult load_full_state_dict(const ModuleRef& module,
                                const StateDict& state_dict, bool strict) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const auto items = Items(*module);
  LoadResult result;
  std::vector<std::string> misshapen;
  StateDict unexpected = state_dict;
  for (const auto& item : items) {
    const at::Tensor* value = state_dict.find(item.fqn);
    if (value == nullptr) {
      result.missing.push_back(item.fqn);
      continue;
    }
    unexpected.erase(item.fqn);
    if (value->sizes() != item.sizes()) {
      misshapen.push_back(c10::str(item.fqn, " (expected ", item.sizes(),
                                   ", got ", value->sizes(), ")"));
    }
  }
  result.unexpected = unexpected.keys();
  const bool fits = result.missing.empty() && result.unexpected.empty();
  TORCH_CHECK_VALUE(
      (fits || !strict) && misshapen.empty(),
      "load_full_state_dict: the state dict does not fit the module ",
      module->name(), ". Missing: [",
      strict ? absl::StrJoin(result.missing, ", ") : "", "]. Unexpected: [",
      strict ? absl::StrJoin(result.unexpected, ", ") : "",
      "]. Of another shape: [", absl::StrJoin(misshapen, ", "),
      "]. Nothing was loaded; pass strict=false to skip missing and "
      "unexpected names.");
  for (const auto& item : items) {
    TORCH_CHECK_VALUE(
        item.state == nullptr || item.state->full_parameter_writers == 0,
        "load_full_state_dict was called in a composable::FullParameters "
        "scope, "
        "which would replace '",
        item.fqn, "' at its end. Close the scope first.");
  }
  for (const auto& item : items) {
    if (item.state == nullptr || !state_dict.contains(item.fqn)) continue;
    const auto lock = item.state->LockTree();
    if (lock.owns_lock()) {
      CheckMayWriteShards(*item.state, "load_full_state_dict");
    }
  }
  for (const auto& item : items) {
    const at::Tensor* value = state_dict.find(item.fqn);
    if (value == nullptr) continue;
    if (item.state == nullptr) {
      if (item.tensor.is_meta()) internal::GiveMemory(item.tensor);
      at::Tensor(item.tensor).copy_(*value);
      continue;
    }
    FSDPParamGroup& group = *item.state->group();
    if (group.stands_alone()) LazyInit(*item.state);
    const auto lock = item.state->LockTree();
    group.MarkAllDirty();
    group.SetHasValues(static_cast<int>(item.param - group.params().data()),
                       true);
    item.param->CopyRowsFrom(
        *value, group.segments()[item.param->segment()].flat_shard);
  }
  return result;
}

}  // namespace composable
