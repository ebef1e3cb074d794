#include "state/chunks.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "state/tensor_access.h"

namespace composable {
namespace {

Chunks::Dims ContiguousStrides(at::IntArrayRef sizes) {
  Chunks::Dims strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

// `dims` with `value` before them.
Chunks::Dims Prepend(int64_t value, at::IntArrayRef dims) {
  Chunks::Dims result{value};
  result.append(dims.begin(), dims.end());
  return result;
}

at::Tensor View(const at::Tensor& tensor, at::IntArrayRef sizes,
                at::IntArrayRef strides, int64_t offset) {
  return internal::MakeTensor(internal::StorageOf(tensor), tensor.scalar_type(),
                              sizes, strides, tensor.storage_offset() + offset);
}

}  // namespace

Chunks::Chunks(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t dim,
               int64_t size, int64_t world_size)
    : sizes_(sizes),
      strides_(strides),
      dim_(dim),
      size_(size),
      ranks_(world_size) {}

Chunks Chunks::Along(int64_t dim, at::IntArrayRef sizes, int64_t world_size) {
  return {
      sizes, {}, dim, (sizes[dim] + world_size - 1) / world_size, world_size};
}

Chunks Chunks::Copies(at::IntArrayRef sizes, at::IntArrayRef strides,
                      int64_t world_size) {
  return {sizes, strides, -1, 0, world_size};
}

int64_t Chunks::LengthOf(int64_t rank) const {
  return std::clamp<int64_t>(sizes_[dim_] - rank * size_, 0, size_);
}

Chunks::Dims Chunks::WithLength(int64_t length) const {
  Dims sizes = sizes_;
  if (dim_ >= 0) sizes[dim_] = length;
  return sizes;
}

Chunks::Dims Chunks::padded_sizes() const { return WithLength(size_); }
int64_t Chunks::numel() const { return c10::multiply_integers(padded_sizes()); }

Chunks::Dims Chunks::sizes_of(int64_t rank) const {
  return is_copies() ? sizes_ : WithLength(LengthOf(rank));
}
int64_t Chunks::numel_of(int64_t rank) const {
  return c10::multiply_integers(sizes_of(rank));
}
Chunks::Dims Chunks::strides_of(int64_t rank) const {
  return is_copies() ? strides_ : ContiguousStrides(sizes_of(rank));
}

at::Tensor Chunks::PartOf(const at::Tensor& whole, int64_t rank) const {
  if (is_copies()) return whole;
  const int64_t length = LengthOf(rank);
  return whole.narrow(dim_, length == 0 ? 0 : rank * size_, length);
}

void Chunks::AppendViews(const at::Tensor& whole, const at::Tensor& flat,
                         int64_t offset, int64_t distance, Views& views) const {
  TORCH_INTERNAL_ASSERT(whole.sizes() == sizes_);
  const bool has_memory = !whole._is_zerotensor() && !whole.is_neg();
  const at::Tensor from =
      has_memory ? whole : at::empty(sizes_, whole.options()).copy_(whole);
  if (is_copies()) {
    views.wholes.push_back(
        View(from, Prepend(ranks_, sizes_), Prepend(0, from.strides()), 0));
    views.chunks.push_back(View(flat, Prepend(ranks_, sizes_),
                                Prepend(distance, strides_), offset));
    return;
  }
  // `count` chunks of one length, from that of rank `first` on.
  const auto append = [&](int64_t first, int64_t count, int64_t length) {
    if (count == 0 || length == 0) return;
    const Dims sizes = WithLength(length);
    const int64_t stride = from.stride(dim_);
    views.wholes.push_back(View(from, Prepend(count, sizes),
                                Prepend(size_ * stride, from.strides()),
                                first * size_ * stride));
    views.chunks.push_back(View(flat, Prepend(count, sizes),
                                Prepend(distance, ContiguousStrides(sizes)),
                                offset + first * distance));
  };
  const int64_t full = sizes_[dim_] / size_;
  append(0, full, size_);
  append(full, 1, sizes_[dim_] % size_);
}

}  // namespace composable
