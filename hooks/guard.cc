#include "hooks/guard.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "hooks/pre_backward.h"
#include "hooks/pre_forward.h"
#include "hooks/root_pre_forward.h"
#include "state/fsdp_state.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

// What one operator does with sharded parameters.
class Touches {
 public:
  explicit Touches(const c10::OperatorHandle& op) : op_(op) {}

  void Visit(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !internal::HasGuard(tensor)) return;
    GuardedStorage found;
    if (!FindGuardedStorage(tensor, &found)) return;
    auto state = found.state.lock();
    if (state == nullptr) return;
    if (found.is_shard) {
      if (written) {
        WriteShard(*state, state->group()->FindShard(found.segment,
                                                     tensor.storage_offset()));
      }
      return;
    }
    const int param =
        state->group()->FindParam(found.segment, tensor.storage_offset());
    TORCH_CHECK_VALUE(
        !written, op_.schema().name(), " writes the whole parameter '",
        state->group()->params()[param].fqn,
        "', which is sharded: the change would be lost. Change the shard that "
        "module->parameters() holds instead, or load whole values with "
        "composable::load_full_state_dict.");
    for (auto& read : reads_) {
      if (read.state == state) {
        read.params.push_back(param);
        return;
      }
    }
    reads_.push_back({std::move(state), {param}});
  }

  // Gathers what is read.
  void Run() {
    while (!reads_.empty()) RunTree();
  }

 private:
  struct Read {
    std::shared_ptr<FSDPState> state;
    absl::InlinedVector<int, 4> params;
  };

  static void WriteShard(FSDPState& state, int param) {
    const auto lock = state.LockTree();
    state.group()->MarkDirty(param);
  }

  // Takes the reads of one tree out of reads_ and serves them.
  void RunTree() {
    const auto context = LazyInit(*reads_.front().state);
    const std::lock_guard<std::recursive_mutex> lock(context->mutex);
    const bool backward = torch::autograd::get_current_graph_task_id() != -1;
    absl::InlinedVector<FSDPState*, 4> needed;
    absl::InlinedVector<Read, 2> others;
    absl::InlinedVector<Read, 2> mine;
    for (auto& read : reads_) {
      auto& list = LazyInit(*read.state) == context ? mine : others;
      list.push_back(std::move(read));
    }
    reads_.assign(std::make_move_iterator(others.begin()),
                  std::make_move_iterator(others.end()));
    for (const auto& read : mine) {
      needed.push_back(read.state.get());
      if (!backward && c10::GradMode::is_enabled()) {
        for (const int param : read.params) {
          SyncGradientEdge(*context, *read.state, param);
        }
      }
    }
    if (backward) {
      PreBackward(context, needed);
    } else {
      PreForward(*context, needed);
    }
  }

  const c10::OperatorHandle& op_;
  absl::InlinedVector<Read, 2> reads_;
};

void GuardFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  // c10d's operators write their tensors without saying so in the schema.
  const bool writes_all = op.schema().name().rfind("c10d::", 0) == 0;
  Touches touches(op);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool written = writes_all || (alias != nullptr && alias->isWrite());
    const c10::IValue& value = values[i];
    if (value.isTensor()) {
      touches.Visit(value.toTensor(), written);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        touches.Visit(tensor, written);
      }
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) touches.Visit(item.toTensor(), written);
      }
    }
  }
  touches.Run();
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::DispatchKeySet{internal::kGuardKey});
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                                                internal::kGuardKey),
                     stack);
}

// What LibTorch said when it refused the fallback; empty if it took it.
std::string& Refusal() {
  static std::string refusal;
  return refusal;
}

// Runs while the library is loaded, where nobody could catch an exception.
TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  try {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&GuardFallback>());
  } catch (const c10::Error& error) {
    Refusal() = error.what_without_backtrace();
  }
}

}  // namespace

void CheckGuard() {
  TORCH_CHECK(
      Refusal().empty(),
      "fully_shard: expected to be the only user of DispatchKey::DeferredInit, "
      "through which operators on sharded parameters are seen, but it was "
      "taken when this library was loaded: by a second copy of this library, "
      "or by another one, such as torchdistX. Load only one of them into a "
      "process. LibTorch says: ",
      Refusal());
}

}  // namespace composable
