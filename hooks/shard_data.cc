#include "hooks/shard_data.h"

#include <c10/util/Exception.h>

#include <mutex>

#include "hooks/full_parameter_scope.h"
#include "hooks/root_pre_forward.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

constexpr char kConversion[] = "A change of the dtype of sharded parameters";

// Ends what the tree of `state` keeps in the old dtypes.
void PrepareConversion(FSDPState& state) {
  TORCH_CHECK_VALUE(!state.reduction()->keeps_any(), kConversion,
                    " came while gradients of the group of '",
                    state.group()->params().front().fqn,
                    "' are pending. Call synchronize_gradients(), or "
                    "clear_pending_gradients(), on the handle first.");
  const auto context = state.tree();
  if (context == nullptr) return;
  const std::lock_guard<std::recursive_mutex> lock(context->mutex);
  CheckBetweenPasses(*context, state, kConversion);
  TORCH_CHECK_VALUE(context->full_parameter_scopes == 0, kConversion,
                    " came in a composable::FullParameters scope, which holds "
                    "them. Close it first.");
  ResetTree(context);
}

}  // namespace

void GiveShardData(const std::shared_ptr<FSDPState>& state, int index,
                   const at::Tensor& data) {
  FSDPParamGroup& group = *state->group();
  const FSDPParam& param = group.params()[index];
  if (group.stands_alone(index) ||
      data.scalar_type() != param.dtypes().original) {
    PrepareConversion(*state);
    group.ConvertShard(index, data);
    return;
  }
  const auto lock = state->LockTree();
  group.SetShardData(index, data);
}

}  // namespace composable
