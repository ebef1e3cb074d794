#include "state/pass_order.h"

#include <gtest/gtest.h>

#include <vector>

namespace composable {
namespace {

void RecordAll(PassOrder& order, const std::vector<int>& groups) {
  order.Begin();
  for (const int group : groups) order.Record(group);
  order.Commit();
  order.Begin();
}

std::vector<int> Followed(const PassOrder& order) {
  std::vector<int> groups;
  for (size_t i = 0; i < order.size(); ++i) groups.push_back(order.at(i));
  return groups;
}

// What prefetch walks over.
std::vector<int> Rest(const PassOrder& order) {
  std::vector<int> groups;
  for (size_t i = order.next_position(); i < order.size(); ++i) {
    groups.push_back(order.at(i));
  }
  return groups;
}

using Groups = std::vector<int>;

TEST(PassOrderTest, NothingIsFollowedBeforeTheFirstCommit) {
  PassOrder order;
  order.Begin();
  order.Record(0);
  EXPECT_TRUE(order.empty());
  EXPECT_FALSE(order.Advance(0));
  EXPECT_EQ(order.NextUse(0), PassOrder::kNever);
  EXPECT_EQ(Rest(order), Groups());
  order.Commit();
  EXPECT_FALSE(order.empty());
}

TEST(PassOrderTest, KeepsRepeatsButNotTheSameGroupTwiceInARow) {
  PassOrder order;
  RecordAll(order, {0, 1, 1, 1, 0, 2, 0, 0});
  EXPECT_EQ(Followed(order), Groups({0, 1, 0, 2, 0}));
}

TEST(PassOrderTest, AdvanceMovesToTheNextUse) {
  PassOrder order;
  RecordAll(order, {0, 1, 0, 2, 0});
  EXPECT_EQ(Rest(order), Groups({0, 1, 0, 2, 0}));
  EXPECT_TRUE(order.Advance(0));
  EXPECT_EQ(Rest(order), Groups({1, 0, 2, 0}));
  EXPECT_EQ(order.NextUse(0), 2u);
  EXPECT_EQ(order.NextUse(1), 1u);
  EXPECT_EQ(order.NextUse(2), 3u);
  EXPECT_TRUE(order.Advance(1));
  EXPECT_EQ(order.NextUse(1), PassOrder::kNever);
  EXPECT_TRUE(order.Advance(0));
  EXPECT_EQ(Rest(order), Groups({2, 0}));
  EXPECT_EQ(order.NextUse(0), 4u);
}

TEST(PassOrderTest, SkippedUsesAreBehind) {
  PassOrder order;
  RecordAll(order, {0, 1, 2, 3});
  order.Advance(0);
  EXPECT_TRUE(order.Advance(2));
  EXPECT_EQ(Rest(order), Groups({3}));
  EXPECT_EQ(order.NextUse(1), PassOrder::kNever);
}

TEST(PassOrderTest, ASecondRoundOfTheSamePassWraps) {
  PassOrder order;
  RecordAll(order, {0, 1, 2});
  for (int round = 0; round < 3; ++round) {
    for (int group = 0; group < 3; ++group) {
      EXPECT_TRUE(order.Advance(group));
      EXPECT_EQ(order.next_position(), static_cast<size_t>(group) + 1);
    }
  }
  // One that is behind only: back to it.
  EXPECT_TRUE(order.Advance(1));
  EXPECT_EQ(Rest(order), Groups({2}));
}

TEST(PassOrderTest, LeavingTheOrderAndComingBack) {
  PassOrder order;
  RecordAll(order, {0, 1, 2, 3});
  order.Advance(1);
  EXPECT_FALSE(order.Advance(7));
  EXPECT_EQ(Rest(order), Groups());
  EXPECT_EQ(order.NextUse(2), PassOrder::kNever);
  EXPECT_TRUE(order.Advance(2));
  EXPECT_EQ(Rest(order), Groups({3}));
}

TEST(PassOrderTest, BeginStartsAnew) {
  PassOrder order;
  RecordAll(order, {0, 1});
  order.Advance(1);
  order.Advance(9);
  order.Record(5);
  order.Begin();
  EXPECT_EQ(Rest(order), Groups({0, 1}));
  order.Record(1);
  order.Commit();
  EXPECT_EQ(Followed(order), Groups({1}));  // 5 was forgotten
}

TEST(PassOrderTest, APassThatRecordedNothingChangesNothing) {
  PassOrder order;
  RecordAll(order, {0, 1});
  order.Begin();
  order.Commit();
  EXPECT_EQ(Followed(order), Groups({0, 1}));
}

TEST(PassOrderTest, CommitReplacesTheOrder) {
  PassOrder order;
  RecordAll(order, {0, 1, 2});
  RecordAll(order, {2, 0});
  EXPECT_EQ(Followed(order), Groups({2, 0}));
  order.Commit();  // a second one has nothing to add
  EXPECT_EQ(Followed(order), Groups({2, 0}));
}

TEST(PassOrderTest, TheFirstBackwardIsSeededOnce) {
  PassOrder forward;
  RecordAll(forward, {0, 1, 2, 0});
  PassOrder backward;
  backward.SeedWithReverseOf(forward);
  EXPECT_EQ(Followed(backward), Groups({0, 2, 1, 0}));
  RecordAll(backward, {0, 2});
  backward.SeedWithReverseOf(forward);
  EXPECT_EQ(Followed(backward), Groups({0, 2}));  // has one of its own
  backward.Clear();
  EXPECT_TRUE(backward.empty());
  EXPECT_FALSE(backward.Advance(0));
  backward.SeedWithReverseOf(forward);
  EXPECT_EQ(Followed(backward), Groups({0, 2, 1, 0}));
}

}  // namespace
}  // namespace composable
