#include "composable/fully_shard.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "composable/contract.h"
#include "hooks/gradient_sink.h"
#include "hooks/guard.h"
#include "hooks/root_pre_forward.h"
#include "state/fsdp_state.h"
#include "state/group_communicators.h"
#include "state/initial_values.h"
#include "state/managed_params.h"
#include "state/offload_policy.h"

namespace composable {
namespace {

// Modules that no other one of the list contains.
Modules Roots(const Modules& modules) {
  Modules roots;
  for (const auto& module : modules) {
    if (std::find(roots.begin(), roots.end(), module) != roots.end()) continue;
    const bool inside =
        std::any_of(modules.begin(), modules.end(), [&](const auto& other) {
          if (other == module) return false;
          const auto below = other->modules(/*include_self=*/false);
          return std::find(below.begin(), below.end(), module) != below.end();
        });
    if (!inside) roots.push_back(module);
  }
  return roots;
}

// The states below `modules`, which get a tree above them.
std::vector<std::shared_ptr<FSDPState>> StatesBelow(const Modules& modules) {
  std::vector<std::shared_ptr<FSDPState>> states;
  for (const auto& module : modules) {
    for (const auto& child : module->modules(/*include_self=*/false)) {
      if (auto state = FindFSDPState(*child))
        states.push_back(std::move(state));
    }
  }
  return states;
}

// Asks the functions of `options` about each parameter.
void ResolvePlacements(const FullyShardOptions& options, int world_size,
                       std::vector<OwnedParam>& owned) {
  for (OwnedParam& param : owned) {
    std::optional<Placement> placement;
    if (options.shard_placement_fn() != nullptr) {
      placement = options.shard_placement_fn()(param.name, param.parameter);
    }
    param.placement =
        ResolvePlacement(placement, param.name, param.parameter, world_size);
    if (options.all_gather_extension_fn() == nullptr) continue;
    param.extension =
        options.all_gather_extension_fn()(param.name, param.parameter);
    if (param.extension == nullptr) continue;
    TORCH_CHECK_VALUE(
        param.placement.kind == Placement::Kind::kRagged ||
            param.placement.kind == Placement::Kind::kShard,
        "fully_shard: all_gather_extension_fn gave an extension for parameter "
        "'",
        param.name, "' of sizes ", param.parameter.sizes(),
        ", whose placement is ", ToString(param.placement),
        ": expected Shard(dim), or none for Shard(0).");
    if (param.placement.kind == Placement::Kind::kRagged) {
      param.placement = composable::Shard(0);
    }
  }
}

// Buffers below `module` that no earlier call has looked at.
void CollectBuffers(const torch::nn::Module& module, const std::string& prefix,
                    absl::flat_hash_set<const c10::TensorImpl*>& seen,
                    std::vector<NamedBuffer>& buffers) {
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || tensor.layout() != c10::kStrided ||
        !(tensor.is_cpu() || tensor.is_meta()) ||
        !seen.insert(tensor.unsafeGetTensorImpl()).second) {
      continue;
    }
    buffers.push_back({prefix + item.key(), tensor});
  }
  for (const auto& child : module.named_children()) {
    if (FindFSDPState(*child.value()) != nullptr) continue;
    CollectBuffers(*child.value(), prefix + child.key() + ".", seen, buffers);
  }
}

std::vector<NamedBuffer> BuffersOf(const Modules& modules) {
  std::vector<NamedBuffer> buffers;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  for (const auto& module : modules) {
    CollectBuffers(*module, "", seen, buffers);
  }
  return buffers;
}

