// In which order groups are gathered, freed and reduced, and between which
// operators: written expectations, event by event. Nothing here depends on
// time: the communicator finishes what is waited for, and logs it.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/composable/traced_blocks.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

#define EXPECT_EVENTS(actual, ...) \
  EXPECT_EQ(OnePerLine(actual), OnePerLine(Events{__VA_ARGS__}))

// How often each event occurs.
std::map<std::string, int> Count(const Events& events) {
  std::map<std::string, int> counts;
  for (const auto& event : events) ++counts[event];
  return counts;
}

int CountGathers(const Events& events) {
  int count = 0;
  for (const auto& event : events) count += event.rfind("gather ", 0) == 0;
  return count;
}

TEST(TracedBlocks, Example) {
  // example-begin tests/composable/traced_blocks.h
  TracedModel model(3);
  model.Backward();
  model.log.Take();  // {"forward root.embed", "gather root", ...}
  // example-end
}

// Parts of golden logs that several of them share.

const Events kFirstForwardOf3 = {
    "forward root.embed, gather root, wait gather root",
    "forward b0.up, gather b0, wait gather b0, forward b0.down",
    "forward b1.up, gather b1, wait gather b1, forward b1.down",
    // Two slots: b0, used longest ago, makes room.
    "forward b2.up, free b0, gather b2, wait gather b2, forward b2.down",
    "forward root.head",
};
// From the second iteration on, one group ahead.
const Events kForwardOf3 = {
    "forward root.embed, gather root, gather b0, wait gather root",
    "forward b0.up, gather b1, wait gather b0, forward b0.down",
    "forward b1.up, free b0, gather b2, wait gather b1, forward b1.down",
    "forward b2.up, wait gather b2, forward b2.down",
    "forward root.head",
};
// The last two blocks are still there. The gather of b0 is issued before the
// operators of b1 and waited for after them; a reduction is waited for when the
// next one needs its buffer.
const Events kBackwardOf3 = {
    "backward root.head",
    "backward b2.down, backward b2.up, free b2, reduce b2",
    "backward b1.down, gather b0, backward b1.up",
    "wait reduce b2, free b1, reduce b1",
    "backward b0.down, wait gather b0, backward b0.up",
    "wait reduce b1, free b0, reduce b0",
    "backward root.embed, wait reduce b0, free root, reduce root",
    "wait reduce root",
};

Events Concat(const Events& a, const Events& b) {
  Events both = a;
  both.insert(both.end(), b.begin(), b.end());
  return both;
}

TEST(OrderTest, ThreeBlocks) {
  TracedModel t(3);
  EXPECT_EQ(OnePerLine(t.Iterate()),
            OnePerLine(Concat(kFirstForwardOf3, kBackwardOf3)));
  for (int iteration = 2; iteration <= 4; ++iteration) {
    const Events events = t.Iterate();
    EXPECT_EQ(OnePerLine(events), OnePerLine(Concat(kForwardOf3, kBackwardOf3)))
        << "iteration " << iteration;
    // PyTorch's fully_shard gathers each block in forward and in backward.
    EXPECT_EQ(CountGathers(events), 5);
  }
  EXPECT_EQ(t.stats().peak_gathers_in_flight, 2);
  EXPECT_EQ(t.stats().gathers_in_flight, 0);
  EXPECT_EQ(t.stats().unsharded_param_bytes, 0);
}

