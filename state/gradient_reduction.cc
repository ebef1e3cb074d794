#include "state/gradient_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "state/payload_pieces.h"
#include "state/shard_gradient.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

constexpr int64_t kAlignment = 128;  // bytes

int64_t AlignUp(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Elements [begin, begin + numel) of the flat tensor `flat`.
at::Tensor Slice(const at::Tensor& flat, int64_t begin, int64_t numel) {
  return internal::MakeTensor(internal::StorageOf(flat), flat.scalar_type(),
                              {numel}, {1}, flat.storage_offset() + begin);
}

// Other than zero.
bool HasValues(const at::Tensor& gradient) {
  const c10::impl::ExcludeDispatchKeyGuard below(internal::kGuardKey);
  return gradient.any().item<bool>();
}

// A graph through a reduction would be a collective of backward's backward.
void RefuseToDifferentiate(const at::Tensor& gradient, const std::string& fqn) {
  const NodePtr error = MakeNode<torch::autograd::Error>(
      "The gradient of '" + fqn +
      "' is a sum over ranks, which can't be differentiated: create_graph "
      "reaches inputs and whole parameters only. For this rank's part of it "
      "take torch::autograd::grad with respect to the module's member.");
  error->add_input_metadata(gradient);
  internal::SetGradientEdge(gradient, error, 0);
}

}  // namespace

// Drops the payload when a scope is left, by an exception or otherwise.
class GradientReduction::AbandonAtExit {
 public:
  AbandonAtExit(GradientReduction& reduction, BufferPool& pool)
      : reduction_(&reduction), pool_(pool) {}
  ~AbandonAtExit() {
    if (reduction_ != nullptr) reduction_->Abandon(pool_);
  }
  AbandonAtExit(const AbandonAtExit&) = delete;
  AbandonAtExit& operator=(const AbandonAtExit&) = delete;
  void Cancel() { reduction_ = nullptr; }

 private:
  GradientReduction* reduction_;
  BufferPool& pool_;
};

GradientReduction::GradientReduction(FSDPParamGroup& group)
    : group_(group), chain_(group) {
  const auto& segments = group.segments();
  for (size_t s = 0; s < segments.size(); ++s) {
    if (!c10::isFloatingType(segments[s].dtype)) continue;
    Part part;
    part.segment = static_cast<int>(s);
    part.shard_numel = segments[s].layout.shard_numel();
    const auto itemsize =
        static_cast<int64_t>(c10::elementSize(segments[s].reduce));
    part.chunk_numel = AlignUp(
        part.shard_numel + static_cast<int64_t>(segments[s].params.size()),
        std::max<int64_t>(1, 16 / std::gcd<int64_t>(16, itemsize)));
    parts_.push_back(std::move(part));
  }
  has_gradient_.resize(group.params().size());
}

bool GradientReduction::IsActive(const Part& part) const {
  const auto& indices = group_.segments()[part.segment].params;
  // Not has_edge, which follows when this rank reads the parameter.
  return std::any_of(indices.begin(), indices.end(), [&](int i) {
    return group_.params()[i].sharded.requires_grad();
  });
}

void GradientReduction::Pack(std::vector<at::Tensor> gradients,
                             BufferPool& pool) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(buffer_ == nullptr);
  graph_wanted_ = std::any_of(
      gradients.begin(), gradients.end(),
      [](const at::Tensor& g) { return g.defined() && g.requires_grad(); });
  AbandonAtExit on_error(*this, pool);
  const int64_t world_size = group_.communicator().size();
  const auto bytes_of = [&](const Part& part) {
    const auto dtype = group_.segments()[part.segment].reduce;
    return AlignUp(part.chunk_numel * world_size *
                       static_cast<int64_t>(c10::elementSize(dtype)),
                   kAlignment);
  };
  int64_t bytes = 0;
  for (auto& part : parts_) {
    if (!IsActive(part)) continue;
    part.payload = chain_.AllocatePayload(
        part.chunk_numel * world_size, group_.segments()[part.segment].reduce);
    if (!part.payload.defined()) bytes += bytes_of(part);
  }
  buffer_ = pool.Acquire(bytes);
  auto* data = static_cast<char*>(buffer_->data);
  for (auto& part : parts_) {
    if (!IsActive(part)) continue;
    if (part.payload.defined()) {
      PackPart(part, gradients);
      continue;
    }
    const int64_t numel = part.chunk_numel * world_size;
    part.payload = internal::MakeTensor(
        internal::BorrowMemory(data, bytes_of(part)),
        group_.segments()[part.segment].reduce, {numel}, {1}, 0);
    data += bytes_of(part);
    PackPart(part, gradients);
  }
  on_error.Cancel();
}

