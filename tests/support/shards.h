// Questions about shards that tests ask.
//
//   at::Tensor mine = composable::LocalRows(parameter, whole_gradient);
//   EXPECT_TRUE(torch::equal(parameter.grad(), mine));
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "composable/fully_shard.h"
#include "composable/module_ref.h"

namespace composable {

// This rank's rows of `whole`, shaped as the shard of `parameter` is. Throws if
// `parameter` is not sharded.
at::Tensor LocalRows(const at::Tensor& parameter, const at::Tensor& whole);

// Whether an entry of a module's parameters is a shard.
bool IsShard(const at::Tensor& parameter);

// Applies fully_shard to every submodule with parameters of its own, bottom-up,
// and to the module itself: as many groups as there can be.
std::vector<FSDPModule> ShardEverySubmodule(const ModuleRef& module,
                                            const FullyShardOptions& options);

}  // namespace composable