TEST(OrderTest, FiveBlocks) {
  TracedModel t(5);
  const Events backward = {
      "backward root.head",
      "backward b4.down, backward b4.up, free b4, reduce b4",
      "backward b3.down, gather b2, backward b3.up",
      "wait reduce b4, free b3, reduce b3",
      "backward b2.down, gather b1, wait gather b2, backward b2.up",
      "wait reduce b3, free b2, reduce b2",
      "backward b1.down, gather b0, wait gather b1, backward b1.up",
      "wait reduce b2, free b1, reduce b1",
      "backward b0.down, wait gather b0, backward b0.up",
      "wait reduce b1, free b0, reduce b0",
      "backward root.embed, wait reduce b0, free root, reduce root",
      "wait reduce root",
  };
  const Events first_forward = {
      "forward root.embed, gather root, wait gather root",
      "forward b0.up, gather b0, wait gather b0, forward b0.down",
      "forward b1.up, gather b1, wait gather b1, forward b1.down",
      "forward b2.up, free b0, gather b2, wait gather b2, forward b2.down",
      "forward b3.up, free b1, gather b3, wait gather b3, forward b3.down",
      "forward b4.up, free b2, gather b4, wait gather b4, forward b4.down",
      "forward root.head",
  };
  const Events forward = {
      "forward root.embed, gather root, gather b0, wait gather root",
      "forward b0.up, gather b1, wait gather b0, forward b0.down",
      "forward b1.up, free b0, gather b2, wait gather b1, forward b1.down",
      "forward b2.up, free b1, gather b3, wait gather b2, forward b2.down",
      "forward b3.up, free b2, gather b4, wait gather b3, forward b3.down",
      "forward b4.up, wait gather b4, forward b4.down",
      "forward root.head",
  };
  EXPECT_EQ(OnePerLine(t.Iterate()),
            OnePerLine(Concat(first_forward, backward)));
  EXPECT_EQ(OnePerLine(t.Iterate()), OnePerLine(Concat(forward, backward)));
  EXPECT_EQ(t.stats().peak_gathers_in_flight, 2);
}

// Real ranks decide alike: each follows the expectation of the one rank above.
TEST(OrderTest, RanksOverGloo) {
  RunRanks(3, [](RankContext& rank) {
    EventLog log;
    auto model = RankContext::Seeded(1, [&] { return Blocks(log, 3); });
    for (auto& block : model->blocks) fully_shard(block, rank.options());
    fully_shard(model, rank.options());
    set_trace_observer(model, [&](TraceEvent event, const std::string& fqn) {
      const std::map<TraceEvent, std::string> words = {
          {TraceEvent::kUnshard, "gather "},
          {TraceEvent::kUnshardWait, "wait gather "},
          {TraceEvent::kReshard, "free "},
          {TraceEvent::kReduce, "reduce "},
          {TraceEvent::kReduceWait, "wait reduce "}};
      log.Add(words.at(event) + (fqn.empty() ? "root" : fqn));
    });
    const at::Tensor tokens = at::arange(6).view({2, 3});
    for (int iteration = 1; iteration <= 3; ++iteration) {
      model(tokens).sum().backward();
      EXPECT_EQ(
          OnePerLine(log.Take()),
          OnePerLine(Concat(iteration == 1 ? kFirstForwardOf3 : kForwardOf3,
                            kBackwardOf3)))
          << "rank " << rank.rank << ", iteration " << iteration;
    }
  });
}

TEST(OrderTest, BackwardPrefetchPostGathersBetweenTheOperatorsOfTwoGroups) {
  TracedModel t(3, FullyShardOptions().backward_prefetch(
                       BackwardPrefetch::kBackwardPost));
  const Events backward = {
      "backward root.head",
      "backward b2.down, backward b2.up, free b2, reduce b2",
      "backward b1.down, backward b1.up",
      "wait reduce b2, free b1, reduce b1, gather b0",
      "backward b0.down, wait gather b0, backward b0.up",
      "wait reduce b1, free b0, reduce b0",
      "backward root.embed, wait reduce b0, free root, reduce root",
      "wait reduce root",
  };
  EXPECT_EQ(OnePerLine(t.Iterate()),
            OnePerLine(Concat(kFirstForwardOf3, backward)));
  EXPECT_EQ(OnePerLine(t.Iterate()), OnePerLine(Concat(kForwardOf3, backward)));
}

