// Communication runs beside computation: a training thread, whose collectives
// end only when the test says so, is watched at its waits. Outputs of
// unfinished collectives are NaN, and so are released buffers: what is read or
// overwritten before its wait shows in the gradients.
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <thread>
#include <tuple>

#include "collectives/buffer_pool.h"
#include "composable/state_dict.h"
#include "tests/composable/traced_blocks.h"
#include "tests/support/shards.h"

namespace composable {
namespace {

class OverlapTest : public testing::Test {
 protected:
  OverlapTest() { BufferPool::SetPoisonForTest(true); }
  ~OverlapTest() override { BufferPool::SetPoisonForTest(false); }
};

// One iteration of `t` in a thread of its own, which stops at each wait.
class TrainingThread {
 public:
  explicit TrainingThread(TracedModel& t) : t_(t) {
    t_.backend->set_finish_on_wait(false);
    thread_ = std::thread([this] {
      try {
        at::set_num_threads(1);
        t_.Backward();
      } catch (...) {
        error_ = std::current_exception();
      }
      t_.backend->NoMoreWaits();
    });
  }
  ~TrainingThread() {
    if (!thread_.joinable()) return;
    t_.backend->set_finish_on_wait(true);
    thread_.join();
  }

  void Finish(size_t index) {
    t_.log.Add("-- finish " + t_.log.NameOf(index));
    t_.backend->Finish(index);
  }

  // Finishes each collective when it is waited for, not before, to the end.
  void FinishWhatIsWaitedFor() {
    while (const auto index = t_.backend->AwaitAnyWait()) Finish(*index);
    Join();
  }

  void Join() {
    thread_.join();
    t_.backend->set_finish_on_wait(true);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  TracedModel& t_;
  std::thread thread_;
  std::exception_ptr error_;
};

// An unsharded model of the whole values that `t` gathers.
struct Reference {
  explicit Reference(TracedModel& t)
      : model(log, static_cast<int>(t.model->blocks.size())) {
    load_full_state_dict(model, full_state_dict(t.model));
    t.log.Take();
    model(t.tokens).sum().backward();
  }
  // The gradients of `t`, whose ranks all hold the same, are its own.
  void ExpectGradients(TracedModel& t) {
    const auto expected = model->named_parameters();
    for (const auto& item : t.model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      const at::Tensor rows =
          LocalRows(item.value(), expected[item.key()].grad());
      EXPECT_TRUE(at::equal(item.value().grad(), rows))
          << item.key() << "\n"
          << item.value().grad() << "\n"
          << rows;
    }
  }
  EventLog log;
  Blocks model;
};

TEST_F(OverlapTest, NextGatherRunsBesideTheOperatorsOfForward) {
  TracedModel t(3);
  t.Iterate();
  const size_t base = t.backend->issued();
  TrainingThread thread(t);

  t.backend->AwaitWait(base);
  EXPECT_EQ(t.backend->issued(), base + 2);
  EXPECT_EQ(OnePerLine(t.log.Take()),
            OnePerLine({"forward root.embed, gather root, gather b0",
                        "wait gather root"}));

  thread.Finish(base);
  t.backend->AwaitWait(base + 1);
  EXPECT_EQ(t.backend->issued(), base + 3);
  EXPECT_EQ(OnePerLine(t.log.Take()),
            OnePerLine({"-- finish root", "forward b0.up, gather b1",
                        "wait gather b0"}));

  thread.Finish(base + 1);
  t.backend->AwaitWait(base + 2);
  // All of b0 ran, though the gather of b1 has not finished.
  EXPECT_EQ(t.backend->issued(), base + 4);
  EXPECT_FALSE(t.backend->waited(base + 3));
  EXPECT_EQ(OnePerLine(t.log.Take()),
            OnePerLine({"-- finish b0", "forward b0.down",
                        "forward b1.up, free b0, gather b2, wait gather b1"}));
  thread.FinishWhatIsWaitedFor();
}

TEST_F(OverlapTest, ReductionAndNextGatherRunBesideTheOperatorsOfBackward) {
  TracedModel t(5);
  t.Iterate();
  t.model->zero_grad();
  Reference reference(t);
  TrainingThread thread(t);
  thread.FinishWhatIsWaitedFor();
  EXPECT_EQ(
      OnePerLine(t.log.Take()),
      OnePerLine({
          "forward root.embed, gather root, gather b0",
          "wait gather root, -- finish root",
          "forward b0.up, gather b1, wait gather b0, -- finish b0",
          "forward b0.down",
          "forward b1.up, free b0, gather b2, wait gather b1, -- finish b1",
          "forward b1.down",
          "forward b2.up, free b1, gather b3, wait gather b2, -- finish b2",
          "forward b2.down",
          "forward b3.up, free b2, gather b4, wait gather b3, -- finish b3",
          "forward b3.down",
          "forward b4.up, wait gather b4, -- finish b4, forward b4.down",
          "forward root.head",
          "backward root.head",
          // Each reduction is issued after the operators of its group, and
          // finished only when the next one needs its buffer: the operators of
          // the next group run meanwhile.
          "backward b4.down, backward b4.up, free b4, reduce b4",
          "backward b3.down, gather b2, backward b3.up",
          "wait reduce b4, -- finish b4, free b3, reduce b3",
          // Each gather is issued before the operators of the group before, and
          // finished after them.
          "backward b2.down, gather b1, wait gather b2, -- finish b2",
          "backward b2.up, wait reduce b3, -- finish b3, free b2, reduce b2",
          "backward b1.down, gather b0, wait gather b1, -- finish b1",
          "backward b1.up, wait reduce b2, -- finish b2, free b1, reduce b1",
          "backward b0.down, wait gather b0, -- finish b0",
          "backward b0.up, wait reduce b1, -- finish b1, free b0, reduce b0",
          "backward root.embed, wait reduce b0, -- finish b0",
          "free root, reduce root",
          "wait reduce root, -- finish root",
      }));
  reference.ExpectGradients(t);
}

TEST_F(OverlapTest, EverythingIsWaitedForBeforeBackwardReturns) {
  TracedModel t(4);
  for (int i = 0; i < 3; ++i) {
    t.Iterate();
    for (size_t c = 0; c < t.backend->issued(); ++c) {
      EXPECT_TRUE(t.backend->waited(c)) << "collective " << c;
    }
  }
}

// Backward prefetch, forward prefetch, limit, and whether blocks stay.
class EveryOption : public OverlapTest,
                    public testing::WithParamInterface<
                        std::tuple<BackwardPrefetch, bool, int64_t, bool>> {};

INSTANTIATE_TEST_SUITE_P(
    Options, EveryOption,
    testing::Combine(testing::Values(BackwardPrefetch::kBackwardPre,
                                     BackwardPrefetch::kBackwardPost,
                                     BackwardPrefetch::kNone),
                     testing::Bool(), testing::Values(1, 2, 4),
                     testing::Bool()));

TEST_P(EveryOption, NothingIsReadBeforeItsWait) {
  const auto& [backward, forward, limit, stay] = GetParam();
  TracedModel t(4,
                FullyShardOptions()
                    .backward_prefetch(backward)
                    .forward_prefetch(forward)
                    .limit_all_gathers(limit),
                FullyShardOptions().reshard_after_forward(!stay));
  t.Iterate();
  t.model->zero_grad();
  Reference reference(t);
  TrainingThread thread(t);
  thread.FinishWhatIsWaitedFor();
  reference.ExpectGradients(t);
  EXPECT_LE(t.stats().peak_gathers_in_flight, limit);
}

}  // namespace
}  // namespace composable
