// The parameters that are gathered and reduced together.
//
// Parameters of the same dtypes (see Note [Dtypes of a parameter]) and kind of
// placement, trainable or frozen when they were sharded, form a segment; a group
// is usually one segment. Each segment has a flat shard (this rank's part,
// always there), an unsharded storage that all its parameters are views of, and
// a layout that makes the ranks' flat shards, one after the other, equal to the
// unsharded buffer. So unsharding is: point the storage to a buffer, all-gather
// into it. Resharding is: take the buffer away. Neither copies, and neither
// costs work per parameter. A segment that is gathered in another dtype than its
// own is cast, by one operator, into this rank's part of the buffer. Shard(dim)
// and all-gather extensions are gathered by way of a staging buffer.
//
//   group.IssueUnshard(pool);   // returns at once
//   group.WaitUnshard(pool);    // parameters may be read
//   group.Reshard(pool);        // parameters may not be read
//
// Note [Who owns a group]
// The unsharded storages and the gradient sink own the FSDPState, and so its
// group. They live as long as a member field or an autograd graph holds one of
// the parameters or leads to its gradient: a group dies with its module at
// once, and a loss that outlives its model can still run backward. The group
// holds its storages, parameters and sink weakly.
//
// Note [Parameters without values]
// A parameter that is on the meta device when it is sharded becomes one without
// values: P is a CPU tensor like any other, S a view of a flat shard without
// memory. The flat shard gets memory with the first values that come into its
// group. While a parameter has none, its group can't be gathered.
//
// Note [Dtype changes]
// A shard may be given another dtype, as by module->to(dtype), one after the
// other and between forwards. It and the whole parameter P then stand alone,
// over storages of their own, so that both are of the new dtype at once, until
// the tree is made again, at its next use. There the group takes them up in new
// segments, one for each segment and dtype, that keep the layouts: rows stay
// where they are, and so what an optimizer keeps for them still fits.
//
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/buffer_pool.h"
#include "collectives/communicator.h"
#include "state/compatibility.h"
#include "state/fsdp_param.h"
#include "state/gather_buffer.h"
#include "state/group_communicators.h"
#include "state/post_forward_shard.h"
#include "state/segment_plan.h"
#include "state/shard_layout.h"
#include "state/staged_gather.h"
#include "state/tensor_access.h"
#include "state/training_state.h"

namespace composable {

class FSDPState;

class FSDPParamGroup {
 public:
  struct Segment {
    c10::ScalarType dtype = c10::ScalarType::Undefined;     // of flat_shard
    c10::ScalarType gathered = c10::ScalarType::Undefined;  // of the storage
    c10::ScalarType reduce = c10::ScalarType::Undefined;    // of gradients
    bool trainable = true;  // when it was sharded
    std::vector<int> params;
    SegmentKind kind = SegmentKind::kRagged;
    // Of the gathered buffer: the ranks' flat shards.
    ShardLayout layout =
        ShardLayout::Plan({}, {.world_size = 1, .itemsize = 1});
    size_t whole_bytes = 0;  // of the unsharded storage
    // Where that is not the gathered buffer; else null.
    std::unique_ptr<StagedGather> staged;
    at::Tensor flat_shard;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{
        c10::intrusive_ptr<c10::StorageImpl>()};
    size_t buffer_offset = 0;  // of this segment in the group's buffer
    CollectiveLabelPtr label;  // of its collectives
    CollectiveLabelPtr replicate_label;  // of those between replicas

    bool is_cast() const { return gathered != dtype; }
  };

  // Copies this rank's rows. Every rank must pass equal parameters. Needs the
  // memory of this rank's shards on top of the parameters. Throws
  // c10::ValueError for a policy that is none.
  FSDPParamGroup(const std::vector<OwnedParam>& owned,
                 GroupCommunicators communicators,
                 const MixedPrecisionPolicy& policy = {});
  ~FSDPParamGroup();
  FSDPParamGroup(const FSDPParamGroup&) = delete;
  FSDPParamGroup& operator=(const FSDPParamGroup&) = delete;

  // Takes the parameters over, when the state that owns this group exists:
  // their registry entries become shards, they become views of storages that
  // own the state, and their gradients flow into a node from `make_sink`, whose
  // input i is the gradient of parameter i. A node is made again when
  // parameters are unfrozen after all were frozen and the last one is gone.
  // If it throws, the parameters are as they were.
  void Attach(const std::shared_ptr<FSDPState>& state,
              std::function<NodePtr()> make_sink);
  // Ends Attach: releases the parameters' former memory, or gives all of them
  // back what they were. After the latter the group is of no use.
  void CommitAttach() noexcept;
  void UndoAttach() noexcept;