TEST(OrderTest, BackwardPrefetchNoneGathersWhenRead) {
  TracedModel t(3,
                FullyShardOptions().backward_prefetch(BackwardPrefetch::kNone));
  const Events backward = {
      "backward root.head",
      "backward b2.down, backward b2.up, free b2, reduce b2",
      "backward b1.down, backward b1.up, wait reduce b2, free b1, reduce b1",
      "backward b0.down, gather b0, wait gather b0, backward b0.up",
      "wait reduce b1, free b0, reduce b0",
      "backward root.embed, wait reduce b0, free root, reduce root",
      "wait reduce root",
  };
  EXPECT_EQ(OnePerLine(t.Iterate()),
            OnePerLine(Concat(kFirstForwardOf3, backward)));
  EXPECT_EQ(OnePerLine(t.Iterate()), OnePerLine(Concat(kForwardOf3, backward)));
  EXPECT_EQ(t.stats().peak_gathers_in_flight, 2);  // forward prefetch is on
}

TEST(OrderTest, WithoutForwardPrefetchEveryForwardIsAsTheFirst) {
  TracedModel t(3, FullyShardOptions().forward_prefetch(false));
  for (int iteration = 1; iteration <= 3; ++iteration) {
    EXPECT_EQ(OnePerLine(t.Iterate()),
              OnePerLine(Concat(kFirstForwardOf3, kBackwardOf3)))
        << "iteration " << iteration;
  }
}

TEST(OrderTest, WithoutAnyPrefetchOneGatherIsInFlight) {
  TracedModel t(3,
                FullyShardOptions().forward_prefetch(false).backward_prefetch(
                    BackwardPrefetch::kNone));
  t.Iterate();
  t.Iterate();
  EXPECT_EQ(t.stats().peak_gathers_in_flight, 1);
}

TEST(OrderTest, BlocksThatStayAreNotGatheredInBackward) {
  TracedModel t(3, {}, FullyShardOptions().reshard_after_forward(false));
  const Events backward = {
      "backward root.head",
      "backward b2.down, backward b2.up, free b2, reduce b2",
      "backward b1.down, backward b1.up, wait reduce b2, free b1, reduce b1",
      "backward b0.down, backward b0.up, wait reduce b1, free b0, reduce b0",
      "backward root.embed, wait reduce b0, free root, reduce root",
      "wait reduce root",
  };
  const Events first_forward = {
      "forward root.embed, gather root, wait gather root",
      "forward b0.up, gather b0, wait gather b0, forward b0.down",
      "forward b1.up, gather b1, wait gather b1, forward b1.down",
      "forward b2.up, gather b2, wait gather b2, forward b2.down",
      "forward root.head",
  };
  const Events forward = {
      "forward root.embed, gather root, gather b0, wait gather root",
      "forward b0.up, gather b1, wait gather b0, forward b0.down",
      "forward b1.up, gather b2, wait gather b1, forward b1.down",
      "forward b2.up, wait gather b2, forward b2.down",
      "forward root.head",
  };
  EXPECT_EQ(OnePerLine(t.Iterate()),
            OnePerLine(Concat(first_forward, backward)));
  EXPECT_EQ(OnePerLine(t.Iterate()), OnePerLine(Concat(forward, backward)));
}

TEST(OrderTest, RootThatIsFreedCountsAgainstTheSlots) {
  TracedModel t(3, FullyShardOptions().reshard_after_forward(true));
  EXPECT_EVENTS(
      t.Iterate(),
      // The root is above every block, so it is not left while they run: the
      // blocks share the other slot.
      "forward root.embed, gather root, wait gather root",
      "forward b0.up, gather b0, wait gather b0, forward b0.down",
      "forward b1.up, free b0, gather b1, wait gather b1, forward b1.down",
      "forward b2.up, free b1, gather b2, wait gather b2, forward b2.down",
      "forward root.head", "backward root.head",
      "backward b2.down, backward b2.up, free b2, reduce b2",
      "backward b1.down, gather b1, wait gather b1, backward b1.up",
      "wait reduce b2, free b1, reduce b1",
      "backward b0.down, gather b0, wait gather b0, backward b0.up",
      "wait reduce b1, free b0, reduce b0",
      "backward root.embed, wait reduce b0, free root, reduce root",
      "wait reduce root");
}

