#include "composable/fully_shard.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "collectives/communicator.h"
#include "composable/contract.h"
#include "hooks/gradient_sink.h"
#include "hooks/guard.h"
#include "hooks/root_pre_forward.h"
#include "state/fsdp_state.h"
#include "state/initial_values.h"
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

std::shared_ptr<FSDPState> Shard(const Modules& modules,
                                 const FullyShardOptions& options) {
  CheckGuard();
  TORCH_CHECK_VALUE(options.limit_all_gathers() >= 1,
                    "fully_shard: expected limit_all_gathers of at least 1, "
                    "got ",
                    options.limit_all_gathers(), ".");
  const ManagedParams managed = CollectManagedParams(modules, kFullyShardApi);
  const auto below = StatesBelow(modules);
  for (const auto& state : below) {
    if (const auto context = state->tree()) ResetTree(context);
  }
  const auto buffers = BuffersOf(modules);
  std::vector<at::Tensor> synced;  // buffers
  std::unique_ptr<FSDPParamGroup> group;
  if (!managed.owned.empty() || !buffers.empty()) {
    Communicator communicator(options.process_group() != nullptr
                                  ? options.process_group()
                                  : default_process_group(),
                              c10::kCPU);
    if (!managed.owned.empty()) {
      group = std::make_unique<FSDPParamGroup>(managed.owned, communicator);
    }
    const std::string& name = modules.front()->name();
    if (options.sync_module_states()) {
      synced = SyncInitialValues(communicator, group.get(), buffers, name);
    } else if (options.check_module_states()) {
      CheckInitialValues(communicator, group.get(), buffers, name);
    }
  }
  auto state = std::make_shared<FSDPState>(modules, options, std::move(group));
  state->undo = [tied = managed.tied] { UntieFromShards(tied); };
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
