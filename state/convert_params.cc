// Parameters that are given another dtype after they were sharded; see Note
// [Dtype changes].
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "state/fsdp_param_group.h"
#include "state/shard_gradient.h"
#include "state/storage_registry.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

void Unregister(const at::Tensor& tensor) {
  UnregisterGuardedStorage(tensor.storage().unsafeGetStorageImpl());
}

// What a policy is asked about: the whole of `param` in `dtype`, without
// memory.
at::Tensor WholeOfDtype(const FSDPParam& param, c10::ScalarType dtype) {
  const at::Tensor whole = param.WholeIn(
      internal::MakeEmptyStorage((param.offset() + param.numel()) *
                                 c10::elementSize(dtype)),
      dtype);
  whole.set_requires_grad(param.sharded.requires_grad());
  const auto grad_dtype = param.sharded.grad_dtype();
  if (grad_dtype != param.sharded.scalar_type()) {
    whole.set_grad_dtype(grad_dtype);
  }
  return whole;
}

// Makes `tensor`, which keeps its autograd state, what `data` is.
void BecomeGuarded(const at::Tensor& tensor, const at::Tensor& data) {
  internal::SetBody(tensor, data);
  internal::AddGuard(tensor);
}

}  // namespace

void FSDPParamGroup::ConvertShard(int index, const at::Tensor& data) {
  FSDPParam& param = params_[index];
  const bool is_rows = data.sizes() == param.local_sizes();
  CheckShardData(param, data, data.scalar_type());
  TORCH_CHECK_VALUE(
      !param.sharded.requires_grad() || c10::isFloatingType(data.scalar_type()),
      "The shard of parameter '", param.fqn,
      "', which requires a gradient, was "
      "to be given the dtype ",
      data.scalar_type(),
      ": expected a floating one. Call requires_grad_(false) on it first.");
  TORCH_INTERNAL_ASSERT(sharded_state_ == ShardedState::kSharded);
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const ParamDtypes dtypes = ResolveDtypes(
      policy_, param.name, WholeOfDtype(param, data.scalar_type()));
  MarkDirty(index);
  at::Tensor rows;
  {
    const c10::impl::ExcludeDispatchKeyGuard below(internal::kGuardKey);
    rows = is_rows ? param.EmptyRows(data.scalar_type()).copy_(data)
                   : param.RowsOf(data);
  }
  if (param.stands_alone) {
    Unregister(param.sharded);
    if (const at::Tensor whole = param.unsharded(); whole.defined()) {
      Unregister(whole);
    }
  }
  SetHasValues(index, true);
  BecomeGuarded(param.sharded, rows);
  param.set_dtypes(dtypes);
  param.stands_alone = true;
  RegisterGuardedStorage(rows.storage().unsafeGetStorageImpl(),
                         {state_, ~index, /*is_shard=*/true});
  if (const at::Tensor whole = param.unsharded(); whole.defined()) {
    const auto storage = internal::MakeEmptyStorage(
        (param.offset() + param.numel()) * c10::elementSize(dtypes.gathered));
    internal::SetOwner(*storage, state_.lock());
    internal::SetFreedMessage(
        *storage, "Parameter '" + param.fqn +
                      "' was given another dtype, and is sharded: its whole "
                      "value is not in memory. Operators gather it.");
    BecomeGuarded(whole, param.WholeIn(storage));
    RegisterGuardedStorage(storage.get(), {state_, ~index, /*is_shard=*/false});
  }
  at::Tensor& gradient = internal::GradientOf(param.sharded);
  const auto grad_dtype = param.sharded.grad_dtype();
  if (gradient.defined() && grad_dtype &&
      gradient.scalar_type() != *grad_dtype) {
    const c10::impl::ExcludeDispatchKeyGuard below(internal::kGuardKey);
    at::Tensor converted = gradient.to(*grad_dtype);
    internal::AddGuard(converted);
    gradient = std::move(converted);
  }
  param.filled.reset();
}