  // kSharded or kShardedPostForward -> kUnsharding. A later gather replaces the
  // values of an earlier one, so a group that is stale is resharded first. The
  // part that is kept is used unless a shard was written since.
  void IssueUnshard(BufferPool& pool);
  // Takes part in a gather of this group that other ranks need, and drops the
  // result. In kSharded or kUnsharded, which it does not change.
  void GatherForOthers(BufferPool& pool);
  // kUnsharding -> kUnsharded. If the gather failed: -> kSharded, and throws.
  void WaitUnshard(BufferPool& pool);
  // Any -> kSharded; waits for a gather in flight.
  void Reshard(BufferPool& pool);
  // kUnsharded -> kShardedPostForward, where keeps_part().
  void ReshardPostForward(BufferPool& pool);
  bool keeps_part() const { return keeps_part_ && post_forward_.has_value(); }
  // From now on ReshardPostForward is not used any more; what is kept stays.
  void KeepNoPart() { keeps_part_ = false; }
  size_t kept_part_bytes() const {
    return post_forward_ ? post_forward_->bytes() : 0;
  }
  // With true, gathers use one buffer from now on, which Reshard keeps.
  void set_keep_buffer(bool keep) { keep_buffer_ = keep; }
  // Gives a buffer back that was kept, if it holds no whole parameters now.
  void ReleaseKeptBuffer(BufferPool& pool);
  // kSharded -> kUnsharded, with memory of unspecified contents.
  void UnshardWithoutGather(BufferPool& pool);

  // (collective if some parameters have values) kSharded -> kUnsharded, with
  // whole parameters in the dtype of their shards, whatever the gathered one,
  // until Reshard. What has no values is of unspecified contents.
  void UnshardOriginal(BufferPool& pool);

  // Gives flat shards that have none memory, zeroed.
  void AllocateShards();
  // Whether parameter `index` has values. See Note [Parameters without values].
  void SetHasValues(int index, bool has_values);
  bool has_all_values() const { return without_values_ == 0; }

  // While kUnsharded: makes this rank's rows of parameter `index` those of the
  // whole, which is not stale by that.
  void WriteBack(int index);
  // (collective) While kUnsharded: the flat shards become the parts of rank 0's
  // whole parameters, which are in the dtype of the shards. Needs no memory but,
  // for Shard(dim), Replicate() and extensions, that of one parameter.
  void ScatterWhole();
  // Copies `whole`, of the parameter's sizes, to its place in `gathered`, a flat
  // tensor of the size and dtype of its segment's gathered shards.
  void CopyIntoGathered(const FSDPParam& param, const at::Tensor& whole,
                        const at::Tensor& gathered) const;

  ShardedState sharded_state() const { return sharded_state_; }
  // Neither gathered nor about to be.
  bool is_sharded() const {
    return sharded_state_ == ShardedState::kSharded ||
           sharded_state_ == ShardedState::kShardedPostForward;
  }

  // The shard of a parameter was, or is about to be, written: what is gathered
  // is stale, and autograd must refuse a backward through an earlier use of
  // that parameter.
  void MarkDirty(int param);
  void MarkAllDirty();
  bool dirty() const { return dirty_; }
  // How often shards were marked.
  uint64_t writes() const { return writes_; }

  // What set_data on the shard of parameter `index` means: `data` is this
  // rank's rows, or the whole parameter, and is copied. Throws c10::ValueError
  // if it is neither. Warns once if other tensors share the shard's memory.
  void SetShardData(int index, const at::Tensor& data);
  // The same in another dtype, while kSharded and without gradients that are
  // pending; see Note [Dtype changes].
  void ConvertShard(int index, const at::Tensor& data);
  // Whether parameter `index`, or any, stands alone.
  bool stands_alone(int index) const { return params_[index].stands_alone; }
  bool stands_alone() const;
  // Ends that, while kSharded. A GradientReduction must be made again.
  void Readopt();

  // Follows what the user last asked of parameter `index` with
  // requires_grad_() on its shard. True if that changed.
  bool SyncGradientEdge(int index);
  // Whether a backward can bring gradients for any parameter.
  bool has_gradient_edges() const;

  // What errors call the parameters: `group_fqn` is empty until the tree is
  // known.
  void SetNames(const std::string& group_fqn);

  // The whole value of `param`, which is one of params(), while kUnsharded: a
  // plain view of the gathered memory, in the gathered dtype or, after
  // UnshardOriginal, that of the shard.
  at::Tensor GatheredValue(const FSDPParam& param) const;
  // Whether a segment is gathered in another dtype than its own.
  bool is_cast() const;
  // (collective) The flat whole of each segment in its own dtype, whatever the
  // gathered one, in new memory: FSDPParam::WholeIn finds a parameter there.
  std::vector<at::Tensor> GatherShards();

