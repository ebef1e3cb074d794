// The handle on a sharded module that fully_shard returns.
//
//   composable::FSDPModule handle = composable::fully_shard(block);
//   handle.unshard();
//   std::cout << block->fc->weight << "\n";   // whole values
//   handle.reshard();
//
// A handle does not keep its module alive; on a module that is gone its calls
// throw c10::ValueError. Every rank must make the same calls in the same order:
// unshard() is a collective, and the others decide which collectives follow.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace composable {

class FSDPState;

class FSDPModule {
 public:
  explicit FSDPModule(std::weak_ptr<FSDPState> state)
      : state_(std::move(state)) {}

  // Gathers the whole parameters of this group, not of groups
  // below, and keeps them until reshard() or the end of the next backward.
  void unshard();

  // Frees the whole parameters of this group at once, if they are there.
  void reshard();

  // With false, backward adds up this rank's whole gradients instead of
  // reducing them, and the shards' grad() stays as it is. The first backward
  // with true reduces what has been added up too. For gradient accumulation
  // over several backwards, at the cost of whole gradients in memory. With
  // `recurse` also for all groups below. Default: true.
  void set_requires_gradient_sync(bool requires_sync, bool recurse = true);

  // Bytes of whole gradients kept by set_requires_gradient_sync(false), in this
  // group; and drops them (zero_grad() of the model does not see them).
  size_t pending_gradient_bytes() const;
  void clear_pending_gradients(bool recurse = true);

  // Call after writing to the shards of this group through a raw pointer: the
  // next use gathers them anew. Operators that write are noticed without it.
  void mark_dirty();

  // Null if the module is gone. For tests and tools.
  std::shared_ptr<FSDPState> state() const { return state_.lock(); }

 private:
  std::shared_ptr<FSDPState> Require(const char* call) const;

  std::weak_ptr<FSDPState> state_;
};

}  // namespace composable