bool FSDPParamGroup::stands_alone() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const FSDPParam& param) { return param.stands_alone; });
}

void FSDPParamGroup::Readopt() {
  TORCH_INTERNAL_ASSERT(sharded_state_ == ShardedState::kSharded);
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const auto state = state_.lock();
  std::vector<Segment> segments;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  size_t bytes = 0;
  for (const Segment& old : segments_) {
    const size_t first = segments.size();
    for (const int i : old.params) {
      const ParamDtypes& dtypes = params_[i].dtypes();
      auto it = std::find_if(segments.begin() + static_cast<int64_t>(first),
                             segments.end(), [&](const Segment& segment) {
                               return segment.dtype == dtypes.original &&
                                      segment.gathered == dtypes.gathered &&
                                      segment.reduce == dtypes.reduce;
                             });
      if (it == segments.end()) {
        Segment segment;
        segment.dtype = dtypes.original;
        segment.gathered = dtypes.gathered;
        segment.reduce = dtypes.reduce;
        segment.trainable = old.trainable;
        segment.kind = old.kind;
        segment.layout = old.layout;
        segment.whole_bytes = old.whole_bytes / c10::elementSize(old.gathered) *
                              c10::elementSize(dtypes.gathered);
        it = segments.insert(segments.end(), std::move(segment));
      }
      it->params.push_back(i);
    }
    const auto places = static_cast<int64_t>(old.flat_shard.storage().nbytes() /
                                             c10::elementSize(old.dtype));
    const bool has_values =
        internal::HasData(*internal::StorageOf(old.flat_shard));
    for (size_t s = first; s < segments.size(); ++s) {
      Segment& segment = segments[s];
      segment.buffer_offset = bytes;
      bytes += PaddedBytes(segment.whole_bytes);
      segment.flat_shard = MakeFlatShard(
          segment.dtype, segment.layout.shard_numel(), places, has_values);
      std::vector<const FSDPParam*> in_order;
      for (const int i : segment.params) in_order.push_back(&params_[i]);
      if (old.staged != nullptr) {
        segment.staged = std::make_unique<StagedGather>(
            std::move(in_order), segment.layout, segment.flat_shard,
            communicator_.rank(), segment.gathered);
      }
      storages.push_back(internal::MakeEmptyStorage(segment.whole_bytes));
      segment.storage =
          c10::weak_intrusive_ptr<c10::StorageImpl>(storages.back());
      internal::SetOwner(*storages.back(), state);
    }
  }
  UnregisterStorages();
  segments_ = std::move(segments);
  unsharded_bytes_ = bytes;
  sink_ = WeakNodePtr(NodePtr());
  for (size_t s = 0; s < segments_.size(); ++s) {
    RegisterStorages(static_cast<int>(s), storages[s].get());
    for (const int i : segments_[s].params) {
      FSDPParam& param = params_[i];
      param.set_segment(static_cast<int>(s));
      param.stands_alone = false;
      const at::Tensor rows = param.RowsIn(segments_[s].flat_shard);
      if (param.has_values) {
        const c10::impl::ExcludeDispatchKeyGuard below(internal::kGuardKey);
        rows.copy_(param.sharded);
      }
      BecomeGuarded(param.sharded, rows);
      param.accumulator = c10::isFloatingType(segments_[s].dtype)
                              ? MakeShardAccumulator(param.sharded)
                              : NodePtr();
      if (const at::Tensor whole = param.unsharded(); whole.defined()) {
        BecomeGuarded(whole, param.WholeIn(storages[s]));
      }
    }
  }
  NodePtr sink;  // one for all parameters
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDPParam& param = params_[i];
    const at::Tensor whole = param.unsharded();
    if (!param.has_edge || !whole.defined()) continue;
    if (!sink) sink = Sink();
    internal::SetGradientEdge(whole, sink, static_cast<uint32_t>(i));
    internal::KeepRetainedGradient(whole);
  }
}

}  // namespace composable
