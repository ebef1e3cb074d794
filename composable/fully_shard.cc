#include "composable/fully_shard.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "composable/contract.h"
#include "hooks/gradient_sink.h"
#include "hooks/guard.h"
#include "hooks/root_pre_forward.h"
#include "state/fsdp_state.h"
#include "state/group_communicators.h"
#include "state/managed_params.h"

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

std::shared_ptr<FSDPState> Shard(const Modules& modules,
                                 const FullyShardOptions& options) {
  CheckGuard();
  TORCH_CHECK_VALUE(options.limit_all_gathers() >= 1,
                    "fully_shard: expected limit_all_gathers of at least 1, "
                    "got ",
                    options.limit_all_gathers(), ".");
  CheckMesh(options.mesh());
  const ManagedParams managed = CollectManagedParams(modules, kFullyShardApi);
  std::optional<GroupCommunicators> communicators;
  FullyShardOptions resolved = options;
  if (!managed.owned.empty()) {
    communicators = MakeGroupCommunicators(options.mesh(), c10::kCPU,
                                           resolved.reshard_after_forward());
  }
  const auto below = StatesBelow(modules);
  for (const auto& state : below) {
    if (const auto context = state->tree()) ResetTree(context);
  }
  std::unique_ptr<FSDPParamGroup> group;
  if (communicators) {
    group = std::make_unique<FSDPParamGroup>(managed.owned, *communicators,
                                             options.mp_policy());
  }
  auto state = std::make_shared<FSDPState>(modules, resolved, std::move(group));
  state->undo = [tied = managed.tied] { UntieFromShards(tied); };
  if (state->group() != nullptr) {
    state->group()->Attach(state, GradientSinkFactory(state));
  }
  TieToShards(managed.tied);
  for (const auto& child : below) {
    if (child->parent.expired()) child->parent = state;
  }
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