void GradientReduction::PackPart(Part& part,
                                 std::vector<at::Tensor>& gradients) {
  const auto& segment = group_.segments()[part.segment];
  const int64_t itemsize = part.payload.element_size();
  auto* base = static_cast<char*>(part.payload.mutable_data_ptr());
  const auto zero = [&](int64_t rank, int64_t begin, int64_t end) {
    std::memset(base + (rank * part.chunk_numel + begin) * itemsize, 0,
                (end - begin) * itemsize);
  };
  // Of each rank's shard so far; what is skipped is padding.
  std::vector<int64_t> written(group_.communicator().size(), 0);
  const auto skip_to = [&](int64_t rank, int64_t begin) {
    zero(rank, written[rank], begin);
    written[rank] = begin;
  };
  for (const int i : segment.params) {
    const FSDPParam& param = group_.params()[i];
    at::Tensor gradient = std::move(gradients[i]);
    has_gradient_[i] = gradient.defined();
    if (gradient.defined() && gradient.layout() != c10::kStrided) {
      gradient = gradient.to_dense();
    }
    if (const Chunks* chunks = param.chunks()) {
      if (!gradient.defined()) continue;
      for (size_t r = 0; r < written.size(); ++r) {
        const auto rank = static_cast<int64_t>(r);
        skip_to(rank, param.local_offset());
        written[r] += chunks->numel_of(rank);
      }
      Chunks::Views views;
      chunks->AppendViews(gradient, part.payload, param.local_offset(),
                          part.chunk_numel, views);
      at::_foreach_copy_(views.chunks, views.wholes);
      continue;
    }
    for (int64_t begin = 0; begin < param.numel();) {
      const int64_t at = param.offset() + begin;
      const int64_t rank = at / part.shard_numel;
      const int64_t local = at - rank * part.shard_numel;
      const int64_t count =
          std::min(param.numel() - begin, part.shard_numel - local);
      skip_to(rank, local);
      if (gradient.defined()) {
        param.CopyElements(
            gradient, begin, begin + count,
            Slice(part.payload, rank * part.chunk_numel + local, count));
      } else {
        zero(rank, local, local + count);
      }
      written[rank] = local + count;
      begin += count;
    }
  }
  for (size_t r = 0; r < written.size(); ++r) {
    skip_to(static_cast<int64_t>(r), part.shard_numel);
  }
  WriteFlags(part);
}

void GradientReduction::WriteFlags(const Part& part) {
  const auto& indices = group_.segments()[part.segment].params;
  const int64_t world_size = group_.communicator().size();
  const int64_t count = part.chunk_numel - part.shard_numel;
  at::Tensor flags = at::zeros({count});
  auto* values = flags.mutable_data_ptr<float>();
  for (size_t k = 0; k < indices.size(); ++k) {
    values[k] = has_gradient_[indices[k]] ? 1.0F : 0.0F;
  }
  internal::MakeTensor(internal::StorageOf(part.payload),
                       part.payload.scalar_type(), {world_size, count},
                       {part.chunk_numel, 1}, part.shard_numel)
      .copy_(flags.expand({world_size, count}));
}

void GradientReduction::Keep(BufferPool& pool) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const AbandonAtExit always(*this, pool);
  DropCleared();
  if (pending_.empty()) {
    pending_.resize(parts_.size());
    pending_has_gradient_.assign(has_gradient_.size(), false);
    UpdateWatches();
  }
  for (size_t k = 0; k < parts_.size(); ++k) {
    if (!parts_[k].payload.defined()) continue;
    if (pending_[k].defined()) {
      pending_[k].add_(parts_[k].payload);
    } else {
      pending_[k] = parts_[k].payload.clone();
    }
  }
  for (size_t i = 0; i < has_gradient_.size(); ++i) {
    if (has_gradient_[i]) pending_has_gradient_[i] = true;
  }
}

bool GradientReduction::has_pending() {
  DropCleared();
  return !pending_.empty() ||
         (chain_.settings.requires_all_reduce && chain_.has_partial());
}

std::vector<at::Tensor> GradientReduction::Pending() {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  DropCleared();
  std::vector<at::Tensor> wholes(group_.params().size());
  if (pending_.empty()) return wholes;
  for (size_t k = 0; k < parts_.size(); ++k) {
    if (!pending_[k].defined()) continue;
    const Part& part = parts_[k];
    const PayloadShape shape{part.shard_numel, part.chunk_numel};
    for (const int i : group_.segments()[part.segment].params) {
      if (!pending_has_gradient_[i]) continue;
      wholes[i] = WholeOfPayload(group_.params()[i], shape, pending_[k]);
    }
  }
  return wholes;
}

