#include <nlohmann/json.hpp>

#include "composable/describe.h"

namespace composable {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const ParameterDescription& param) {
  return {{"fqn", param.fqn},
          {"sizes", param.sizes},
          {"dtype", c10::toString(param.dtype)},
          {"gathered_dtype", c10::toString(param.gathered_dtype)},
          {"reduce_dtype", c10::toString(param.reduce_dtype)},
          {"requires_grad", param.requires_grad},
          {"has_values", param.has_values},
          {"local_sizes", param.local_sizes},
          {"local_begin", param.local_begin},
          {"local_end", param.local_end},
          {"offset", param.offset}};
}

Json ToJson(const GroupDescription& group) {
  Json parameters = Json::array();
  for (const auto& param : group.parameters) {
    parameters.push_back(ToJson(param));
  }
  return {{"fqn", group.fqn},
          {"modules", group.modules},
          {"rank", group.rank},
          {"world_size", group.world_size},
          {"sharded_state", group.sharded_state},
          {"reshard_after_forward", group.reshard_after_forward},
          {"requires_gradient_sync", group.requires_gradient_sync},
          {"offload_policy", group.offload_policy},
          {"sharded_bytes", group.sharded_bytes},
          {"unsharded_bytes", group.unsharded_bytes},
          {"pending_gradient_bytes", group.pending_gradient_bytes},
          {"padding", group.padding},
          {"parameters", std::move(parameters)}};
}

Json ToJson(const TreeDescription& tree) {
  Json groups = Json::array();
  for (const auto& group : tree.groups) groups.push_back(ToJson(group));
  return {{"summary", tree.summary},
          {"training_state", tree.training_state},
          {"limit_all_gathers", tree.limit_all_gathers},
          {"backward_prefetch", tree.backward_prefetch},
          {"forward_prefetch", tree.forward_prefetch},
          {"forward_order", tree.forward_order},
          {"backward_order", tree.backward_order},
          {"groups", std::move(groups)}};
}

}  // namespace

std::string to_json(const Description& description) {
  Json trees = Json::array();
  for (const auto& tree : description.trees) trees.push_back(ToJson(tree));
  const Json all = {{"trees", std::move(trees)},
                    {"plain_parameters", description.plain_parameters}};
  return all.dump(2);
}

}  // namespace composable
