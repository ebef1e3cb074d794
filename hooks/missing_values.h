// Parameters that were on the meta device when they were sharded can't be used
// until they have values. See Note [Parameters without values].
//
//   composable::CheckHasValues(context->states);   // as a forward starts
#pragma once

#include "absl/types/span.h"
#include "state/fsdp_state.h"

namespace composable {

// Throws c10::ValueError that lists, in order, the parameters of `states`
// without values. Null states, and states without a group, are skipped. O(1) for
// each state where there are none.
void CheckHasValues(absl::Span<FSDPState* const> states);

}  // namespace composable
