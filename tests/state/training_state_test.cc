#include "state/training_state.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "state/trace.h"

namespace composable {
namespace {

TEST(TrainingStateTest, EveryValueHasItsOwnName) {
  EXPECT_STREQ(ToString(TrainingState::kIdle), "idle");
  EXPECT_STREQ(ToString(TrainingState::kForward), "forward");
  EXPECT_STREQ(ToString(TrainingState::kPreBackward), "pre-backward");
  EXPECT_STREQ(ToString(TrainingState::kPostBackward), "post-backward");
  EXPECT_STREQ(ToString(ShardedState::kSharded), "sharded");
  EXPECT_STREQ(ToString(ShardedState::kUnsharding), "unsharding");
  EXPECT_STREQ(ToString(ShardedState::kUnsharded), "unsharded");
  EXPECT_STREQ(ToString(ShardedState::kShardedPostForward),
               "sharded post-forward");
  std::set<std::string> events;
  for (size_t i = 0; i < kTreeEvents; ++i) {
    events.insert(ToString(static_cast<TreeEvent>(i)));
  }
  for (size_t i = 0; i < kGroupEvents; ++i) {
    events.insert(ToString(static_cast<GroupEvent>(i)));
  }
  EXPECT_EQ(events.size(), kTreeEvents + kGroupEvents);
}

TEST(TraceTest, EveryEventHasItsOwnName) {
  std::set<std::string> names;
  for (const auto event :
       {TraceEvent::kUnshard, TraceEvent::kUnshardWait, TraceEvent::kReshard,
        TraceEvent::kReduce, TraceEvent::kReduceWait, TraceEvent::kAllReduce,
        TraceEvent::kAllReduceWait}) {
    names.insert(ToString(event));
  }
  EXPECT_EQ(names, std::set<std::string>({"unshard", "unshard_wait", "reshard",
                                          "reduce", "reduce_wait", "all_reduce",
                                          "all_reduce_wait"}));
}

}  // namespace
}  // namespace composable