TEST(OrderTest, EvaluationBetweenIterations) {
  TracedModel t(3);
  t.Iterate();
  {
    const at::NoGradGuard no_grad;
    t.Forward();
    EXPECT_EQ(OnePerLine(t.log.Take()), OnePerLine(kForwardOf3));
    // What the first evaluation left is fresh, and used. The root was read last
    // and is read first: nothing tells that a pass begins, so b0 is not
    // gathered ahead.
    t.Forward();
    EXPECT_EVENTS(
        t.log.Take(), "forward root.embed",
        "forward b0.up, free b2, gather b0, wait gather b0", "forward b0.down",
        "forward b1.up, free b0, gather b2, forward b1.down",
        "forward b2.up, wait gather b2, forward b2.down", "forward root.head");
  }
  // Evaluations are no part of the order that a training forward follows.
  EXPECT_EQ(
      OnePerLine(t.Iterate()),
      OnePerLine(Concat({"forward root.embed, free b2, gather b0",
                         "forward b0.up, wait gather b0, forward b0.down",
                         "forward b1.up, free b0, gather b2, forward b1.down",
                         "forward b2.up, wait gather b2, forward b2.down",
                         "forward root.head"},
                        kBackwardOf3)));
  EXPECT_EQ(OnePerLine(t.Iterate()),
            OnePerLine(Concat(kForwardOf3, kBackwardOf3)));
}

TEST(OrderTest, StepAfterAnEvaluationMakesItsGathersStale) {
  TracedModel t(3);
  t.Iterate();
  {
    const at::NoGradGuard no_grad;
    t.Forward();
    t.log.Take();
    for (auto& parameter : t.model->parameters()) parameter.add_(1);
  }
  EXPECT_EQ(Count(t.Iterate())["gather b2"], 1);
}

TEST(OrderTest, TwoForwardsThenOneBackward) {
  TracedModel t(3);
  const auto run = [&] {
    const at::Tensor first = t.Forward().sum();
    (first + t.Forward().sum()).backward();
    return t.log.Take();
  };
  // Each group is reduced once, when both uses have brought their gradients, so
  // it stays from its first use in backward to its last.
  const Events backward = {
      "backward root.head, backward b2.down, backward b2.up",
      "backward b1.down, backward b1.up",
      "backward b0.down, gather b0, wait gather b0, backward b0.up",
      "backward root.embed",
      "backward root.head",
      "backward b2.down, backward b2.up, free b2, reduce b2",
      "backward b1.down, backward b1.up, wait reduce b2, free b1, reduce b1",
      "backward b0.down, backward b0.up, wait reduce b1, free b0, reduce b0",
      "backward root.embed, wait reduce b0, free root, reduce root",
      "wait reduce root",
  };
  const Events second_forward = {
      "forward root.embed",
      // Nothing is known yet about what comes next.
      "forward b0.up, free b1, gather b0, wait gather b0, forward b0.down",
      "forward b1.up, free b2, gather b1, wait gather b1, forward b1.down",
      "forward b2.up, free b0, gather b2, wait gather b2, forward b2.down",
      "forward root.head",
  };
  EXPECT_EQ(
      OnePerLine(run()),
      OnePerLine(Concat(Concat(kFirstForwardOf3, second_forward), backward)));
  const Events both_forwards = {
      "forward root.embed, gather root, gather b0, wait gather root",
      "forward b0.up, gather b1, wait gather b0, forward b0.down",
      "forward b1.up, free b0, gather b2, wait gather b1, forward b1.down",
      "forward b2.up, wait gather b2, forward b2.down",
      // Now it is known: b2, needed last in the second forward, makes room.
      "forward root.head, free b2, gather b0",
      "forward root.embed",
      "forward b0.up, wait gather b0, forward b0.down",
      "forward b1.up, free b0, gather b2, forward b1.down",
      "forward b2.up, wait gather b2, forward b2.down",
      "forward root.head",
  };
  for (int iteration = 2; iteration <= 3; ++iteration) {
    EXPECT_EQ(OnePerLine(run()), OnePerLine(Concat(both_forwards, backward)))
        << "iteration " << iteration;
  }
}

