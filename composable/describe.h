// What is sharded, how, and in what state, for people and for tools.
//
//   composable::fully_shard(model);
//   const composable::Description description = composable::describe(model);
//   std::cout << composable::to_string(description);
//   std::string json = composable::to_json(description);
//
// An example of the text:
//
//   fully_shard: 1 group, 15 parameters, 8 on this rank (6.2 % padding)
//   idle, limit_all_gathers=2, backward_pre, forward_prefetch
//   group '' (torch::nn::LinearImpl)
//       sharded, reshard_after_forward=false, rank 0 of 2, 32 of 128 bytes
//       'weight' [3, 5] Float: rows [8, 1] here, elements [0, 8) at offset 0
//
// Elements are counted in the order of memory, offsets in elements of the group's
// unsharded buffer.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "composable/module_ref.h"

namespace composable {

struct ParameterDescription {
  std::string fqn;
  std::vector<int64_t> sizes;                          // of the whole
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the shard
  // Of what operators read, and of the reduction.
  c10::ScalarType gathered_dtype = c10::ScalarType::Undefined;
  c10::ScalarType reduce_dtype = c10::ScalarType::Undefined;
  bool requires_grad = true;
  bool has_values = true;            // false: was on the meta device
  std::vector<int64_t> local_sizes;  // of the shard
  int64_t local_begin = 0;           // elements of the parameter
  int64_t local_end = 0;
  int64_t offset = 0;  // of the parameter
};

struct GroupDescription {
  std::string fqn;  // of the first module, from the root; "" for the root
  std::vector<std::string> modules;  // their types
  int rank = 0;
  int world_size = 1;
  std::string sharded_state;  // "sharded", "unsharding" or "unsharded"
  bool reshard_after_forward = true;
  bool requires_gradient_sync = true;
  std::string offload_policy;  // "none", "cpu" or "cpu, pin_memory"
  int64_t sharded_bytes = 0;
  int64_t unsharded_bytes = 0;
  int64_t pending_gradient_bytes = 0;
  int64_t padding = 0;  // elements, over all ranks
  std::vector<ParameterDescription> parameters;
};

struct TreeDescription {
  std::string summary;         // one line
  std::string training_state;  // "idle", ...
  int64_t limit_all_gathers = 0;
  std::string backward_prefetch;  // "backward_pre", "backward_post", "none"
  bool forward_prefetch = true;
  // What the next pass follows: FQNs of groups, in order, with repeats.
  std::vector<std::string> forward_order;
  std::vector<std::string> backward_order;
  // In the order of the modules; those without parameters too.
  std::vector<GroupDescription> groups;
};

struct Description {
  std::vector<TreeDescription> trees;         // usually one
  std::vector<std::string> plain_parameters;  // that no call took
};

// Of this rank; no communication.
Description describe(const ModuleRef& module);

std::string to_string(const Description& description);
// An object with the fields of the structs above.
std::string to_json(const Description& description);

}  // namespace composable
