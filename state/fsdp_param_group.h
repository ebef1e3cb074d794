// The parameters that are gathered and reduced together.
//
// Parameters of one dtype, trainable or frozen when they were sharded, form a
// segment; a group is usually one segment. Each segment has a flat shard (this
// rank's part, always there), an unsharded storage that all its parameters are
// views of, and a layout that makes the ranks' flat shards, one after the
// other, equal to the unsharded buffer. So unsharding is: point the storage to
// a buffer, all-gather into it. Resharding is: take the buffer away. Neither
// copies, and neither costs work per parameter.
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
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/buffer_pool.h"
#include "collectives/communicator.h"
#include "state/compatibility.h"
#include "state/fsdp_param.h"
#include "state/shard_layout.h"
#include "state/tensor_access.h"
#include "state/training_state.h"

namespace composable {

class FSDPState;

class FSDPParamGroup {
 public:
  struct Segment {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    bool trainable = true;  // when it was sharded
    std::vector<int> params;
    ShardLayout layout =
        ShardLayout::Plan({}, {.world_size = 1, .itemsize = 1});
    at::Tensor flat_shard;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{
        c10::intrusive_ptr<c10::StorageImpl>()};
    size_t buffer_offset = 0;  // of this segment in the group's buffer
    CollectiveLabelPtr label;  // of its collectives
  };

  // Copies this rank's rows. Every rank must pass equal parameters. Needs the
  // memory of this rank's shards on top of the parameters.
  FSDPParamGroup(const std::vector<OwnedParam>& owned,
                 Communicator communicator);
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

  // kSharded -> kUnsharding. A later gather replaces the values of an earlier
  // one, so a group that is stale is resharded first.
  void IssueUnshard(BufferPool& pool);
  // kUnsharding -> kUnsharded. If the gather failed: -> kSharded, and throws.
  void WaitUnshard(BufferPool& pool);
  // Any -> kSharded; waits for a gather in flight.
  void Reshard(BufferPool& pool);
  // kSharded -> kUnsharded, with memory of unspecified contents.
  void UnshardWithoutGather(BufferPool& pool);

  // Gives flat shards that have none memory, zeroed.
  void AllocateShards();
  // Whether parameter `index` has values. See Note [Parameters without values].
  void SetHasValues(int index, bool has_values);
  bool has_all_values() const { return without_values_ == 0; }

  // While kUnsharded: makes this rank's rows of parameter `index` those of the
  // whole, which is not stale by that.
  void WriteBack(int index);
  // (collective) While kUnsharded: the flat shards become the parts of rank 0's
  // whole parameters.
  void ScatterWhole();

  ShardedState sharded_state() const { return sharded_state_; }
  bool is_sharded() const { return sharded_state_ == ShardedState::kSharded; }

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

  // Follows what the user last asked of parameter `index` with
  // requires_grad_() on its shard. True if that changed.
  bool SyncGradientEdge(int index);
  // Whether a backward can bring gradients for any parameter.
  bool has_gradient_edges() const;

  // What errors call the parameters: `group_fqn` is empty until the tree is
  // known.
  void SetNames(const std::string& group_fqn);

  // The whole value of `param`, which is one of params(), while kUnsharded: a
  // plain view of the gathered memory.
  at::Tensor GatheredValue(const FSDPParam& param) const;

  // Throws c10::ValueError, naming the parameter, if a shard no longer points
  // into its flat shard, or a member that still exists is not the whole
  // parameter any more.
  void CheckParams() const;

  // The parameter that a view of the unsharded storage, or of the flat shard,
  // belongs to.
  int FindParam(int segment, int64_t storage_offset) const;
  int FindShard(int segment, int64_t storage_offset) const;

  const std::vector<FSDPParam>& params() const { return params_; }
  std::vector<FSDPParam>& params() { return params_; }
  const std::vector<Segment>& segments() const { return segments_; }
  Communicator& communicator() { return communicator_; }
  size_t unsharded_bytes() const { return unsharded_bytes_; }
  size_t sharded_bytes() const;

 private:
  void BuildSegments();
  at::Tensor MakeFlatShard(const Segment& segment, int64_t places) const;
  void MakeShard(FSDPParam& param, const Segment& segment);
  void TakeOver();
  NodePtr Sink();
  void LabelCollectives(const std::string& group_fqn);
  // What a gather writes and reads. As bytes, so that every dtype can be
  // gathered; the former not over the segment's storage, because a gather in
  // flight must not keep its own group alive.
  at::Tensor WholeBytes(const Segment& segment) const;
  static at::Tensor ShardBytes(const Segment& segment);

  Communicator communicator_;
  std::vector<FSDPParam> params_;
  std::vector<Segment> segments_;
  size_t unsharded_bytes_ = 0;
  int64_t serial_ = 0;
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
  BufferPool::Buffer* buffer_ = nullptr;       // while not kSharded
  std::vector<PendingCollectivePtr> gathers_;  // while kUnsharding
};

}  // namespace composable
