#include "tests/support/shards.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include "state/fsdp_state.h"
#include "state/storage_registry.h"

namespace composable {

bool IsShard(const at::Tensor& parameter) {
  GuardedStorage found;
  return FindGuardedStorage(parameter, &found) && found.is_shard;
}

at::Tensor LocalRows(const at::Tensor& parameter, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(IsShard(parameter), "the parameter is not sharded");
  const ShardedEntry entry = FindShardedEntry(parameter);
  TORCH_CHECK(entry.param != nullptr,
              "the tensor is a view of a shard, not a parameter");
  const auto& segment =
      entry.state->group()->segments()[entry.param->segment()];
  const at::Tensor flat =
      at::zeros_like(segment.flat_shard,
                     segment.flat_shard.options().dtype(whole.scalar_type()));
  entry.param->CopyRowsFrom(whole.detach(), flat);
  return entry.param->RowsIn(flat);
}

std::vector<FSDPModule> ShardEverySubmodule(const ModuleRef& module,
                                            const FullyShardOptions& options) {
  std::vector<FSDPModule> handles;
  auto modules = module->modules(/*include_self=*/false);
  for (auto it = modules.rbegin(); it != modules.rend(); ++it) {
    const bool has_own = !(*it)->parameters(/*recurse=*/false).empty();
    if (has_own && fully_shard.state(*it) == nullptr) {
      handles.push_back(fully_shard(*it, options));
    }
  }
  handles.push_back(fully_shard(module, options));
  return handles;
}

}  // namespace composable
