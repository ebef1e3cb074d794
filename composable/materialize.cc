#include "composable/materialize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_join.h"
#include "collectives/communicator.h"
#include "hooks/full_parameter_scope.h"
#include "state/fsdp_state.h"
#include "state/initial_values.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

constexpr char kApi[] = "composable::materialize";

struct Plain {
  std::string fqn;
  at::Tensor tensor;  // on the meta device
};

// A module that holds something without values.
struct Task {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<FSDPState>> states;  // of its own parameters
  std::vector<Plain> plain;  // buffers, and parameters that are not sharded
};

std::vector<Task> Tasks(const ModuleRef& root) {
  std::vector<Task> tasks;
  absl::flat_hash_set<const torch::nn::Module*> visited;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  for (const auto& item : root->named_modules()) {
    const auto& module = item.value();
    if (!visited.insert(module.get()).second) continue;
    const std::string prefix = item.key().empty() ? "" : item.key() + ".";
    Task task{module, {}, {}};
    bool missing = false;
    const auto look = [&](const std::string& key, const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_meta()) return;
      missing = true;
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
        task.plain.push_back({prefix + key, tensor});
      }
    };
    for (const auto& entry : module->named_parameters(/*recurse=*/false)) {
      const auto sharded = FindShardedEntry(entry.value());
      if (sharded.state == nullptr) {
        look(entry.key(), entry.value());
        continue;
      }
      missing |= !sharded.param->has_values;
      if (std::find(task.states.begin(), task.states.end(), sharded.state) ==
          task.states.end()) {
        task.states.push_back(sharded.state);
      }
    }
    for (const auto& entry : module->named_buffers(/*recurse=*/false)) {
      look(entry.key(), entry.value());
    }
    if (missing) tasks.push_back(std::move(task));
  }
  return tasks;
}

// The groups that are whole at present.
class Open {
 public:
  // Lets go of others than `states`, and holds these.
  void Switch(const std::vector<std::shared_ptr<FSDPState>>& states) {
    if (states == states_) return;
    Close();
    for (const auto& state : states) {
      if (state->group()->has_all_values()) {
        // Tied to a group that has its values.
        for (auto& held : HoldWhole({state}, /*writeback=*/true, kApi)) {
          held_.push_back(std::move(held));
        }
      } else {
        held_.push_back(HoldForInit(state, kApi));
      }
    }
    states_ = states;
  }

  // Gives what was written to the shards.
  void Close() {
    states_.clear();
    while (!held_.empty()) {
      Keep(held_.back());
      held_.pop_back();
    }
  }

 private:
  static void Keep(HeldGroup& held) {
    FSDPState& state = held.state();
    const auto lock = state.LockTree();
    FSDPParamGroup& group = *state.group();
    const auto count = static_cast<int>(group.params().size());
    const at::Tensor flags = at::zeros({count}, c10::kByte);
    auto* written = flags.mutable_data_ptr<unsigned char>();
    for (int i = 0; i < count; ++i) {
      const FSDPParam& param = group.params()[i];
      written[i] = param.has_values || !IsUnwritten(group.GatheredValue(param));
    }
    if (state.options().sync_module_states()) {
      Communicator& communicator = group.communicator();
      communicator.Broadcast(
          flags, MakeCollectiveLabel("materialize of " + state.fqn));
      group.ScatterWhole();
      if (Communicator* replicas = group.replicate_communicator()) {
        BroadcastShards(*replicas, group, "materialize");
      }
      held.Discard();
    } else {
      for (int i = 0; i < count; ++i) {
        if (written[i] != 0) group.WriteBack(i);
      }
    }
    for (int i = 0; i < count; ++i) group.SetHasValues(i, written[i] != 0);
  }

  std::vector<std::shared_ptr<FSDPState>> states_;
  std::vector<HeldGroup> held_;
};

// Buffers and plain parameters while `init_fn` writes them. Those that it leaves
// go back to the meta device.
class PlainInit {
 public:
  explicit PlainInit(const std::vector<Plain>& plain) : plain_(plain) {
    for (const auto& [fqn, tensor] : plain_) {
      bodies_.push_back(internal::BodyOf(tensor).data);
      internal::GiveMemory(tensor);
      FillUnwritten(tensor);
      versions_.push_back(tensor._version());
    }
  }
  ~PlainInit() {
    for (size_t i = 0; i < plain_.size(); ++i) {
      if (!IsWritten(i)) internal::SetBody(plain_[i].tensor, bodies_[i]);
    }
  }
  PlainInit(const PlainInit&) = delete;
  PlainInit& operator=(const PlainInit&) = delete;

  void ListUnwritten(std::vector<std::string>& names) const {
    for (size_t i = 0; i < plain_.size(); ++i) {
      if (!IsWritten(i)) names.push_back("'" + plain_[i].fqn + "'");
    }
  }
  // Makes rank 0's those of all ranks.
  void Sync(Communicator& communicator) const {
    for (size_t i = 0; i < plain_.size(); ++i) {
      if (!IsWritten(i)) continue;
      const at::Tensor dense = plain_[i].tensor.detach().contiguous();
      const at::Tensor bytes =
          internal::MakeTensor(internal::StorageOf(dense), c10::kByte,
                               {static_cast<int64_t>(dense.nbytes())}, {1},
                               dense.storage_offset() * dense.element_size());
      communicator.Broadcast(
          bytes, MakeCollectiveLabel("materialize of " + plain_[i].fqn));
      if (!dense.is_alias_of(plain_[i].tensor)) {
        plain_[i].tensor.detach().copy_(dense);
      }
    }
  }

 private:
  bool IsWritten(size_t i) const {
    const at::Tensor& tensor = plain_[i].tensor;
    return tensor._version() != versions_[i] || !IsUnwritten(tensor);
  }

  const std::vector<Plain>& plain_;
  std::vector<at::Tensor> bodies_;
  std::vector<int64_t> versions_;
};

// Where a module without sharded parameters finds its ranks: null if nothing in
// `root` is sharded.
std::shared_ptr<FSDPState> AnyState(const ModuleRef& root) {
  for (const auto& parameter : root->parameters()) {
    if (auto state = FindShardedEntry(parameter).state) return state;
  }
  return nullptr;
}

}  // namespace

void materialize(const ModuleRef& module,
                 const std::function<void(torch::nn::Module&)>& init_fn) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const auto tasks = Tasks(module);
  const auto any_state = AnyState(module);
  std::vector<std::string> unwritten;
  {
    Open open;
    for (const auto& task : tasks) {
      open.Switch(task.states);
      const PlainInit plain(task.plain);
      init_fn(*task.module);
      plain.ListUnwritten(unwritten);
      const auto& state = task.states.empty() ? any_state : task.states.front();
      if (state != nullptr && state->options().sync_module_states()) {
        plain.Sync(state->group()->communicator());
        if (Communicator* replicas = state->group()->replicate_communicator()) {
          plain.Sync(*replicas);
        }
      }
    }
    open.Close();
  }
  for (const auto& entry : module->named_parameters()) {
    const auto sharded = FindShardedEntry(entry.value());
    if (sharded.state != nullptr && !sharded.param->has_values) {
      unwritten.push_back("'" + entry.key() + "'");
    }
  }
  TORCH_CHECK_VALUE(
      unwritten.empty(), kApi, ": init_fn has not written ",
      absl::StrJoin(unwritten, ", "),
      ". They stay without values. Initialise in it every parameter and buffer "
      "that a module holds itself, or load them with "
      "composable::load_full_state_dict.");
}

}  // namespace composable