// Makes the start values equal on all ranks, or checks that they are; returns
// what is to become of the buffers.
std::vector<at::Tensor> MakeEqual(GroupCommunicators& communicators,
                                  FSDPParamGroup* group,
                                  const std::vector<NamedBuffer>& buffers,
                                  const Modules& modules,
                                  const FullyShardOptions& options) {
  Communicator* replicas =
      communicators.replicate ? &*communicators.replicate : nullptr;
  if (communicators.shard.size() == 1 &&
      (replicas == nullptr || replicas->size() == 1)) {
    return {};
  }
  const std::string& module = modules.front()->name();
  if (!options.sync_module_states()) {
    if (!options.check_module_states()) return {};
    CheckInitialValues(communicators.shard, replicas, group, buffers, module);
    return {};
  }
  auto values = SyncInitialValues(communicators.shard, group, buffers, module);
  if (replicas == nullptr) return values;
  if (group != nullptr) {
    BroadcastShards(*replicas, *group, module);
  }
  std::vector<NamedBuffer> synced = buffers;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].defined()) synced[i].tensor = values[i];
  }
  auto of_first_replica = SyncInitialValues(*replicas, nullptr, synced, module);
  return of_first_replica.empty() ? values : of_first_replica;
}

std::shared_ptr<FSDPState> Shard(const Modules& modules,
                                 const FullyShardOptions& options) {
  CheckGuard();
  TORCH_CHECK_VALUE(options.limit_all_gathers() >= 1,
                    "fully_shard: expected limit_all_gathers of at least 1, "
                    "got ",
                    options.limit_all_gathers(), ".");
  CheckMesh(options.mesh());
  CheckOffloadPolicy(options.offload_policy(), options.mesh());
  ManagedParams managed =
      CollectManagedParams(modules, kFullyShardApi, options.ignored_params());
  const auto buffers = BuffersOf(modules);
  std::optional<GroupCommunicators> communicators;
  FullyShardOptions resolved = options;
  if (!managed.owned.empty() || !buffers.empty()) {
    communicators = MakeGroupCommunicators(options.mesh(), c10::kCPU,
                                           resolved.reshard_after_forward());
    ResolvePlacements(options, communicators->shard.size(), managed.owned);
  }
  const auto below = StatesBelow(modules);
  for (const auto& state : below) {
    if (const auto context = state->tree()) ResetTree(context);
  }
  std::vector<at::Tensor> synced;  // buffers
  std::unique_ptr<FSDPParamGroup> group;
  if (communicators) {
    if (!managed.owned.empty()) {
      group = std::make_unique<FSDPParamGroup>(managed.owned, *communicators,
                                               options.mp_policy());
    }
    synced = MakeEqual(*communicators, group.get(), buffers, modules, options);
  }
  // The functions might own the modules.
  resolved.shard_placement_fn(nullptr).all_gather_extension_fn(nullptr);
  resolved.ignored_params({});
  auto state = std::make_shared<FSDPState>(modules, resolved, std::move(group));
  state->ignored = std::make_unique<IgnoredParams>(options.ignored_params());
  state->undo = [tied = managed.tied,
                 buffers_back = BuffersBack(buffers, synced)] {
    UntieFromShards(tied);
    buffers_back();
  };
  if (state->group() != nullptr) {
    state->group()->Attach(state, GradientSinkFactory(state));
  }
  TieToShards(managed.tied);
  for (const auto& child : below) {
    if (child->parent.expired()) child->parent = state;
  }
  SetBuffers(buffers, synced);
  return state;
}

constexpr auto kContract = contract<FSDPState>(kFullyShardApi, &Shard);

}  // namespace

FSDPModule FullyShard::Apply(const Modules& modules,
                             const FullyShardOptions& options) {
  return FSDPModule(kContract(Roots(modules), options));
}

FSDPModule FullyShard::operator()(const ModuleRef& module,
                                  const FullyShardOptions& options) const {
  return Apply({module.ptr()}, options);
}

FSDPModule FullyShard::operator()(std::initializer_list<ModuleRef> modules,
                                  const FullyShardOptions& options) const {
  return (*this)(std::vector<ModuleRef>(modules), options);
}

std::shared_ptr<FSDPState> FullyShard::state(const ModuleRef& module) const {
  return kContract.state(module);
}

}  // namespace composable