void GradientReduction::DropCleared() {
  if (!keeps_any()) return;
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  bool dropped = false;
  for (size_t k = 0; k < parts_.size(); ++k) {
    const bool pending = !pending_.empty() && pending_[k].defined();
    if (!pending && !chain_.partial(k).defined()) continue;
    const auto& indices = group_.segments()[parts_[k].segment].params;
    for (size_t p = 0; p < indices.size(); ++p) {
      const FSDPParam& param = group_.params()[indices[p]];
      const internal::GradientWatch watch = std::exchange(
          *param.gradient_watch, internal::GradientWatch{.on = true});
      const at::Tensor& gradient = internal::GradientOf(param.sharded);
      const bool same = gradient.defined() &&
                        gradient.is_same(watch.gradient) &&
                        gradient._version() == watch.version;
      if (!watch.touched || same) continue;
      TORCH_CHECK_VALUE(
          !gradient.defined() || !HasValues(gradient), "The gradient of '",
          param.fqn,
          "' was changed while gradients of its group are pending: the change "
          "does not reach those. Change gradients after a backward with "
          "gradient sync, or call synchronize_gradients() before; to drop them "
          "all, call zero_grad().");
      DropKept(k, p);
      dropped = true;
    }
  }
  if (dropped) ForgetEmpty();
}

void GradientReduction::DropKept(size_t k, size_t p) {
  const Part& part = parts_[k];
  const int i = group_.segments()[part.segment].params[p];
  const FSDPParam& param = group_.params()[i];
  const int64_t flag = part.shard_numel + static_cast<int64_t>(p);
  if (!pending_.empty() && pending_[k].defined()) {
    ZeroInPayload(param, {part.shard_numel, part.chunk_numel}, pending_[k]);
    pending_[k].view({-1, part.chunk_numel}).select(1, flag).zero_();
    pending_has_gradient_[i] = false;
  }
  if (const at::Tensor partial = chain_.partial(k); partial.defined()) {
    const at::Tensor rows = param.RowsIn(partial);
    if (rows.numel() > 0) rows.zero_();
    partial.select(0, flag).zero_();
  }
}

void GradientReduction::ForgetEmpty() {
  const auto& left = pending_has_gradient_;
  if (std::find(left.begin(), left.end(), true) == left.end()) {
    pending_.clear();
    pending_has_gradient_.clear();
  }
  bool any_partial = false;
  for (size_t k = 0; k < parts_.size(); ++k) {
    const at::Tensor partial = chain_.partial(k);
    if (!partial.defined()) continue;
    const size_t flags = group_.segments()[parts_[k].segment].params.size();
    any_partial |= HasValues(
        partial.narrow(0, parts_[k].shard_numel, static_cast<int64_t>(flags)));
  }
  if (!any_partial) chain_.ClearPartial();
  UpdateWatches();
}

size_t GradientReduction::pending_bytes() {
  DropCleared();
  size_t bytes = chain_.partial_bytes();
  for (const auto& tensor : pending_) {
    if (tensor.defined()) bytes += tensor.nbytes();
  }
  return bytes;
}

void GradientReduction::ClearPending() {
  chain_.ClearPartial();
  ClearKept();
}

void GradientReduction::ClearKept() {
  pending_.clear();
  pending_has_gradient_.clear();
  UpdateWatches();
}

void GradientReduction::UpdateWatches() {
  const bool on = keeps_any();
  for (const auto& param : group_.params()) {
    if (param.gradient_watch->on != on) *param.gradient_watch = {.on = on};
  }
}

void GradientReduction::IssueParts(bool alone) {
  std::vector<ReductionChain::Input> inputs;
  for (const auto& part : parts_) {
    const auto& segment = group_.segments()[part.segment];
    inputs.push_back({part.payload, part.shard_numel, segment.label,
                      segment.replicate_label});
  }
  chain_.Issue(std::move(inputs), alone);
}

size_t GradientReduction::Advance(BufferPool& pool) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  AbandonAtExit on_error(*this, pool);
  const bool all_reduces = chain_.Advance();
  ReleasePayload(pool);
  on_error.Cancel();
  return all_reduces ? chain_.all_reduced_bytes() : 0;
}

void GradientReduction::ReleasePayload(BufferPool& pool) {
  for (auto& part : parts_) part.payload.reset();
  if (buffer_ != nullptr) pool.Release(std::exchange(buffer_, nullptr));
}

size_t GradientReduction::Issue() {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  DropCleared();
  size_t bytes = 0;
  for (size_t k = 0; k < parts_.size(); ++k) {
    Part& part = parts_[k];
    if (!part.payload.defined()) continue;
    if (!pending_.empty() && pending_[k].defined()) {
      part.payload.add_(pending_[k]);
    }
    bytes += part.payload.nbytes();
  }
  if (!pending_.empty()) {
    for (size_t i = 0; i < has_gradient_.size(); ++i) {
      if (pending_has_gradient_[i]) has_gradient_[i] = true;
    }
    ClearKept();
  }
  IssueParts(/*alone=*/false);
  return bytes;
}

