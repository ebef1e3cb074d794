// The gathers of a segment whose gathered buffer is not its whole parameters:
// chunks that must be put together, or what extensions made of shards.
//
//   auto transfer = gather.Begin(flat_shard, pool);   // packs what is sent
//   auto pending = communicator.AllGather(transfer.output, transfer.input);
//   pending->Wait();
//   gather.CopyTo(whole_storage);                     // one pass over it
//   gather.Release(pool);
//
// The staging buffer comes from the pool, and goes back as soon as the whole
// parameters are in place.
//
// Thread-compatible: guarded by the mutex of the tree.
#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <cstdint>
#include <vector>

#include "collectives/buffer_pool.h"
#include "state/all_gather_extension.h"
#include "state/fsdp_param.h"
#include "state/shard_layout.h"

namespace composable {

class StagedGather {
 public:
  // Of `params`, which were placed by the interleaved `layout`, outlive this,
  // and have either all an extension or none. Calls extensions on `flat_shard`.
  // Chunks are cast to `gathered` before they are sent.
  StagedGather(std::vector<const FSDPParam*> params, ShardLayout layout,
               const at::Tensor& flat_shard, int rank,
               c10::ScalarType gathered);

  // What the all-gather writes.
  int64_t gathered_bytes() const { return chunk_bytes_ * layout_.world_size(); }
  // Of what each rank sends; the same on every rank.
  uint64_t fingerprint() const;

  struct Transfer {
    at::Tensor output;
    at::Tensor input;
  };
  // Throws c10::ValueError, naming the parameter, if an extension gives other
  // sizes than before.
  Transfer Begin(const at::Tensor& flat_shard, BufferPool& pool);
  void CopyTo(const c10::intrusive_ptr<c10::StorageImpl>& whole);
  // Gives the staging buffer back, if there is one.
  void Release(BufferPool& pool);

 private:
  struct Wire {      // one tensor of one parameter
    int64_t offset;  // bytes, in a rank's part
    c10::ScalarType dtype;
    std::vector<int64_t> sizes;
  };
  struct Extended {
    std::vector<Wire> wires;
    std::any metadata;
  };
  AllGatherContext ContextOf(const FSDPParam& param) const;
  AllGatherInputs CallPre(const FSDPParam& param,
                          const at::Tensor& flat_shard) const;
  at::Tensor Staged(int64_t offset, int64_t bytes) const;
  bool is_extended() const { return !extended_.empty(); }

  std::vector<const FSDPParam*> params_;
  ShardLayout layout_;
  c10::ScalarType dtype_;     // of the shards
  c10::ScalarType gathered_;  // of the whole parameters
  int rank_;
  int64_t chunk_bytes_ = 0;         // that a rank sends
  std::vector<Extended> extended_;  // per parameter
  BufferPool::Buffer* buffer_ = nullptr;
};

}  // namespace composable