  // Throws c10::ValueError, naming the parameter, if a shard no longer points
  // into its flat shard, or a member that still exists is not the whole
  // parameter any more.
  void CheckParams() const;

  // The parameter that a view of the unsharded storage, or of the flat shard,
  // belongs to.
  // A negative segment is the complement of a parameter that stands alone.
  int FindParam(int segment, int64_t storage_offset) const;
  int FindShard(int segment, int64_t storage_offset) const;

  const std::vector<FSDPParam>& params() const { return params_; }
  std::vector<FSDPParam>& params() { return params_; }
  const std::vector<Segment>& segments() const { return segments_; }
  // Over the ranks that share the parameters.
  Communicator& communicator() { return communicator_; }
  // Over those that hold the same shards; null without hybrid sharding.
  Communicator* replicate_communicator() {
    return replicate_ ? &*replicate_ : nullptr;
  }
  // Used from the next gather on; null: the library's own.
  void set_custom_all_gather(std::shared_ptr<AllGather> custom) {
    custom_all_gather_ = std::move(custom);
  }
  const std::shared_ptr<AllGather>& custom_all_gather() const {
    return custom_all_gather_;
  }
  // Of the whole parameters, in memory while they are gathered.
  size_t unsharded_bytes() const { return unsharded_bytes_; }
  // That the all-gathers write.
  size_t gathered_bytes() const;
  size_t sharded_bytes() const;

 private:
  void BuildSegments();
  // Of `numel` elements in memory for `places`; without any unless it
  // `has_values`.
  static at::Tensor MakeFlatShard(c10::ScalarType dtype, int64_t numel,
                                  int64_t places, bool has_values);
  void MakeShard(FSDPParam& param, const Segment& segment);
  // Of segment `index`, whose whole parameters are in `whole`.
  void RegisterStorages(int index, const c10::StorageImpl* whole);
  void UnregisterStorages();
  void TakeOver();
  static void CheckShardData(const FSDPParam& param, const at::Tensor& data,
                             c10::ScalarType dtype);
  NodePtr Sink();
  // Bytes of a segment in the group's buffer.
  static size_t PaddedBytes(size_t bytes);
  void LabelCollectives(const std::string& group_fqn);
  // What a gather that is not staged writes and reads. As bytes, so that every
  // dtype can be gathered; the former not over the segment's storage, because a
  // gather in flight must not keep its own group alive.
  at::Tensor WholeBytes(const Segment& segment) const;
  static at::Tensor ShardBytes(const Segment& segment);
  void FreeWhole(BufferPool& pool);
  void GatherOriginal(const Segment& segment);
  void ScatterChunks(const Segment& segment);
  // Makes the whole parameters that exist, over their storages, of the dtype
  // of the shards, or of the gathered one.
  void SetOriginal(bool original);
  // Of the whole parameters of a segment, as they are now.
  size_t WholeSize(const Segment& segment) const;
  // Issues the gathers, into buffer_.
  void IssueGathers(BufferPool& pool, const std::shared_ptr<AllGather>& custom);
  // Casts the flat shard into this rank's part of `whole`, and returns that.
  at::Tensor CastShardInto(const Segment& segment,
                           const at::Tensor& whole) const;

  std::weak_ptr<FSDPState> state_;
  MixedPrecisionPolicy policy_;
  Communicator communicator_;
  std::optional<Communicator> replicate_;
  std::optional<PostForwardShard> post_forward_;
  std::shared_ptr<AllGather> custom_all_gather_;
  std::vector<FSDPParam> params_;
  std::vector<Segment> segments_;
  size_t unsharded_bytes_ = 0;
  int64_t serial_ = 0;
  int64_t replicate_serial_ = 0;
  std::vector<int64_t> owned_bytes_;  // per rank, by Owned() without a rank
  std::function<NodePtr()> make_sink_;
  WeakNodePtr sink_{NodePtr()};  // it holds the state
  // Between Attach() and its end: what the parameters were, and their storages.
  std::vector<internal::TensorBody> originals_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> new_storages_;

  ShardedState sharded_state_ = ShardedState::kSharded;
  bool dirty_ = false;  // a shard changed since the last gather was issued
  uint64_t writes_ = 0;
  size_t without_values_ = 0;  // parameters
  bool warned_of_alias_ = false;
  bool keeps_part_ = true;
  bool original_ = false;   // since UnshardOriginal
  bool from_part_ = false;  // the gather in flight, by post_forward_
  bool keep_buffer_ = false;
  GatherBuffer buffer_;  // while not is_sharded(), or kept
  std::vector<PendingCollectivePtr> gathers_;  // while kUnsharding
};

}  // namespace composable
