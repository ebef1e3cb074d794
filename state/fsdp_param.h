// One sharded parameter: its two tensors, and where they lie.
//
// Note [Registry and member]
// A LibTorch parameter has two handles to one TensorImpl: the entry in
// Module::parameters_, which optimizers, zero_grad and save see, and the member
// field, which forward reads. Sharding replaces only the entry:
//
//   sharded tensor S     in the entry; a leaf of this rank's rows; a view of
//                        the segment's flat shard, always there; S.grad() is
//                        this rank's reduced gradient
//   unsharded tensor P   the member's own TensorImpl, keeping its identity for
//                        ever; a non-leaf view of the segment's unsharded
//                        storage, which is filled by an all-gather and emptied
//                        in place; its gradient flows into the gradient sink
//
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "state/all_gather_extension.h"
#include "state/chunks.h"
#include "state/compatibility.h"
#include "state/param_dtypes.h"
#include "state/placement.h"
#include "state/shard_layout.h"
#include "state/tensor_access.h"

namespace torch::nn {
class Module;
}

namespace composable {

// An entry of a module's parameter registry.
struct ParameterSlot {
  std::weak_ptr<torch::nn::Module> module;
  std::string key;
};

// A parameter that is to be sharded.
struct OwnedParam {
  at::Tensor parameter;
  std::string name;  // relative to the module, for messages
  std::vector<ParameterSlot> slots;
  Placement placement = {};                            // resolved
  std::shared_ptr<AllGatherExtension> extension = {};  // may be null
};

class FSDPParam {
 public:
  using Dims = c10::SmallVector<int64_t, 4>;

  // The parameter must be dense. Its name is how messages call it until the
  // tree is known.
  explicit FSDPParam(const OwnedParam& owned);

  // Elements and outermost rows, in memory order.
  ParamExtent extent() const;

  // Fixes the parameter's place in segment `segment`, whose layout it is the
  // `index`-th entry of.
  void Place(int segment, size_t index, const ShardLayout& layout, int rank);
  // The same in a layout that is interleaved, whose chunks are those of
  // ChunksFor; the whole parameter begins at `whole_offset`.
  void PlaceChunk(int segment, size_t index, const ShardLayout& layout,
                  int rank, int64_t whole_offset);
  // How it is cut where its placement is Shard or Replicate.
  Chunks ChunksFor(int world_size) const;
  // That it lies in memory in the order of its dimensions.
  bool is_contiguous() const;

  // Copies this rank's rows of `whole`, a tensor of the parameter's shape, into
  // `flat_shard`, or back with the other two.
  void CopyRowsFrom(const at::Tensor& whole,
                    const at::Tensor& flat_shard) const;

  // This rank's rows of `whole`, in memory of their own.
  at::Tensor RowsOf(const at::Tensor& whole) const;

  // Memory for this rank's rows, shaped like S.
  at::Tensor EmptyRows(c10::ScalarType dtype) const;

  // This rank's rows in `flat`, a flat shard or a flat reduced gradient: not a
  // view in autograd's sense.
  at::Tensor RowsIn(const at::Tensor& flat) const;

  // The whole parameter in a flat unsharded buffer, whose elements are of the
  // gathered dtype or of `dtype`.
  at::Tensor WholeIn(const c10::intrusive_ptr<c10::StorageImpl>& storage) const;
  at::Tensor WholeIn(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                     c10::ScalarType dtype) const;

  // Copies elements [begin, end), counted in memory order, of `whole` to
  // `destination`, a flat tensor of end - begin elements.
  void CopyElements(const at::Tensor& whole, int64_t begin, int64_t end,
                    const at::Tensor& destination) const;

  // P, or an undefined tensor if nothing holds it any more.
  at::Tensor unsharded() const;

  const std::string name;  // when it was sharded, from that module
  std::string fqn;         // from the root, once that is known
  // The same, for the errors of P, which may outlive this.
  std::shared_ptr<std::string> shared_name;
  std::vector<ParameterSlot> slots;  // every entry that holds S
  at::Tensor sharded;                // S
  NodePtr accumulator;               // of S; null if it can't have a gradient
  bool has_edge = false;             // P's gradients flow into the sink
  bool has_values = true;            // false: was on the meta device, see
                                     // FSDPParamGroup::SetHasValues
  // Over storages of its own, and so is P: see Note [Dtype changes].
  bool stands_alone = false;
  int leaf_questions = 0;  // that were looked into

  // What a reduction left in S.grad() last, while GradientReduction looks.
  struct Filled {
    int64_t version = 0;
    bool has_values = false;  // other than zero
  };
  std::optional<Filled> filled;

  Placement placement;                            // resolved
  std::shared_ptr<AllGatherExtension> extension;  // null: none

  // Whether somebody cleared or changed S.grad() while gradients are pending.
  std::shared_ptr<internal::GradientWatch> gradient_watch =
      std::make_shared<internal::GradientWatch>();

  int segment() const { return segment_; }
  // Of the same layout as that which it was placed in.
  void set_segment(int segment) { segment_ = segment; }
  // Null unless it was placed as a chunk.
  const Chunks* chunks() const { return chunks_ ? &*chunks_ : nullptr; }
  int64_t numel() const { return numel_; }
  // Of the whole parameter in its storage.
  int64_t offset() const { return place_.offset; }
  // This rank's elements in memory order. Of chunks, whose elements may lie
  // apart in the whole, only their number is meant.
  ShardRange local_range() const { return local_; }
  // Where RowsIn begins in a flat shard. One without rows here lies behind the
  // flat shard's end, at a place of its own, so that its views tell which
  // parameter they are of.
  int64_t local_offset() const { return local_offset_; }
  at::IntArrayRef local_sizes() const { return local_sizes_; }
  // All equal until they are set.
  const ParamDtypes& dtypes() const { return dtypes_; }
  void set_dtypes(const ParamDtypes& dtypes) { dtypes_ = dtypes; }
  at::IntArrayRef sizes() const { return sizes_; }
  at::IntArrayRef strides() const { return strides_; }

 private:
  at::Tensor InMemoryOrder(const at::Tensor& whole) const;

  c10::weak_intrusive_ptr<c10::TensorImpl> unsharded_;
  ParamDtypes dtypes_;
  Dims sizes_;
  Dims strides_;
  Dims memory_order_;  // dimensions from the outermost in memory inwards
  int64_t numel_ = 0;
  int64_t rows_ = 1;
  int segment_ = 0;
  ParamPlacement place_{};
  std::optional<Chunks> chunks_;
  int rank_ = 0;
  ShardRange local_{};
  int64_t local_offset_ = 0;
  Dims local_sizes_;  // of the shard
  Dims local_strides_;
};

}  // namespace composable