TEST(OrderTest, GradientsThatAreKeptAreNotReduced) {
  TracedModel t(3);
  t.Iterate();
  t.handles.back().set_requires_gradient_sync(false);
  const Events kept = t.Iterate();
  t.handles.back().set_requires_gradient_sync(true);
  const Events synced = t.Iterate();
  for (const char* name : {"root", "b0", "b1", "b2"}) {
    EXPECT_EQ(Count(kept)[std::string("reduce ") + name], 0);
    EXPECT_EQ(Count(kept)[std::string("free ") + name],
              Count(synced)[std::string("free ") + name]);
    EXPECT_EQ(Count(synced)[std::string("reduce ") + name], 1);
  }
  EXPECT_EQ(CountGathers(kept), 5);
}

TEST(OrderTest, LimitOfGathersInFlight) {
  for (const int64_t limit : {1, 2, 3, 4}) {
    TracedModel t(6, FullyShardOptions().limit_all_gathers(limit));
    for (int i = 0; i < 3; ++i) t.Iterate();
    EXPECT_LE(t.stats().peak_gathers_in_flight, limit) << limit;
    EXPECT_GE(t.stats().peak_gathers_in_flight, limit == 4 ? 3 : limit);
  }
}

TEST(OrderTest, ResidentBlocksNeverExceedTheLimit) {
  for (const int64_t limit : {1, 2, 3, 4}) {
    TracedModel t(6, FullyShardOptions().limit_all_gathers(limit));
    int64_t resident = 0;
    int64_t most = 0;
    for (int i = 0; i < 3; ++i) {
      for (const auto& event : t.Iterate()) {
        if (event.rfind("gather b", 0) == 0) ++resident;
        if (event.rfind("free b", 0) == 0) --resident;
        most = std::max(most, resident);
      }
    }
    EXPECT_EQ(resident, 0);
    EXPECT_EQ(most, limit);
  }
}

// A net whose forward the test writes, without embedding: its input needs no
// gradient.
struct PiecesImpl : torch::nn::Module {
  PiecesImpl(EventLog& log, int count) {
    for (int i = 0; i < count; ++i) {
      const std::string name = "b" + std::to_string(i);
      pieces.push_back(register_module(name, Block(log, name, 4)));
    }
  }
  std::vector<Block> pieces;
};
TORCH_MODULE(Pieces);

struct TracedPieces : TracedRank {
  explicit TracedPieces(int count, FullyShardOptions root = {})
      : model(log, count) {
    for (auto& piece : model->pieces) fully_shard(piece, options());
    fully_shard(model, root.mesh(options().mesh()));
    Observe(model);
  }
  Pieces model;
  at::Tensor x = at::ones({2, 4});
};

TEST(OrderTest, FrozenFirstGroupIsNotGatheredInBackward) {
  TracedRank rank;
  Pieces model(rank.log, 3);
  for (auto& parameter : model->pieces[0]->parameters()) {
    parameter.set_requires_grad(false);
  }
  for (auto& piece : model->pieces) fully_shard(piece, rank.options());
  fully_shard(model, rank.options());
  rank.Observe(model);
  const auto iterate = [&] {
    at::Tensor x = at::ones({2, 4});
    for (auto& piece : model->pieces) x = piece(x);
    x.sum().backward();
    return rank.log.Take();
  };
  iterate();
  for (int iteration = 2; iteration <= 3; ++iteration) {
    EXPECT_EVENTS(
        iterate(), "forward b0.up, gather b0, gather b1, wait gather b0",
        "forward b0.down",
        "forward b1.up, free b0, gather b2, wait gather b1, forward b1.down",
        "forward b2.up, wait gather b2, forward b2.down",
        "backward b2.down, backward b2.up, free b2, reduce b2",
        "backward b1.down, backward b1.up, wait reduce b2, free b1, reduce b1",
        "wait reduce b1");
  }
}

