// Which parameters one call of fully_shard takes: all of the given modules and
// their submodules that no earlier call took.
//
//   composable::ManagedParams managed =
//       composable::CollectManagedParams({module}, "fully_shard");
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "state/fsdp_param.h"

namespace composable {

struct ManagedParams {
  // Parameters to shard, each once, in the order of registration.
  std::vector<OwnedParam> owned;
  // Entries of these modules that name a parameter which an earlier group owns:
  // they get that group's shard, so that tied parameters stay tied.
  struct Tied {
    ParameterSlot slot;
    at::Tensor whole;  // the entry as it is
    at::Tensor shard;
  };
  std::vector<Tied> tied;
};

// Parameters without elements, undefined entries, and those that are ignored, by
// this call or an earlier one, are left alone. Those on the meta device count as
// CPU parameters without values.
//
// Throws, naming the parameter and what to do: c10::ValueError for a non-leaf,
// an inference tensor, a sparse or not dense tensor, a parameter that no member
// field holds, two that share memory without being one tensor, modules whose
// parameters a module above has taken, and a tensor to ignore that is sharded
// already or no parameter of the modules; c10::NotImplementedError for a device
// other than the CPU and for complex parameters. Changes nothing.
ManagedParams CollectManagedParams(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
    const std::string& api, const std::vector<at::Tensor>& ignored = {});

// Replaces the entries by the shards, and back.
void TieToShards(const std::vector<ManagedParams::Tied>& tied);
void UntieFromShards(const std::vector<ManagedParams::Tied>& tied);

}  // namespace composable
