#include "hooks/tensor_calls.h"

#include <ATen/core/VariableHooksInterface.h>
#include <c10/util/Backtrace.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "hooks/finalize_backward.h"
#include "hooks/guard.h"
#include "hooks/root_pre_forward.h"
#include "hooks/shard_data.h"
#include "state/allow_shard_math.h"
#include "state/forwarding_variable_hooks.h"
#include "state/fsdp_state.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

// The parameter that `tensor` is the shard or the whole of; a view of either is
// none.
struct Known {
  std::shared_ptr<FSDPState> state;
  FSDPParam* param = nullptr;
  bool is_shard = false;
  FSDPParam* operator->() const { return param; }
  int index() const {
    return static_cast<int>(param - state->group()->params().data());
  }
};

Known Find(const at::TensorBase& tensor) {
  if (!tensor.defined() || !internal::HasGuard(tensor)) return {};
  auto entry = FindShardedEntry(at::Tensor(tensor));
  if (entry.param == nullptr) return {};
  return {std::move(entry.state), entry.param,
          entry.param->sharded.is_same(tensor)};
}

// An optimizer asks each of its parameters whether it is a leaf, and so do
// others, such as save_for_backward: the callers tell. Looking costs 0.1 ms, so
// it is done for the first questions only.
constexpr int kMaxLeafQuestions = 4;

bool AsksAnOptimizer() {
  return c10::get_backtrace(0, 16).find("Optimizer::add_param_group") !=
         std::string::npos;
}

class TensorCalls final : public internal::ForwardingVariableHooks {
 public:
  using ForwardingVariableHooks::ForwardingVariableHooks;

  void set_data(const at::TensorBase& self,
                const at::TensorBase& data) const override {
    const Known known = Find(self);
    if (known.state == nullptr) {
      ForwardingVariableHooks::set_data(self, data);
      return;
    }
    TORCH_CHECK_VALUE(
        known.is_shard, "set_data was called on the member of parameter '",
        known->fqn,
        "', which is a whole parameter and sharded: the values "
        "would be lost. Call it on the entry of module->parameters(), or load "
        "whole values with composable::load_full_state_dict.");
    {
      const auto lock = known.state->LockTree();
      if (lock.owns_lock()) CheckMayWriteShards(*known.state, "set_data");
    }
    GiveShardData(known.state, known.index(), at::Tensor(data));
  }

  void requires_grad_(const at::TensorBase& self, bool on) const override {
    const Known known = Find(self);
    if (known.state == nullptr || known.is_shard) {
      ForwardingVariableHooks::requires_grad_(self, on);
      return;
    }
    const auto context = LazyInit(*known.state);
    const std::lock_guard<std::recursive_mutex> lock(context->mutex);
    known->sharded.requires_grad_(on);
    SyncGradientEdge(*context, *known.state, known.index());
  }

  std::optional<c10::ScalarType> grad_dtype(
      const at::TensorBase& self) const override {
    const Known known = Find(self);
    const bool is_member = known.state != nullptr && !known.is_shard;
    return ForwardingVariableHooks::grad_dtype(
        is_member ? at::TensorBase(known->sharded) : self);
  }

  void set_grad_dtype(
      const at::TensorBase& self,
      const std::optional<c10::ScalarType>& dtype) const override {
    const Known known = Find(self);
    if (known.state == nullptr) {
      ForwardingVariableHooks::set_grad_dtype(self, dtype);
      return;
    }
    const at::Tensor& shard = known->sharded;
    TORCH_CHECK_VALUE(!shard.grad().defined() || !dtype ||
                          shard.grad().scalar_type() == *dtype,
                      "set_grad_dtype(", *dtype, ") was called on parameter '",
                      known->fqn, "', which has a gradient of ",
                      shard.grad().scalar_type(),
                      ". Clear the gradient first.");
    ForwardingVariableHooks::set_grad_dtype(shard, dtype);
    if (known->accumulator != nullptr) {
      known->accumulator->mutable_input_metadata(0).set_grad_dtype(dtype);
    }
  }

