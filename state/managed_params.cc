#include "state/managed_params.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "state/fsdp_state.h"
#include "state/ignored_params.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

void CheckShardable(const OwnedParam& owned, const std::string& api) {
  const at::Tensor& p = owned.parameter;
  const std::string who = api + ": parameter '" + owned.name + "' ";
  TORCH_CHECK_NOT_IMPLEMENTED(p.device().is_cpu() || p.is_meta(), who, "is on ",
                              p.device(),
                              ", and only CPU parameters can be sharded. Move "
                              "the module to the CPU first: module->to("
                              "torch::kCPU).");
  TORCH_CHECK_VALUE(p.layout() == c10::kStrided, who, "has layout ", p.layout(),
                    "; expected a strided tensor. Call to_dense() on it.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !p.is_complex(), who,
      "is complex, which the collectives do not carry. Register "
      "torch::view_as_real of it, and view_as_complex it in forward.");
  TORCH_CHECK_VALUE(p.is_leaf(), who,
                    "is not a leaf of the autograd graph. Register a detached "
                    "tensor.");
  TORCH_CHECK_VALUE(!p.is_inference(), who,
                    "was made under InferenceMode, which autograd can't train. "
                    "Construct the module outside of it.");
  TORCH_CHECK_VALUE(p.is_non_overlapping_and_dense(), who, "of sizes ",
                    p.sizes(), " and strides ", p.strides(),
                    " is not dense. Register its contiguous() copy.");
  // One reference is ours.
  const auto members = static_cast<int64_t>(p.use_count()) - 1 -
                       static_cast<int64_t>(owned.slots.size());
  TORCH_CHECK_VALUE(
      members > 0, who,
      "is held by its module's registry alone: no member field keeps it, so a "
      "forward that looks it up by name would read this rank's rows instead "
      "of the whole. Keep the tensor that register_parameter returns in a "
      "member and use that in forward (ParameterList and ParameterDict do "
      "not). To tie it to another module's parameter, register that tensor "
      "here too, and keep it in the member.");
}

// Parameters of equal place in memory that are two tensors: tied by set_data,
// which sharding would undo.
void CheckNotTiedByMemory(const std::vector<OwnedParam>& owned,
                          const std::string& api) {
  absl::flat_hash_map<const void*, const OwnedParam*> at_address;
  for (const auto& param : owned) {
    if (param.parameter.is_meta()) continue;
    const void* address = param.parameter.const_data_ptr();
    const auto [it, is_new] = at_address.emplace(address, &param);
    TORCH_CHECK_VALUE(is_new, api, ": parameters '", it->second->name,
                      "' and '", param.name,
                      "' are two tensors over the same memory, and would no "
                      "longer be tied when sharded. Register one tensor in "
                      "both modules, and keep it in both members.");
  }
}

// Throws unless each of `ignored` is a parameter of the modules, `entries`, that
// no earlier call has sharded.
void CheckIgnored(const std::vector<at::Tensor>& ignored,
                  const absl::flat_hash_set<const c10::TensorImpl*>& entries,
                  const std::string& api) {
  for (size_t i = 0; i < ignored.size(); ++i) {
    const at::Tensor& tensor = ignored[i];
    const std::string who = api + ": ignored_params[" + std::to_string(i) + "]";
    TORCH_CHECK_VALUE(tensor.defined(), who,
                      " is undefined. Expected parameters of the modules.");
    const ShardedEntry sharded = FindShardedEntry(tensor);
    TORCH_CHECK_VALUE(sharded.param == nullptr, who, " is the parameter '",
                      sharded.param->fqn,
                      "', which an earlier call has sharded. Ignore it in that "
                      "call.");
    TORCH_CHECK_VALUE(entries.contains(tensor.unsafeGetTensorImpl()), who,
                      ", of sizes ", tensor.sizes(),
                      ", is no parameter of the modules that are sharded. Pass "
                      "the tensor that register_parameter returned.");
  }
}

}  // namespace

ManagedParams CollectManagedParams(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
    const std::string& api, const std::vector<at::Tensor>& ignored) {
  ManagedParams result;
  absl::flat_hash_set<const c10::TensorImpl*> entries;
  absl::flat_hash_set<const c10::TensorImpl*> to_ignore;
  for (const auto& tensor : ignored) {
    to_ignore.insert(tensor.unsafeGetTensorImpl());
  }
  absl::flat_hash_map<const c10::TensorImpl*, size_t> known;
  absl::flat_hash_set<const torch::nn::Module*> visited;
  absl::flat_hash_set<std::shared_ptr<FSDPState>> owners;  // of shards
  for (const auto& root : modules) {
    for (const auto& item : root->named_modules()) {
      const auto& module = item.value();
      if (!visited.insert(module.get()).second) continue;
      for (const auto& entry : internal::Parameters(*module)) {
        const at::Tensor& tensor = entry.value();
        if (!tensor.defined()) continue;
        const ParameterSlot slot{module, entry.key()};
        GuardedStorage found;
        if (FindGuardedStorage(tensor, &found)) {
          const auto state = found.state.lock();
          if (found.is_shard) {
            owners.insert(state);
            continue;
          }
          const int index =
              state->group()->FindParam(found.segment, tensor.storage_offset());
          result.tied.push_back(
              {slot, tensor, state->group()->params()[index].sharded});
          continue;
        }
        entries.insert(tensor.unsafeGetTensorImpl());
        if (tensor.numel() == 0 || IgnoredParams::Contains(tensor) ||
            to_ignore.contains(tensor.unsafeGetTensorImpl())) {
          continue;
        }
        const auto [it, is_new] =
            known.emplace(tensor.unsafeGetTensorImpl(), result.owned.size());
        if (is_new) {
          result.owned.push_back({tensor,
                                  item.key().empty()
                                      ? entry.key()
                                      : item.key() + "." + entry.key(),
                                  {}});
        }
        result.owned[it->second].slots.push_back(slot);
      }
    }
  }
  CheckIgnored(ignored, entries, api);
  for (const auto& owned : result.owned) CheckShardable(owned, api);
  CheckNotTiedByMemory(result.owned, api);
  const bool taken_from_above =
      std::any_of(owners.begin(), owners.end(), [&](const auto& state) {
        const auto of = state->modules();
        return std::none_of(of.begin(), of.end(), [&](const auto& module) {
          return visited.contains(module.get());
        });
      });
  TORCH_CHECK_VALUE(
      !taken_from_above || !result.owned.empty() || !result.tied.empty(), api,
      ": all parameters of this module of type ", modules.front()->name(),
      " belong to an earlier call on a module above it. Apply it bottom-up: to "
      "blocks first, then to the module that contains them.");
  return result;
}

void TieToShards(const std::vector<ManagedParams::Tied>& tied) {
  for (const auto& entry : tied) {
    internal::Parameters(*entry.slot.module.lock())[entry.slot.key] =
        entry.shard;
  }
}

void UntieFromShards(const std::vector<ManagedParams::Tied>& tied) {
  for (const auto& entry : tied) {
    if (const auto module = entry.slot.module.lock()) {
      internal::Parameters(*module)[entry.slot.key] = entry.whole;
    }
  }
}

}  // namespace composable
