// Whole parameters in the dtype of their shards, whatever the gathered one: what
// the first values are written to.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "state/fsdp_param_group.h"
#include "state/tensor_access.h"

namespace composable {
namespace {

int64_t LongestChunk(const Chunks& chunks, int64_t ranks) {
  int64_t longest = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    longest = std::max(longest, chunks.numel_of(r));
  }
  return longest;
}

}  // namespace

size_t FSDPParamGroup::WholeSize(const Segment& segment) const {
  if (!original_) return segment.whole_bytes;
  return segment.whole_bytes / c10::elementSize(segment.gathered) *
         c10::elementSize(segment.dtype);
}

void FSDPParamGroup::SetOriginal(bool original) {
  original_ = original;
  for (const auto& segment : segments_) {
    const auto storage = segment.storage.lock();
    if (!segment.is_cast() || !storage) continue;
    storage->set_nbytes(WholeSize(segment));
    for (const int i : segment.params) {
      const at::Tensor whole = params_[i].unsharded();
      if (!whole.defined()) continue;
      internal::SetBody(
          whole, params_[i].WholeIn(
                     storage, original ? segment.dtype : segment.gathered));
      internal::AddGuard(whole);
    }
  }
}

void FSDPParamGroup::UnshardOriginal(BufferPool& pool) {
  TORCH_INTERNAL_ASSERT(is_sharded());
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  buffer_.Release(pool);  // it may be kept, and of another size
  SetOriginal(true);
  size_t bytes = 0;
  for (const auto& segment : segments_)
    bytes += PaddedBytes(WholeSize(segment));
  sharded_state_ = ShardedState::kUnsharding;
  dirty_ = false;
  try {
    buffer_.Acquire(bytes, pool, /*custom=*/nullptr);
    sharded_state_ = ShardedState::kUnsharded;
    for (const auto& segment : segments_) {
      if (const auto storage = segment.storage.lock()) {
        internal::SetData(*storage, WholeBytes(segment).mutable_data_ptr());
      }
      const bool any_values =
          std::any_of(segment.params.begin(), segment.params.end(),
                      [&](int i) { return params_[i].has_values; });
      if (any_values) GatherOriginal(segment);
    }
  } catch (...) {
    Reshard(pool);
    throw;
  }
}

// In pieces, because Gloo's all-gather makes a copy of its output.
void FSDPParamGroup::GatherOriginal(const Segment& segment) {
  constexpr int64_t kPieces = 32;
  constexpr int64_t kSmallestPiece = 4096;  // bytes
  const auto ranks = static_cast<int64_t>(communicator_.size());
  if (segment.staged == nullptr) {
    const at::Tensor shard = ShardBytes(segment);
    const at::Tensor whole = WholeBytes(segment).view({ranks, -1});
    const int64_t most =
        std::max(kSmallestPiece, (shard.numel() + kPieces - 1) / kPieces);
    for (int64_t at = 0; at < shard.numel(); at += most) {
      const int64_t bytes = std::min(most, shard.numel() - at);
      const at::Tensor piece = at::empty({ranks, bytes}, c10::kByte);
      communicator_
          .AllGather(piece.view({-1}), shard.narrow(0, at, bytes),
                     segment.label)
          ->Wait();
      whole.narrow(1, at, bytes).copy_(piece);
    }
    return;
  }
  for (const int i : segment.params) {
    const FSDPParam& param = params_[i];
    const at::Tensor whole = GatheredValue(param);
    const at::Tensor rows = param.RowsIn(segment.flat_shard);
    if (param.placement.kind == Placement::Kind::kReplicate) {
      whole.copy_(rows);
      continue;
    }
    const Chunks& chunks = *param.chunks();
    const int64_t longest = LongestChunk(chunks, ranks);
    if (longest == 0) continue;
    const at::Tensor mine = at::zeros({longest}, segment.dtype);
    internal::MakeTensor(internal::StorageOf(mine), segment.dtype, rows.sizes(),
                         rows.strides(), 0)
        .copy_(rows);
    const at::Tensor all = at::empty({ranks * longest}, segment.dtype);
    communicator_
        .AllGather(all.view(c10::kByte), mine.view(c10::kByte), segment.label)
        ->Wait();
    Chunks::Views views;
    chunks.AppendViews(whole, all, /*offset=*/0, longest, views);
    at::_foreach_copy_(views.wholes, views.chunks);
  }
}

void FSDPParamGroup::ScatterWhole() {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  AllocateShards();
  for (const auto& segment : segments_) {
    TORCH_INTERNAL_ASSERT(original_ || !segment.is_cast());
    if (segment.staged != nullptr || segment.kind == SegmentKind::kReplicated) {
      ScatterChunks(segment);
    } else {
      communicator_.Scatter(ShardBytes(segment), WholeBytes(segment),
                            segment.label);
    }
  }
}

// A parameter at a time, so that what is staged is no more than that.
void FSDPParamGroup::ScatterChunks(const Segment& segment) {
  const auto size = static_cast<int64_t>(communicator_.size());
  for (const int i : segment.params) {
    const FSDPParam& param = params_[i];
    if (param.placement.kind == Placement::Kind::kReplicate) {
      const at::Tensor copy = param.RowsIn(segment.flat_shard);
      if (communicator_.rank() == 0) copy.copy_(GatheredValue(param));
      communicator_.Broadcast(
          segment.flat_shard.narrow(0, param.local_offset(), param.numel()),
          segment.label);
      continue;
    }
    const Chunks& chunks = *param.chunks();
    const int64_t longest = LongestChunk(chunks, size);
    if (longest == 0) continue;
    const at::Tensor mine = at::empty({longest}, segment.dtype);
    at::Tensor all;
    if (communicator_.rank() == 0) {
      all = at::zeros({size * longest}, segment.dtype);
      Chunks::Views views;
      chunks.AppendViews(GatheredValue(param), all, /*offset=*/0, longest,
                         views);
      at::_foreach_copy_(views.chunks, views.wholes);
    }
    communicator_.Scatter(mine, all, segment.label);
    const at::Tensor rows = param.RowsIn(segment.flat_shard);
    if (rows.numel() == 0) continue;
    rows.copy_(internal::MakeTensor(internal::StorageOf(mine), segment.dtype,
                                    rows.sizes(), rows.strides(), 0));
  }
}

}  // namespace composable