void GradientReduction::Finish(BufferPool& pool) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const AbandonAtExit always(*this, pool);
  FinishParts([this](FSDPParam& param, at::Tensor rows) {
    SetGradient(param, std::move(rows));
  });
  UpdateWatches();
}

std::vector<at::Tensor> GradientReduction::ReduceNow(BufferPool& pool,
                                                     size_t* all_reduced) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const AbandonAtExit always(*this, pool);
  IssueParts(/*alone=*/true);
  std::vector<at::Tensor> gradients(group_.params().size());
  FinishParts([&](FSDPParam& param, at::Tensor rows) {
    at::Tensor& gradient = gradients[&param - group_.params().data()];
    gradient = RunShardHooks(param.sharded, std::move(rows));
    if (!gradient.defined()) return;
    internal::AddGuard(gradient);
    if (graph_wanted_) RefuseToDifferentiate(gradient, param.fqn);
  });
  if (all_reduced != nullptr) *all_reduced = chain_.all_reduced_bytes();
  return gradients;
}

void GradientReduction::FinishParts(
    const std::function<void(FSDPParam& param, at::Tensor rows)>& take) {
  chain_.Finish();
  for (size_t p = 0; p < parts_.size(); ++p) {
    Part& part = parts_[p];
    part.reduced = chain_.output(p);
    if (!part.reduced.defined()) continue;
    const auto& indices = group_.segments()[part.segment].params;
    at::Tensor flags;
    const auto any_rank_has = [&](size_t k) {
      if (has_gradient_[indices[k]]) return true;
      if (!flags.defined()) {
        flags = Slice(part.reduced, part.shard_numel,
                      static_cast<int64_t>(indices.size()))
                    .to(c10::kDouble);
      }
      return flags.const_data_ptr<double>()[k] != 0;
    };
    at::Tensor shard = Slice(part.reduced, 0, part.shard_numel);
    const auto dtype_of = [&](int i) {
      return GradientDtype(part, group_.params()[i]);
    };
    const bool is_uniform = std::all_of(
        indices.begin(), indices.end(),
        [&](int i) { return dtype_of(i) == dtype_of(indices.front()); });
    if (is_uniform) shard = shard.to(dtype_of(indices.front()));
    for (size_t k = 0; k < indices.size(); ++k) {
      FSDPParam& param = group_.params()[indices[k]];
      if (!param.sharded.requires_grad() || !any_rank_has(k)) continue;
      at::Tensor rows = param.RowsIn(shard);
      take(param, rows.scalar_type() == dtype_of(indices[k])
                      ? std::move(rows)
                      : rows.to(dtype_of(indices[k])));
    }
  }
}

c10::ScalarType GradientReduction::GradientDtype(const Part& part,
                                                 const FSDPParam& param) {
  return param.sharded.grad_dtype().value_or(part.reduced.scalar_type());
}

bool GradientReduction::IsUntrained() const {
  return writes_at_first_ == group_.writes();
}

void GradientReduction::SetGradient(FSDPParam& param, at::Tensor rows) {
  if (!writes_at_first_) writes_at_first_ = group_.writes();
  if (!warned_ && IsUntrained() && WasClearedUnused(param)) {
    warned_ = true;
    TORCH_WARN("The gradient of '", param.fqn,
               "' was cleared, and no parameter of its group has ever changed. "
               "The likely cause is an optimizer that does not hold the "
               "shards, because it was built before fully_shard: build it "
               "afterwards from module->parameters(), or move it with "
               "composable::rebind(optimizer, module).");
  }
  AccumulateShardGradient(param.sharded, std::move(rows));
  const at::Tensor& gradient = param.sharded.grad();
  param.filled.reset();
  if (!gradient.defined()) return;  // a hook took it
  if (graph_wanted_) RefuseToDifferentiate(gradient, param.fqn);
  if (!warned_ && IsUntrained()) {
    param.filled = {.version = gradient._version(),
                    .has_values = HasValues(gradient)};
  }
}

bool GradientReduction::WasClearedUnused(const FSDPParam& param) {
  if (!param.filled) return false;
  const at::Tensor& gradient = param.sharded.grad();
  if (!gradient.defined()) return true;
  return gradient._version() != param.filled->version &&
         param.filled->has_values && !HasValues(gradient);
}

void GradientReduction::Abandon(BufferPool& pool) {
  chain_.Abandon();  // waits
  for (auto& part : parts_) part.reduced.reset();
  ReleasePayload(pool);
}

}  // namespace composable
