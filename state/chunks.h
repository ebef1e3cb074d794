// Where the elements of a parameter go that is cut into one chunk per rank:
// Shard(dim), or the whole of it for every rank.
//
//   // A [7, 3] parameter over 3 ranks: rows 0 to 2, 3 to 5, and 6.
//   const auto chunks = composable::Chunks::Along(0, {7, 3}, /*world_size=*/3);
//   const int64_t padded = chunks.numel();        // 9
//   const int64_t mine = chunks.numel_of(2);      // 3
//
// A chunk is contiguous, and followed by padding up to the size of the first.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace composable {

class Chunks {
 public:
  using Dims = c10::SmallVector<int64_t, 4>;

  // Chunks of ceil(n / world_size) along `dim` of a tensor of `sizes`.
  static Chunks Along(int64_t dim, at::IntArrayRef sizes, int64_t world_size);
  // All of a dense tensor for each rank, with its strides.
  static Chunks Copies(at::IntArrayRef sizes, at::IntArrayRef strides,
                       int64_t world_size);

  // Elements of a chunk with its padding.
  int64_t numel() const;
  // Elements that `rank` holds, and their shape.
  int64_t numel_of(int64_t rank) const;
  Dims sizes_of(int64_t rank) const;
  Dims strides_of(int64_t rank) const;
  // The shape of a chunk with its padding.
  Dims padded_sizes() const;
  bool is_copies() const { return dim_ < 0; }
  int64_t dim() const { return dim_; }

  // The part of `whole` that `rank` holds, as a view.
  at::Tensor PartOf(const at::Tensor& whole, int64_t rank) const;

  // The same elements in two places, pair by pair: in `whole`, a tensor of the
  // parameter's sizes and any strides, and in the flat tensor `flat`, where the
  // chunk of rank r begins at offset + r * distance. At most two pairs. Where
  // every rank has a copy, for writing `flat` only.
  struct Views {
    std::vector<at::Tensor> wholes;
    std::vector<at::Tensor> chunks;
  };
  void AppendViews(const at::Tensor& whole, const at::Tensor& flat,
                   int64_t offset, int64_t distance, Views& views) const;

 private:
  Chunks(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t dim,
         int64_t size, int64_t world_size);
  int64_t LengthOf(int64_t rank) const;
  Dims WithLength(int64_t length) const;

  Dims sizes_;
  Dims strides_;  // of a copy
  int64_t dim_;   // -1: copies
  int64_t size_;  // of a chunk along it
  int64_t ranks_;
};

}  // namespace composable
