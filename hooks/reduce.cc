#include "hooks/reduce.h"

#include <algorithm>
#include <utility>

#include "hooks/join.h"
#include "hooks/unshard.h"

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

namespace {

void FinishOldest(FSDPStateContext& context) {
  FSDPState* state = context.reducing.front();
  context.reducing.erase(context.reducing.begin());
  GradientReduction& reduction = *state->reduction();
  const bool waited = reduction.advanced();
  const bool all_reduces = reduction.all_reduces();
  const Finishing scope(context);
  reduction.Finish(context.pool);
  if (!waited) context.Trace(TraceEvent::kReduceWait, *state);
  if (all_reduces) context.Trace(TraceEvent::kAllReduceWait, *state);
}

// Starts the all-reduce of the oldest reduction that has not come so far, or
// finishes it if there is none.
void AdvanceOldest(FSDPStateContext& context) {
  const auto it = std::find_if(
      context.reducing.begin(), context.reducing.end(),
      [](FSDPState* state) { return !state->reduction()->advanced(); });
  FSDPState* state = *it;
  if (!state->reduction()->has_replicas()) {
    while (Contains(context.reducing, state)) FinishOldest(context);
    return;
  }
  size_t bytes = 0;
  try {
    bytes = state->reduction()->Advance(context.pool);
  } catch (...) {
    context.reducing.erase(it);
    throw;
  }
  context.Trace(TraceEvent::kReduceWait, *state);
  if (bytes == 0) return;
  ++context.stats.num_all_reductions;
  context.stats.all_reduced_bytes += static_cast<int64_t>(bytes);
  context.Trace(TraceEvent::kAllReduce, *state);
}

size_t Payloads(const FSDPStateContext& context) {
  return std::count_if(
      context.reducing.begin(), context.reducing.end(),
      [](FSDPState* state) { return !state->reduction()->advanced(); });
}

}  // namespace

void MakeRoomForReduction(FSDPStateContext& context, const FSDPState& next) {
  while (!context.reducing.empty() &&
         (context.reducing.front()->reduction()->advanced() ||
          Contains(context.reducing, &next))) {
    FinishOldest(context);
  }
  while (static_cast<int64_t>(Payloads(context)) >=
         context.max_reduction_payloads) {
    AdvanceOldest(context);
  }
}

void FinishReductions(FSDPStateContext& context) {
  while (Payloads(context) > 0) AdvanceOldest(context);
  while (!context.reducing.empty()) FinishOldest(context);
}

namespace {

void IssueAlone(FSDPStateContext& context, FSDPState& state) {
  context.reducing.push_back(&state);
  context.has_reduced = true;
  const size_t bytes = state.reduction()->Issue();
  ++context.stats.num_reductions;
  context.stats.reduced_bytes += static_cast<int64_t>(bytes);
  context.Trace(TraceEvent::kReduce, state);
}

// For what this rank has kept, without gradients of this backward.
void PackNothing(FSDPStateContext& context, FSDPState& state) {
  MakeRoomForReduction(context, state);
  state.reduction()->Pack(
      std::vector<at::Tensor>(state.group()->params().size()), context.pool);
}

}  // namespace

void IssueReduction(FSDPStateContext& context, FSDPState& state) {
  JoinRound round(context, JoinOp::kReduce, state.id);
  IssueAlone(context, state);
  round.Finish();
}

void ReduceForOthers(FSDPStateContext& context, FSDPState& state) {
  PackNothing(context, state);
  IssueAlone(context, state);
}

void ReducePending(FSDPStateContext& context,
                   absl::Span<FSDPState* const> states) {
  for (FSDPState* state : states) {
    if (state == nullptr || state->group() == nullptr ||
        !state->reduction()->has_pending()) {
      continue;
    }
    PackNothing(context, *state);
    IssueReduction(context, *state);
  }
}

std::vector<at::Tensor> ReduceNow(FSDPStateContext& context, FSDPState& state) {
  JoinRound round(context, JoinOp::kReduce, state.id);
  ++context.stats.num_reductions;
  context.Trace(TraceEvent::kReduce, state);
  const Finishing scope(context);
  size_t all_reduced = 0;
  auto gradients = state.reduction()->ReduceNow(context.pool, &all_reduced);
  round.Finish();
  context.Trace(TraceEvent::kReduceWait, state);
  if (all_reduced == 0) return gradients;
  ++context.stats.num_all_reductions;
  context.stats.all_reduced_bytes += static_cast<int64_t>(all_reduced);
  context.Trace(TraceEvent::kAllReduce, state);
  context.Trace(TraceEvent::kAllReduceWait, state);
  return gradients;
}

}  // namespace composable
