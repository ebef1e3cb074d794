#include "hooks/join.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "hooks/reduce.h"
#include "hooks/unshard.h"

namespace composable {
namespace {

int64_t Encode(JoinOp op, int id) {
  return (static_cast<int64_t>(op) << 32) | id;
}
JoinOp OpOf(int64_t code) { return static_cast<JoinOp>(code >> 32); }
bool IsEnd(int64_t code) { return OpOf(code) >= JoinOp::kEndForward; }

// The one that all groups of the tree share; null if there is no group.
Communicator* CommunicatorOf(const FSDPStateContext& context) {
  for (const FSDPState* state : context.states) {
    if (state != nullptr && state->group() != nullptr) {
      return &state->group()->communicator();
    }
  }
  return nullptr;
}

// What every rank says, by rank.
std::vector<int64_t> Exchange(Communicator& communicator, int64_t mine) {
  static const auto* label =
      new CollectiveLabelPtr(MakeCollectiveLabel("the ranks' next steps"));
  const at::Tensor input = at::full({1}, mine, at::kLong);
  const at::Tensor all = at::empty({communicator.size()}, at::kLong);
  communicator.AllGather(all, input, *label)->Wait();
  const auto* said = all.const_data_ptr<int64_t>();
  return {said, said + all.numel()};
}

void TakePart(FSDPStateContext& context, int64_t code) {
  FSDPState* state = context.states[static_cast<size_t>(code & 0xffffffff)];
  TORCH_INTERNAL_ASSERT(state != nullptr && state->group() != nullptr);
  if (OpOf(code) == JoinOp::kGather) {
    GatherForOthers(context, *state);
  } else {
    ReduceForOthers(context, *state);
  }
}

const char* PassOf(int64_t end) {
  switch (OpOf(end)) {
    case JoinOp::kEndForward:
      return "forward";
    case JoinOp::kEndBackward:
      return "backward";
    default:
      return "call such as unshard(), finalize_backward() or full_state_dict()";
  }
}

void CheckSameEnd(const std::vector<int64_t>& said) {
  const auto different =
      std::adjacent_find(said.begin(), said.end(), std::not_equal_to<>());
  if (different == said.end()) return;
  C10_THROW_ERROR(
      DistError,
      c10::str("Ranks with rank-dependent graphs end different passes: rank ",
               different - said.begin(), " a ", PassOf(*different), ", rank ",
               different - said.begin() + 1, " a ", PassOf(different[1]),
               ". Run equally many forwards of the root, and equally many "
               "backwards, on every rank."));
}

}  // namespace

JoinRound::JoinRound(FSDPStateContext& context, JoinOp op, int id)
    : context_(context) {
  Communicator* communicator =
      context.options.rank_dependent() ? CommunicatorOf(context) : nullptr;
  if (communicator == nullptr || communicator->size() == 1) return;
  const int64_t mine = Encode(op, id);
  auto said = Exchange(*communicator, mine);
  all_end_ = std::all_of(said.begin(), said.end(), IsEnd);
  if (all_end_) CheckSameEnd(said);
  std::sort(said.begin(), said.end());
  said.erase(std::unique(said.begin(), said.end()), said.end());
  for (const int64_t code : said) {
    if (code == mine || IsEnd(code)) continue;
    if (code < mine) {
      TakePart(context, code);
    } else {
      after_.push_back(code);
    }
  }
}

void JoinRound::Finish() {
  for (const int64_t code : after_) TakePart(context_, code);
}

void JoinEnd(FSDPStateContext& context, JoinOp end) {
  while (true) {
    JoinRound round(context, end, 0);
    round.Finish();
    if (round.all_end()) return;
  }
}

void JoinCall(FSDPStateContext& context) {
  if (context.open_scopes > 0 || context.is_in_backward()) return;
  JoinEnd(context, JoinOp::kEndCall);
}

}  // namespace composable