TEST(OrderTest, GroupWhoseOutputIsDroppedIsNotGatheredInBackward) {
  TracedPieces t(5);
  const auto iterate = [&] {
    at::Tensor x = t.x;
    for (size_t i = 0; i < t.model->pieces.size(); ++i) {
      const at::Tensor y = t.model->pieces[i](x);
      if (i != 1) x = y;
    }
    x.sum().backward();
    return t.log.Take();
  };
  iterate();
  for (int iteration = 2; iteration <= 3; ++iteration) {
    auto counts = Count(iterate());
    // Forward reads all five, the last two stay; backward also reads b2, and b0
    // whose upper layer needs a gradient for the lower one's output.
    EXPECT_EQ(counts["gather b0"], 2);
    EXPECT_EQ(counts["gather b1"], 1);
    EXPECT_EQ(counts["gather b2"], 2);
    EXPECT_EQ(counts["gather b3"], 1);
    EXPECT_EQ(counts["gather b4"], 1);
    EXPECT_EQ(counts["reduce b1"], 0);
    EXPECT_EQ(counts["reduce b0"], 1);
  }
}

TEST(OrderTest, GroupThatIsNoLongerUsedIsNotGathered) {
  TracedPieces t(4);
  const auto iterate = [&](bool with_second) {
    at::Tensor x = t.x;
    for (size_t i = 0; i < t.model->pieces.size(); ++i) {
      if (i != 1 || with_second) x = t.model->pieces[i](x);
    }
    x.sum().backward();
    return Count(t.log.Take());
  };
  iterate(true);
  iterate(true);
  iterate(false);  // may gather b1 ahead, in vain, once in each pass
  for (int i = 0; i < 2; ++i) {
    auto counts = iterate(false);
    EXPECT_EQ(counts["gather b1"], 0);
    EXPECT_EQ(counts["reduce b1"], 0);
    EXPECT_EQ(counts["gather b0"], 2);
  }
  EXPECT_EQ(iterate(true)["reduce b1"], 1);
}

TEST(OrderTest, SiblingsUsedAlternately) {
  TracedPieces t(2);
  for (int iteration = 1; iteration <= 3; ++iteration) {
    at::Tensor x = t.x;
    for (int i = 0; i < 20; ++i) x = t.model->pieces[i % 2](x);
    auto forward = Count(t.log.Take());
    EXPECT_EQ(forward["gather b0"], 1);
    EXPECT_EQ(forward["gather b1"], 1);
    EXPECT_EQ(forward["forward b0.up"], 10);
    x.sum().backward();
    auto backward = Count(t.log.Take());
    EXPECT_EQ(backward["gather b0"] + backward["gather b1"], 0);
    EXPECT_EQ(backward["reduce b0"], 1);
    EXPECT_EQ(backward["reduce b1"], 1);
  }
}

TEST(OrderTest, OneWeightReadByEightBlocks) {
  // The last piece is the one that is shared.
  for (const bool before : {true, false}) {
    TracedPieces t(9);
    auto& shared = t.model->pieces.back();
    for (int iteration = 1; iteration <= 3; ++iteration) {
      at::Tensor x = t.x;
      for (int i = 0; i < 8; ++i) {
        auto& block = t.model->pieces[i];
        x = before ? block(shared(x)) : shared(block(x));
      }
      auto forward = Count(t.log.Take());
      for (int i = 0; i < 9; ++i) {
        EXPECT_EQ(forward["gather b" + std::to_string(i)], 1)
            << "block " << i << ", iteration " << iteration;
      }
      EXPECT_EQ(forward["forward b8.up"], 8);
      x.sum().backward();
      auto backward = Count(t.log.Take());
      for (int i = 0; i < 9; ++i) {
        EXPECT_LE(backward["gather b" + std::to_string(i)], 1)
            << "block " << i << ", iteration " << iteration;
        EXPECT_EQ(backward["reduce b" + std::to_string(i)], 1);
      }
    }
  }
}

}  // namespace
}  // namespace composable
