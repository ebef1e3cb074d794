// Ranks whose graphs differ take part in each other's collectives.
//
//   composable::JoinRound round(context, composable::JoinOp::kGather, state.id);
//   state.group()->IssueUnshard(context.pool);   // this rank's own
//   round.Finish();
//
// Note [Joining]
// With FullyShardOptions::rank_dependent, no collective of a tree is issued
// before all ranks know of it. A rank that is about to issue one says so in a
// round, a gather of one number from each rank, and so does a rank that has
// reached the end of the root's forward, or of the backward. All ranks then run
// what was said, each thing once, in one order. For a gather that it does not
// need a rank gives its shard, and keeps the result as something gathered ahead,
// evictable at once; to a reduction without gradients of its own it gives zeros,
// and gets the rows of its shard. An end ends when all ranks have said it in one
// round, so ranks enter and leave a pass together, and so they do a call outside
// of one that may gather or reduce (unshard(), full_state_dict and others): what
// is still gathered, or pending, may differ from rank to rank. Nothing depends on an order of
// groups that ranks would have to agree on before, and one communicator is
// enough, since all of them issue the same sequence.
//
// The price is one small gather for each collective, and that ranks meet there,
// so nothing is gathered ahead on a guess.
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "state/fsdp_state.h"

namespace composable {

enum class JoinOp : uint8_t {
  kGather,
  kReduce,
  kEndForward,
  kEndBackward,
  kEndCall,
};

// One round. If the tree does not join, does nothing.
class JoinRound {
 public:
  // Says that this rank is about to run `op` of state `id` (0 for an end), and
  // runs what comes before it. Throws c10::DistError if the ranks end different
  // passes.
  JoinRound(FSDPStateContext& context, JoinOp op, int id);
  // Runs what comes after it. Call it when this rank's own was issued.
  void Finish();
  // For an end: whether all ranks have said it.
  bool all_end() const { return all_end_; }

 private:
  FSDPStateContext& context_;
  absl::InlinedVector<int64_t, 4> after_;
  bool all_end_ = true;
};

// Takes part in what other ranks do, until all have reached this end. The
// context's mutex must be held.
void JoinEnd(FSDPStateContext& context, JoinOp end);

// The end of a call that all ranks make outside of forwards and backwards, after
// it has issued what it needs. Does nothing inside of one.
void JoinCall(FSDPStateContext& context);

}  // namespace composable
