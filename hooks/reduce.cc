#include "hooks/reduce.h"

#include <utility>

namespace composable {

namespace {

thread_local const FSDPStateContext* finishing = nullptr;

class Finishing {
 public:
  explicit Finishing(const FSDPStateContext& context)
      : before_(std::exchange(finishing, &context)) {}
  ~Finishing() { finishing = before_; }
  Finishing(const Finishing&) = delete;
  Finishing& operator=(const Finishing&) = delete;

 private:
  const FSDPStateContext* before_;
};

}  // namespace

bool IsFinishingReduction(const FSDPStateContext& context) {
  return finishing == &context;
}

void FinishReduction(FSDPStateContext& context) {
  FSDPState* state = std::exchange(context.reducing, nullptr);
  if (state == nullptr) return;
  const Finishing scope(context);
  state->reduction()->Finish(context.pool);
  context.Trace(TraceEvent::kReduceWait, *state);
}

void IssueReduction(FSDPStateContext& context, FSDPState& state) {
  context.reducing = &state;
  context.has_reduced = true;
  const size_t bytes = state.reduction()->Issue();
  ++context.stats.num_reductions;
  context.stats.reduced_bytes += static_cast<int64_t>(bytes);
  context.Trace(TraceEvent::kReduce, state);
}

void ReducePending(FSDPStateContext& context,
                   absl::Span<FSDPState* const> states) {
  for (FSDPState* state : states) {
    if (state == nullptr || state->group() == nullptr ||
        !state->reduction()->has_pending()) {
      continue;
    }
    FinishReduction(context);
    state->reduction()->Pack(
        std::vector<at::Tensor>(state->group()->params().size()), context.pool);
    IssueReduction(context, *state);
  }
}

std::vector<at::Tensor> ReduceNow(FSDPStateContext& context, FSDPState& state) {
  ++context.stats.num_reductions;
  context.Trace(TraceEvent::kReduce, state);
  const Finishing scope(context);
  auto gradients = state.reduction()->ReduceNow(context.pool);
  context.Trace(TraceEvent::kReduceWait, state);
  return gradients;
}

}  // namespace composable
