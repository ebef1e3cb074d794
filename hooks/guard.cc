#include "hooks/guard.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "hooks/alone.h"
#include "hooks/dtype_mismatch.h"
#include "hooks/finalize_backward.h"
#include "hooks/forward_scope.h"
#include "hooks/meta_device.h"
#include "hooks/pre_backward.h"
#include "hooks/pre_forward.h"
#include "hooks/root_pre_forward.h"
#include "hooks/shard_data.h"
#include "state/allow_shard_math.h"
#include "state/fsdp_state.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

thread_local int guarded_operators = 0;
thread_local int64_t guarded_operator_count = 0;

// Operators whose result on some of the rows says nothing about the whole.
bool SumsOver(const std::string& name) {
  static const auto* names = new absl::flat_hash_set<std::string>{
      "aten::_foreach_norm",
      "aten::addmm",
      "aten::amax",
      "aten::amin",
      "aten::aminmax",
      "aten::argmax",
      "aten::argmin",
      "aten::argsort",
      "aten::bmm",
      "aten::cat",
      "aten::concat",
      "aten::concatenate",
      "aten::cosine_similarity",
      "aten::count_nonzero",
      "aten::cumprod",
      "aten::cumsum",
      "aten::dist",
      "aten::dot",
      "aten::einsum",
      "aten::frobenius_norm",
      "aten::histc",
      "aten::hstack",
      "aten::inner",
      "aten::l1_loss",
      "aten::linalg_matrix_norm",
      "aten::linalg_norm",
      "aten::linalg_qr",
      "aten::linalg_svd",
      "aten::linalg_vector_norm",
      "aten::log_softmax",
      "aten::logsumexp",
      "aten::matmul",
      "aten::max",
      "aten::mean",
      "aten::median",
      "aten::min",
      "aten::mm",
      "aten::mse_loss",
      "aten::mv",
      "aten::nanmean",
      "aten::nanmedian",
      "aten::nanquantile",
      "aten::nansum",
      "aten::norm",
      "aten::nuclear_norm",
      "aten::prod",
      "aten::quantile",
      "aten::renorm",
      "aten::softmax",
      "aten::sort",
      "aten::stack",
      "aten::std",
      "aten::std_mean",
      "aten::sum",
      "aten::topk",
      "aten::trace",
      "aten::var",
      "aten::var_mean",
      "aten::vdot",
      "aten::vstack",
  };
  return names->contains(name);
}

// What one operator does with sharded parameters.
class Touches {
 public:
  explicit Touches(const c10::OperatorHandle& op) : op_(op) {}
  ~Touches() { guarded_operators -= counted_ ? 1 : 0; }
  Touches(const Touches&) = delete;
  Touches& operator=(const Touches&) = delete;

