#include "state/fsdp_param.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "state/tensor_access.h"

namespace composable {

FSDPParam::FSDPParam(const OwnedParam& owned)
    : name(owned.name),
      fqn(owned.name),
      shared_name(std::make_shared<std::string>(owned.name)),
      slots(owned.slots),
      placement(owned.placement),
      extension(owned.extension),
      unsharded_(owned.parameter.getIntrusivePtr()),
      dtypes_{owned.parameter.scalar_type(), owned.parameter.scalar_type(),
              owned.parameter.scalar_type()},
      sizes_(owned.parameter.sizes()),
      strides_(owned.parameter.strides()),
      numel_(owned.parameter.numel()) {
  // Dimensions of one element have no place in memory: they come last, so that
  // a [1, n] parameter is cut along n.
  const auto size = static_cast<int64_t>(sizes_.size());
  for (int64_t d = 0; d < size; ++d) {
    if (sizes_[d] != 1) memory_order_.push_back(d);
  }
  std::stable_sort(
      memory_order_.begin(), memory_order_.end(),
      [&](int64_t a, int64_t b) { return strides_[a] > strides_[b]; });
  if (std::is_sorted(memory_order_.begin(), memory_order_.end())) {
    int64_t stride = 1;
    for (int64_t d = size; d-- > 0;) {
      strides_[d] = stride;
      stride *= std::max<int64_t>(sizes_[d], 1);
    }
  }
  for (int64_t d = 0; d < size; ++d) {
    if (sizes_[d] == 1) memory_order_.push_back(d);
  }
  rows_ = sizes_.empty() ? 1 : sizes_[memory_order_[0]];
}

ParamExtent FSDPParam::extent() const {
  return {.numel = numel_, .rows = rows_};
}

void FSDPParam::Place(int segment, size_t index, const ShardLayout& layout,
                      int rank) {
  segment_ = segment;
  place_ = layout.placement(index);
  local_ = layout.range(index, rank);
  local_offset_ =
      local_.begin == local_.end
          ? layout.shard_numel() + static_cast<int64_t>(index)
          : place_.offset + local_.begin - rank * layout.shard_numel();
  const int64_t elements = local_.end - local_.begin;
  const int64_t row = numel_ / rows_;
  local_sizes_ = sizes_;
  local_strides_ = strides_;
  if (placement.kind == Placement::Kind::kOwned) {
    if (elements == 0) local_sizes_[0] = 0;
  } else if (place_.granularity == row) {
    local_sizes_[memory_order_[0]] = elements / row;
  } else {
    // Cut between elements: one column of them, with the number of dimensions
    // that rules such as "no weight decay for vectors" look at.
    std::fill(local_sizes_.begin(), local_sizes_.end(), 1);
    std::fill(local_strides_.begin(), local_strides_.end(), 1);
    local_sizes_[0] = elements;
  }
}

Chunks FSDPParam::ChunksFor(int world_size) const {
  return placement.kind == Placement::Kind::kShard
             ? Chunks::Along(placement.dim, sizes_, world_size)
             : Chunks::Copies(sizes_, strides_, world_size);
}

bool FSDPParam::is_contiguous() const {
  return std::is_sorted(
      memory_order_.begin(),
      memory_order_.end() - std::count(sizes_.begin(), sizes_.end(), 1));
}

void FSDPParam::PlaceChunk(int segment, size_t index, const ShardLayout& layout,
                           int rank, int64_t whole_offset) {
  segment_ = segment;
  rank_ = rank;
  place_ = {.offset = whole_offset, .granularity = 1};
  chunks_ = ChunksFor(static_cast<int>(layout.world_size()));
  local_ = {0, chunks_->numel_of(rank)};
  local_offset_ = layout.placement(index).offset;
  local_sizes_ = chunks_->sizes_of(rank);
  local_strides_ = chunks_->strides_of(rank);
}

at::Tensor FSDPParam::InMemoryOrder(const at::Tensor& whole) const {
  return whole.permute(memory_order_);
}

void FSDPParam::CopyElements(const at::Tensor& whole, int64_t begin,
                             int64_t end, const at::Tensor& destination) const {
  if (begin == end) return;
  const at::Tensor ordered = InMemoryOrder(whole);
  const int64_t row = numel_ / rows_;
  if (begin % row == 0 && end % row == 0) {
    const at::Tensor part = ordered.narrow(0, begin / row, (end - begin) / row);
    destination.view(part.sizes()).copy_(part);
  } else {
    destination.copy_(ordered.reshape({-1}).narrow(0, begin, end - begin));
  }
}

void FSDPParam::CopyRowsFrom(const at::Tensor& whole,
                             const at::Tensor& flat_shard) const {
  if (local_.begin == local_.end) return;
  if (chunks_) {
    RowsIn(flat_shard).copy_(chunks_->PartOf(whole, rank_));
    return;
  }
  CopyElements(whole, local_.begin, local_.end,
               flat_shard.narrow(0, local_offset_, local_.end - local_.begin));
}

at::Tensor FSDPParam::EmptyRows(c10::ScalarType dtype) const {
  const at::Tensor flat = at::empty({local_.end - local_.begin}, dtype);
  return internal::MakeTensor(internal::StorageOf(flat), dtype, local_sizes_,
                              local_strides_, 0);
}

at::Tensor FSDPParam::RowsOf(const at::Tensor& whole) const {
  const at::Tensor rows = EmptyRows(whole.scalar_type());
  if (chunks_) {
    rows.copy_(chunks_->PartOf(whole, rank_));
  } else {
    const int64_t numel = local_.end - local_.begin;
    CopyElements(whole, local_.begin, local_.end,
                 internal::MakeTensor(internal::StorageOf(rows),
                                      rows.scalar_type(), {numel}, {1}, 0));
  }
  return rows;
}

at::Tensor FSDPParam::RowsIn(const at::Tensor& flat) const {
  return internal::MakeTensor(internal::StorageOf(flat), flat.scalar_type(),
                              local_sizes_, local_strides_,
                              flat.storage_offset() + local_offset_);
}

at::Tensor FSDPParam::WholeIn(
    const c10::intrusive_ptr<c10::StorageImpl>& storage) const {
  return WholeIn(storage, dtypes_.gathered);
}

at::Tensor FSDPParam::WholeIn(
    const c10::intrusive_ptr<c10::StorageImpl>& storage,
    c10::ScalarType dtype) const {
  return internal::MakeTensor(storage, dtype, sizes_, strides_, place_.offset);
}

at::Tensor FSDPParam::unsharded() const {
  auto impl = unsharded_.lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

}  // namespace composable
