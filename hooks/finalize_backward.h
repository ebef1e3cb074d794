// The end of an iteration where the user says when: manual finalization.
//
//   handle.set_manual_backward_finalization(true);
//   for (auto& batch : microbatches) model->loss(batch).backward();
//   handle.finalize_backward();
//
// Note [Manual finalization]
// A backward of the tree then reduces the groups that it reaches, if they sync,
// and ends without waiting, reducing what was kept, or freeing what is left. Each
// of these is done by the finalization. Forgotten, the gradients are not those of
// the iteration: so whatever writes a shard (an operator, as in an optimizer's
// step, set_data, load_full_state_dict, a FullParameters scope with writeback)
// throws between a backward and its finalization, and so does a forward, unless no
// group has been reduced since (microbatches without sync).
//
// The context's mutex must be held.
#pragma once

#include <memory>
#include <string>

#include "state/fsdp_state.h"

namespace composable {

// Null: ended at once. Else the last reduction is in flight, and EndFinalization
// is to be called. Throws c10::ValueError if finalization is not manual, in a
// backward, or while another one is to be waited for.
std::shared_ptr<BackwardFinalization> FinalizeBackward(
    FSDPStateContext& context, bool async_op);
// Idempotent. Throws c10::ValueError if it was dropped.
void EndFinalization(FSDPStateContext& context,
                     BackwardFinalization& finalization);

// Throw c10::ValueError, that says what has begun too early.
void CheckNoOpenFinalization(const FSDPStateContext& context, const char* what);
void CheckMayBeginForward(const FSDPStateContext& context);
// Before shards of `state` are written.
void CheckMayWriteShards(const FSDPState& state, const std::string& writer);

}  // namespace composable