  void Visit(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !internal::HasGuard(tensor)) return;
    GuardedStorage found;
    auto state =
        FindGuardedStorage(tensor, &found) ? found.state.lock() : nullptr;
    if (state == nullptr) {
      if (!written) ReadLocal(tensor, "");
      return;
    }
    FSDPParamGroup& group = *state->group();
    if (found.is_shard) {
      const int param = group.FindShard(found.segment, tensor.storage_offset());
      if (written && Name() == "aten::set_") {
        given_memory_ = {std::move(state), {param}};
      } else if (written) {
        WriteShard(*state, param);
      } else {
        ReadLocal(tensor, group.params()[param].fqn);
      }
      return;
    }
    const int param = group.FindParam(found.segment, tensor.storage_offset());
    if (written) {
      WriteWhole(*state, param);
      return;
    }
    for (auto& read : reads_) {
      if (read.state == state) {
        read.params.push_back(param);
        return;
      }
    }
    reads_.push_back({std::move(state), {param}});
  }

  // Gathers what is read.
  void Before() {
    while (!reads_.empty()) RunTree();
    ++guarded_operators;
    counted_ = true;
  }

  // Whether the operator gives a shard other memory. Then copies this rank's
  // rows of it instead, and leaves on `stack` what the operator would.
  bool TookMemory(torch::jit::Stack* stack) {
    if (given_memory_.state == nullptr) return false;
    FSDPState& state = *given_memory_.state;
    const int param = given_memory_.params.front();
    TORCH_CHECK_VALUE(op_.schema().overload_name() == "source_Tensor",
                      "set_ with a storage was called on the shard of "
                      "parameter '",
                      state.group()->params()[param].fqn,
                      "', which must stay in its group's memory. Copy into the "
                      "shard with copy_.");
    {
      const auto lock = state.LockTree();
      if (lock.owns_lock()) CheckMayWriteShards(state, Name());
    }
    const at::Tensor data = torch::jit::pop(*stack).toTensor();
    GiveShardData(given_memory_.state, param, data);
    return true;
  }

  // Whether it is to(), as module->to() calls it on a shard with gradients on.
  // What it makes is a leaf, that only set_data on a shard may read.
  bool ConvertsShard() const {
    return read_shard_.defined() && Name() == "aten::to";
  }

  // Looks at the results, which are on `stack`.
  void After(const torch::jit::Stack& stack) {
    if (!reads_local_) return;
    const auto results = torch::jit::last(stack, op_.schema().returns().size());
    for (const c10::IValue& result : results) {
      if (result.isTensor()) {
        AfterTensor(result.toTensor());
      } else if (result.isTensorList()) {
        for (const at::Tensor& tensor : result.toTensorList()) {
          AfterTensor(tensor);
        }
      }
    }
  }

 private:
  struct Read {
    std::shared_ptr<FSDPState> state;
    absl::InlinedVector<int, 4> params;
  };

  const std::string& Name() const { return op_.schema().name(); }

  void WriteWhole(FSDPState& state, int param) {
    const std::string& fqn = state.group()->params()[param].fqn;
    TORCH_CHECK_VALUE(
        state.full_parameter_writers > 0, Name(),
        " writes the whole parameter '", fqn,
        "', which is sharded: the change would be lost. Write it inside of a ",
        state.full_parameter_scopes > 0
            ? "composable::FullParameters scope with writeback, which the open "
              "one lacks. "
            : "composable::FullParameters scope(module), opened by all ranks. ",
        "Or initialise a module before fully_shard, change the shard that "
        "module->parameters() holds, or load whole values with "
        "composable::load_full_state_dict.");
    TORCH_CHECK_VALUE(
        !op_.hasTag(at::Tag::inplace_view), Name(),
        " gives the whole parameter '", fqn,
        "' another shape or memory. In a composable::FullParameters scope only "
        "its values can be written: use copy_.");
    TORCH_CHECK_VALUE(
        !c10::GradMode::is_enabled(), Name(), " writes the whole parameter '",
        fqn,
        "' in place with gradients on, which autograd would record. Hold a "
        "torch::NoGradGuard.");
    const auto lock = state.LockTree();
    const at::Tensor whole = state.group()->params()[param].unsharded();
    if (whole.defined()) internal::BumpVersion(whole);
  }

  void WriteShard(FSDPState& state, int param) {
    const FSDPParam& written = state.group()->params()[param];
    TORCH_CHECK_VALUE(
        state.full_parameter_writers == 0, Name(), " writes the shard of '",
        written.fqn,
        "' while a composable::FullParameters scope holds the whole parameter, "
        "which would replace it at its end. Write the member, or close the "
        "scope first.");
    const bool by_size = Name() == "aten::eye";
    TORCH_CHECK_VALUE(
        AllowShardMath::IsAllowed() ||
            !(by_size || op_.hasTag(at::Tag::nondeterministic_seeded)),
        Name(), " fills the shard of parameter '", written.fqn,
        "', which is this rank's rows only: ",
        by_size ? "what it writes depends on the whole size"
                : "ranks with one seed would draw equal rows",
        ". Initialise a module before fully_shard, or a whole tensor and load "
        "it with composable::load_full_state_dict. To fill the rows anyway, "
        "hold a composable::AllowShardMath.");
    const auto lock = state.LockTree();
    if (lock.owns_lock()) CheckMayWriteShards(state, Name());
    state.group()->MarkDirty(param);
  }

  // `fqn`: of the shard; empty for a gradient or a copy of one.
  void ReadLocal(const at::Tensor& tensor, const std::string& fqn) {
    reads_local_ = true;
    if (AllowShardMath::IsAllowed()) return;
    const std::string made_of =
        fqn.empty() ? internal::MadeOfShard(tensor) : std::string();
    if (fqn_.empty()) fqn_ = made_of.empty() ? fqn : made_of;
    TORCH_CHECK_VALUE(
        !SumsOver(Name()), Name(), " reads ", Local(),
        ", which is this rank's rows only: the result would be about this rank "
        "alone. For a norm or clipping of gradients use "
        "composable::clip_grad_norm_, for whole values "
        "composable::full_state_dict. An optimizer that looks across elements, "
        "such as LBFGS, can't work on shards. To compute with the rows anyway, "
        "hold a composable::AllowShardMath.");
    if (!made_of.empty()) {
      if (c10::GradMode::is_enabled()) ThrowReadsShard();
      return;
    }
    TORCH_CHECK_VALUE(
        !fqn.empty() || !tensor.requires_grad() || !tensor.is_leaf() ||
            internal::IsMarkedShard(tensor),
        Name(),
        " reads a parameter that is a copy of a shard, so this rank's rows "
        "only: its module was cloned from a sharded one. Clone a module before "
        "fully_shard, or construct another one and load it with "
        "composable::load_full_state_dict(copy, "
        "composable::full_state_dict(module)).");
    if (!fqn.empty() && tensor.requires_grad() && c10::GradMode::is_enabled()) {
      read_shard_ = tensor;
    }
  }

  void AfterTensor(const at::Tensor& result) const {
    if (!result.defined()) return;
    if (Name() == "aten::clone") internal::AddGuard(result);
    if (ConvertsShard()) {
      if (result.is_same(read_shard_)) return;
      internal::AddGuard(result);
      result.set_requires_grad(c10::isFloatingType(result.scalar_type()));
      internal::MarkMadeOfShard(result, fqn_);
      return;
    }
    if (read_shard_.defined() && result.requires_grad() &&
        !result.is_same(read_shard_)) {
      ThrowReadsShard();
    }
  }

  [[noreturn]] void ThrowReadsShard() const {
    TORCH_CHECK_VALUE(
        false, Name(), " of a graph reads ", Local(),
        ", which is this rank's rows only. In forward use the module's member, "
        "which is the whole parameter (modules that look parameters up by name "
        "need one). To print or copy whole values use "
        "composable::full_state_dict; to print the rows, a "
        "torch::NoGradGuard. For a penalty over shards hold a "
        "composable::AllowShardMath.");
  }

  // In a FullParameters scope: nothing is to be gathered, and no forward begins.
  static bool IsHeldWhole(const FSDPState& state) {
    const FSDPParamGroup& group = *state.group();
    return state.full_parameter_scopes > 0 && !group.dirty() &&
           group.sharded_state() == ShardedState::kUnsharded;
  }

  const std::string& FirstRead() const {
    const Read& first = reads_.front();
    return first.state->group()->params()[first.params.front()].fqn;
  }

  std::string Local() const {
    return fqn_.empty() ? "the gradient or a copy of a shard"
                        : "the shard of parameter '" + fqn_ + "'";
  }

  // Takes the reads of one tree out of reads_ and serves them.
  void RunTree() {
    const auto context = LazyInit(*reads_.front().state);
    const std::lock_guard<std::recursive_mutex> lock(context->mutex);
    const bool backward = torch::autograd::get_current_graph_task_id() != -1;
    CheckAlone(*context, Name(), " reads '", FirstRead(), "'");
    running_.emplace_back(context);
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
      if (!backward && IsHeldWhole(*read.state)) continue;
      if (!backward &&
          ReadsOutsideForward(*context, *read.state, read.params.front(),
                              op_.schema().name())) {
        continue;
      }
      needed.push_back(read.state.get());
      if (!backward && c10::GradMode::is_enabled()) {
        for (const int param : read.params) {
          SyncGradientEdge(*context, *read.state, param);
        }
      }
    }
    if (needed.empty()) return;
    if (backward) {
      PreBackward(context, needed);
    } else {
      PreForward(*context, needed);
    }
  }

  const c10::OperatorHandle& op_;
  absl::InlinedVector<Read, 2> reads_;
  absl::InlinedVector<RunningOperator, 1> running_;  // one for each tree
  bool counted_ = false;
  bool reads_local_ = false;
  Read given_memory_;
  std::string fqn_;        // of a shard that is read
  at::Tensor read_shard_;  // in grad mode, and requires a gradient
};

void GuardFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  ++guarded_operator_count;
  if (MetaDevice::IsActive()) MakeOnMeta(op, *stack);
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
  if (touches.TookMemory(stack)) return;
  touches.Before();
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::DispatchKeySet{internal::kGuardKey});
  const auto inner = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                                                internal::kGuardKey);
  std::optional<at::NoGradGuard> no_grad;
  if (touches.ConvertsShard()) no_grad.emplace();
  try {
    op.redispatchBoxed(inner, stack);
  } catch (const c10::Error& error) {
    ThrowIfDtypeMismatch(op, *stack, error);
    throw;
  }
  touches.After(*stack);
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

bool InGuardedOperator() { return guarded_operators > 0; }
int64_t GuardedOperatorCount() { return guarded_operator_count; }

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
