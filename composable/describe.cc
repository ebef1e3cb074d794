#include "composable/describe.h"

#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "hooks/root_pre_forward.h"
#include "hooks/tree_report.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

const char* Name(BackwardPrefetch prefetch) {
  switch (prefetch) {
    case BackwardPrefetch::kBackwardPre:
      return "backward_pre";
    case BackwardPrefetch::kBackwardPost:
      return "backward_post";
    case BackwardPrefetch::kNone:
      break;
  }
  return "none";
}

ParameterDescription Describe(const FSDPParam& param) {
  ParameterDescription result;
  result.fqn = param.fqn;
  result.sizes = param.sizes().vec();
  result.dtype = param.dtypes().original;
  result.gathered_dtype = param.dtypes().gathered;
  result.reduce_dtype = param.dtypes().reduce;
  result.requires_grad = param.sharded.requires_grad();
  result.has_values = param.has_values;
  result.local_sizes = param.sharded.sizes().vec();
  result.local_begin = param.local_range().begin;
  result.local_end = param.local_range().end;
  result.offset = param.offset();
  return result;
}

GroupDescription Describe(const FSDPState& state) {
  GroupDescription result;
  result.fqn = state.fqn;
  for (const auto& module : state.modules()) {
    result.modules.push_back(module->name());
  }
  result.reshard_after_forward = state.reshard_after_forward;
  result.requires_gradient_sync = state.requires_gradient_sync;
  result.offload_policy = state.options().offload_policy().text();
  FSDPParamGroup* group = state.group();
  if (group == nullptr) return result;
  result.rank = group->communicator().rank();
  result.world_size = group->communicator().size();
  result.sharded_state = ToString(group->sharded_state());
  result.sharded_bytes = static_cast<int64_t>(group->sharded_bytes());
  result.unsharded_bytes = static_cast<int64_t>(group->unsharded_bytes());
  result.pending_gradient_bytes =
      static_cast<int64_t>(state.reduction()->pending_bytes());
  for (const auto& segment : group->segments()) {
    result.padding += segment.layout.padding();
  }
  for (const auto& param : group->params()) {
    result.parameters.push_back(Describe(param));
  }
  return result;
}

std::vector<std::string> Names(const FSDPStateContext& context,
                               const PassOrder& order) {
  std::vector<std::string> names;
  for (size_t i = 0; i < order.size(); ++i) {
    const FSDPState* state = context.states[order.at(i)];
    names.push_back(state == nullptr ? "(gone)" : state->fqn);
  }
  return names;
}

TreeDescription Describe(FSDPStateContext& context) {
  const std::lock_guard<std::recursive_mutex> lock(context.mutex);
  TreeDescription result;
  result.summary = TreeSummary(context);
  result.training_state = ToString(context.training_state);
  result.limit_all_gathers = context.options.limit_all_gathers();
  result.backward_prefetch = Name(context.options.backward_prefetch());
  result.forward_prefetch = context.options.forward_prefetch();
  result.forward_order = Names(context, context.forward_order);
  result.backward_order = Names(context, context.backward_order);
  for (const FSDPState* state : context.states) {
    if (state != nullptr) result.groups.push_back(Describe(*state));
  }
  return result;
}

std::string Sizes(const std::vector<int64_t>& sizes) {
  return "[" + absl::StrJoin(sizes, ", ") + "]";
}

}  // namespace

Description describe(const ModuleRef& module) {
  Description result;
  absl::flat_hash_set<const FSDPStateContext*> seen;
  for (const auto& below : module->modules()) {
    const auto state = FindFSDPState(*below);
    if (state == nullptr) continue;
    const auto context = LazyInit(*state);
    if (seen.insert(context.get()).second) {
      result.trees.push_back(Describe(*context));
    }
  }
  for (const auto& item : module->named_parameters()) {
    if (FindShardedEntry(item.value()).param == nullptr) {
      result.plain_parameters.push_back(item.key());
    }
  }
  return result;
}

namespace {

// What is done in another dtype than that of the shard.
std::string Differing(const char* what, c10::ScalarType dtype,
                      const ParameterDescription& param) {
  return dtype == param.dtype
             ? ""
             : absl::StrCat(", ", what, " in ", c10::toString(dtype));
}

}  // namespace

std::string to_string(const Description& description) {
  std::string text;
  for (const auto& tree : description.trees) {
    absl::StrAppend(&text, tree.summary, "\n");
    absl::StrAppend(&text, tree.training_state,
                    ", limit_all_gathers=", tree.limit_all_gathers, ", ",
                    tree.backward_prefetch,
                    tree.forward_prefetch ? ", forward_prefetch" : "", "\n");
    for (const auto* order : {&tree.forward_order, &tree.backward_order}) {
      if (order->empty()) continue;
      absl::StrAppend(&text,
                      order == &tree.forward_order ? "forward" : "backward",
                      " order: '", absl::StrJoin(*order, "', '"), "'\n");
    }
    for (const auto& group : tree.groups) {
      absl::StrAppend(&text, "group '", group.fqn, "' (",
                      absl::StrJoin(group.modules, ", "), ")\n");
      if (group.parameters.empty()) continue;
      absl::StrAppend(
          &text, "    ", group.sharded_state, ", reshard_after_forward=",
          group.reshard_after_forward ? "true" : "false", ", rank ", group.rank,
          " of ", group.world_size, ", ", group.sharded_bytes, " of ",
          group.unsharded_bytes, " bytes\n");
      if (!group.requires_gradient_sync) {
        absl::StrAppend(&text, "    no gradient sync, ",
                        group.pending_gradient_bytes, " bytes pending\n");
      }
      if (group.offload_policy != "none") {
        absl::StrAppend(&text, "    offload_policy: ", group.offload_policy,
                        "\n");
      }
      for (const auto& param : group.parameters) {
        absl::StrAppend(&text, "    '", param.fqn, "' ", Sizes(param.sizes),
                        " ", c10::toString(param.dtype),
                        Differing("gathered", param.gathered_dtype, param),
                        Differing("reduced", param.reduce_dtype, param),
                        param.requires_grad ? "" : ", frozen",
                        param.has_values ? "" : ", without values", ": rows ",
                        Sizes(param.local_sizes), " here, elements [",
                        param.local_begin, ", ", param.local_end,
                        ") at offset ", param.offset, "\n");
      }
    }
  }
  for (const auto& name : description.plain_parameters) {
    absl::StrAppend(&text, "not sharded: '", name, "'\n");
  }
  return text;
}

}  // namespace composable