  // A leaf without a gradient runs no hooks; the sink, whose members' hooks
  // these are, runs for all of its group.
  unsigned _register_hook(const at::TensorBase& self,
                          std::function<at::TensorBase(const at::TensorBase&)>
                              hook) const override {
    const Known known = Find(self);
    if (known.state != nullptr && !known.is_shard) {
      hook = [wrapped = std::move(hook)](const at::TensorBase& gradient) {
        return gradient.defined() ? wrapped(gradient) : at::TensorBase();
      };
    }
    return ForwardingVariableHooks::_register_hook(self, std::move(hook));
  }

  // Those of a member that was sharded since have moved to the shard.
  void remove_hook(const at::TensorBase& self, unsigned pos) const override {
    const Known known = Find(self);
    const auto* meta = torch::autograd::impl::get_autograd_meta(self);
    const bool own = known.state == nullptr || known.is_shard ||
                     (meta != nullptr && meta->cpp_hooks_list_ != nullptr &&
                      pos < meta->cpp_hooks_list_->size());
    ForwardingVariableHooks::remove_hook(own ? self : known->sharded, pos);
  }

  void _backward(const at::Tensor& self, at::TensorList inputs,
                 const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph,
                 bool create_graph) const override {
    for (const at::Tensor& input : inputs) {
      const Known known = Find(input);
      TORCH_CHECK_VALUE(
          known.state == nullptr || known.is_shard,
          "backward(inputs = ...) was given the member of parameter '",
          known->fqn,
          "', which is a whole parameter; its reduced gradient "
          "belongs to the shard. Take the inputs from module->parameters().");
    }
    ForwardingVariableHooks::_backward(self, inputs, gradient, keep_graph,
                                       create_graph);
  }

  bool is_leaf(const at::TensorBase& self) const override {
    if (!InGuardedOperator()) {
      const Known known = Find(self);
      if (known.state != nullptr && !known.is_shard &&
          known->leaf_questions < kMaxLeafQuestions) {
        ++known->leaf_questions;
        TORCH_CHECK_VALUE(
            !AsksAnOptimizer(),
            "An optimizer was given the member of "
            "parameter '",
            known->fqn,
            "', which is the whole parameter and no "
            "leaf. Build it from module->parameters(), after fully_shard.");
      }
    }
    return ForwardingVariableHooks::is_leaf(self);
  }
};

constexpr char kShardMark[] = "composable_shard";

using Marks = std::unordered_map<std::string, bool>;

void OnSave(const at::Tensor& tensor, Marks& marks) {
  GuardedStorage found;
  if (!FindGuardedStorage(tensor, &found) || !found.is_shard) return;
  const auto state = found.state.lock();
  if (state == nullptr) return;
  const FSDPParamGroup& group = *state->group();
  const int param = group.FindShard(found.segment, tensor.storage_offset());
  TORCH_CHECK_VALUE(
      AllowShardMath::IsAllowed(), "torch::save of the shard of parameter '",
      group.params()[param].fqn,
      "' would write this rank's rows only, which no other module "
      "can read. Save composable::full_state_dict(module), or load that into a "
      "plain module and save it. To save the rows anyway, hold a "
      "composable::AllowShardMath.");
  marks[kShardMark] = true;
}

void OnLoad(const at::Tensor& /*tensor*/, const Marks& marks) {
  TORCH_CHECK_VALUE(
      marks.find(kShardMark) == marks.end() || AllowShardMath::IsAllowed(),
      "torch::load: the archive holds the shards of one rank, not whole "
      "parameters. Load one that was saved from "
      "composable::full_state_dict(module). To load the rows anyway, into a "
      "module that is sharded alike, hold a composable::AllowShardMath.");
}

bool Register() {
  static const auto* calls =
      new TensorCalls(at::impl::GetVariableHooks());  // for ever
  at::impl::SetVariableHooks(const_cast<TensorCalls*>(calls));
  auto& on_cpu = torch::jit::GetBackendMetaSerialization()[static_cast<size_t>(
      c10::DeviceType::CPU)];
  const auto before = on_cpu;
  on_cpu.emplace(
      [before](const at::Tensor& tensor, Marks& marks) {
        if (before) before->first(tensor, marks);
        OnSave(tensor, marks);
      },
      [before](const at::Tensor& tensor, Marks& marks) {
        if (before) before->second(tensor, marks);
        OnLoad(tensor, marks);
      });
  return true;
}

const bool kRegistered = Register();

}  // namespace
}  // namespace composable
