#include "collectives/agreement.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "collectives/collective.h"
#include "collectives/communicator.h"
#include "collectives/divergence.h"
#include "collectives/order_predictor.h"
#include "tests/support/counting_store.h"
#include "tests/support/errors.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

Collective Gather(const std::string& name) {
  return {CollectiveKind::kAllGather, at::zeros({4}),
          MakeCollectiveLabel(name)};
}

Collective Reduction(const std::string& name) {
  return {CollectiveKind::kReduceScatter, at::zeros({4}),
          MakeCollectiveLabel(name)};
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

constexpr const char* kUnusable =
    " This process group can't be used any more: make a new one and shard the "
    "module over it, or start the job again.";

// --- Predictor

// How many of `next` were not foretold.
int Misses(OrderPredictor& predictor, const std::vector<Collective>& next) {
  int misses = 0;
  for (const Collective& collective : next) {
    const Collective* expected = predictor.Predict();
    if (expected == nullptr || expected->fingerprint != collective.fingerprint)
      ++misses;
    predictor.Advance(collective);
  }
  return misses;
}

std::vector<Collective> Forward() {
  return {Gather("root"), Gather("b0"), Gather("b1"), Gather("b2")};
}

std::vector<Collective> Training() {
  auto all = Forward();
  for (const char* name : {"b2", "b1", "b0"}) {
    if (std::string(name) != "b2") all.push_back(Gather(name));
    all.push_back(Reduction(name));
  }
  all.push_back(Reduction("root"));
  return all;
}

TEST(OrderPredictorTest, ForetellsALoopFromItsSecondTurnOn) {
  OrderPredictor predictor;
  EXPECT_EQ(predictor.Predict(), nullptr);
  EXPECT_EQ(predictor.Last(), nullptr);
  const std::vector<Collective> turn = {Gather("a"), Gather("b"),
                                        Reduction("b"), Reduction("a")};
  EXPECT_EQ(Misses(predictor, turn), 4);
  EXPECT_EQ(predictor.Last()->text(), "reduce-scatter of 'a'");
  EXPECT_EQ(Misses(predictor, turn), 0);
  EXPECT_EQ(Misses(predictor, turn), 0);
}

TEST(OrderPredictorTest, AChangeOfTheKindOfPassIsMissedOnce) {
  OrderPredictor predictor;
  for (int i = 0; i < 3; ++i) Misses(predictor, Training());
  EXPECT_EQ(Misses(predictor, Training()), 0);
  for (int round = 0; round < 3; ++round) {
    int misses = 0;
    for (int i = 0; i < 3; ++i) misses += Misses(predictor, Forward());
    for (int i = 0; i < 3; ++i) misses += Misses(predictor, Training());
    EXPECT_LE(misses, round == 0 ? 4 : 2) << round;
  }
}

// Gradients are accumulated over 6 passes and reduced in the last: whether a
// pass reduces shows only in a long context.
TEST(OrderPredictorTest, KnowsLongContexts) {
  OrderPredictor predictor;
  std::vector<Collective> window;
  for (int pass = 0; pass < 6; ++pass) {
    for (const auto& gather : Forward()) window.push_back(gather);
    if (pass == 5) window.push_back(Reduction("root"));
  }
  for (int i = 0; i < 4; ++i) Misses(predictor, window);
  EXPECT_EQ(Misses(predictor, window), 0);
}

TEST(OrderPredictorTest, RemembersABoundedNumberOfContexts) {
  OrderPredictor predictor;
  std::vector<Collective> all;
  for (int i = 0; i < 50; ++i) all.push_back(Gather(std::to_string(i)));
  std::mt19937 random(1);
  size_t most = 0;
  for (int i = 0; i < 100000; ++i) {
    predictor.Advance(all[random() % all.size()]);
    most = std::max(most, predictor.contexts());
  }
  EXPECT_GT(most, OrderPredictor::kMaxContexts);  // it was full once
  EXPECT_LE(most, OrderPredictor::kMaxContexts + 4);
  for (int i = 0; i < 2; ++i) Misses(predictor, Training());
  EXPECT_EQ(Misses(predictor, Training()), 0);
}

// --- Texts

TEST(CollectiveTest, FingerprintIsOfAllThatMustBeEqual) {
  const Collective base = Gather("a");
  EXPECT_EQ(base.fingerprint, Gather("a").fingerprint);
  const auto kind = CollectiveKind::kAllGather;
  const at::Tensor part = at::zeros({4});
  for (const Collective& other :
       {Gather("b"), Reduction("a"),
        Collective(kind, at::zeros({5}), MakeCollectiveLabel("a")),
        Collective(kind, at::zeros({4}, at::kDouble), MakeCollectiveLabel("a")),
        Collective(kind, part, MakeCollectiveLabel("a", /*plan=*/1)),
        Collective(kind, part, MakeCollectiveLabel("a", 0, /*serial=*/1)),
        Collective(kind, part, nullptr)}) {
    EXPECT_NE(other.fingerprint, base.fingerprint) << other.text();
  }
}

TEST(CollectiveTest, Texts) {
  EXPECT_EQ(Gather("blocks.0").text(), "all-gather of 'blocks.0'");
  EXPECT_EQ(Gather("blocks.0").detail(), "16 bytes per rank as Float");
  const Collective max(CollectiveKind::kAllReduceMax, at::zeros({2}, at::kByte),
                       MakeCollectiveLabel("clip", /*plan=*/0xab, 3));
  EXPECT_EQ(max.text(), "all-reduce of 'clip'");
  EXPECT_EQ(max.detail(),
            "2 bytes per rank as Byte, max, sharded module 3, plan "
            "00000000000000ab");
  EXPECT_EQ(
      Collective(CollectiveKind::kAllReduceSum, at::zeros({2}), nullptr).text(),
      "all-reduce");
}

TEST(DivergenceTest, OrdinalsAndRanges) {
  const std::vector<std::string> expected = {"1st",   "2nd",  "3rd",  "4th",
                                             "11th",  "12th", "13th", "21st",
                                             "102nd", "111th"};
  std::vector<std::string> got;
  for (const int n : {1, 2, 3, 4, 11, 12, 13, 21, 102, 111})
    got.push_back(Ordinal(n));
  EXPECT_EQ(got, expected);
  EXPECT_EQ(RanksText({3}), "rank 3");
  EXPECT_EQ(RanksText({0, 2, 3, 4, 7, 8}), "ranks 0, 2-4, 7-8");
}

TEST(DivergenceTest, NamesEachRank) {
  const RankIntent gather{"all-gather of 'b'", "8 bytes", 1};
  const RankIntent reduction{"reduce-scatter of 'a'", "8 bytes", 2};
  // Ranks 1 and 3 have posted what rank 0 foretold, rank 3 one more.
  const std::vector<RankAnswer> answers = {{16, gather, reduction},
                                           {17, {}, gather},
                                           {16, gather, reduction},
                                           {18, gather, reduction}};
  EXPECT_EQ(DivergenceText(answers),
            "Ranks are about to run different collectives over one process "
            "group (their 17th): ranks 0, 2: all-gather of 'b'; ranks 1, 3: "
            "reduce-scatter of 'a'. What uses sharded parameters, such as "
            "printing a norm, must be done by every rank, and in the same "
            "order.");
}

TEST(DivergenceTest, TellsEqualNamesApart) {
  const std::vector<RankAnswer> answers = {
      {0, {"all-gather of 'a'", "8 bytes", 1}, {}},
      {0, {"all-gather of 'a'", "16 bytes", 2}, {}}};
  EXPECT_EQ(DivergenceText(answers),
            "Ranks are about to run different collectives over one process "
            "group (their 1st): rank 0: all-gather of 'a' (8 bytes); rank 1: "
            "all-gather of 'a' (16 bytes). Shard the same modules, with the "
            "same parameters and in the same order, on every rank.");
}

TEST(DivergenceTest, AnswersTravelAsBytes) {
  const RankAnswer answer{7, {"a", "b", ~uint64_t{0}}, {"", "c", 5}};
  const RankAnswer copy = RankAnswer::Decode(answer.Encode());
  EXPECT_EQ(copy.issued, 7);
  EXPECT_EQ(copy.intent.text, "a");
  EXPECT_EQ(copy.intent.detail, "b");
  EXPECT_EQ(copy.intent.fingerprint, ~uint64_t{0});
  EXPECT_EQ(copy.foretold.text, "");
  EXPECT_EQ(copy.foretold.detail, "c");
  EXPECT_EQ(copy.foretold.fingerprint, 5U);
  EXPECT_THROW(RankAnswer::Decode("something else"), c10::Error);
}

// --- Ranks

struct Rank {
  int rank = 0;
  c10::intrusive_ptr<CountingStore> store;
  ProcessGroupPtr group;

  Communicator Make() const { return {group, c10::kCPU}; }
};

// Ranks as threads, over Gloo, whose calls of the store are counted.
void RunCounted(int world_size, const std::function<void(Rank&)>& body,
                milliseconds timeout = std::chrono::seconds(20)) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  RunRanks(world_size,
           [&](RankContext& context) {
             Rank rank;
             rank.rank = context.rank;
             rank.store = c10::make_intrusive<CountingStore>(shared);
             rank.group =
                 init_process_group(rank.store, context.rank, world_size,
                                    ProcessGroupOptions().timeout(timeout));
             body(rank);
           },
           {.backend = TestBackend::kInProcess});
}

const CollectiveLabelPtr& LabelA() {
  static const auto* label = new CollectiveLabelPtr(MakeCollectiveLabel("a"));
  return *label;
}
const CollectiveLabelPtr& LabelB() {
  static const auto* label = new CollectiveLabelPtr(MakeCollectiveLabel("b"));
  return *label;
}

PendingCollectivePtr StartGather(Communicator& comm, const at::Tensor& output,
                                 const CollectiveLabelPtr& label) {
  return comm.AllGather(
      output,
      at::full({output.numel() / comm.size()}, comm.rank() + 1.0, at::kFloat),
      label);
}

at::Tensor GatherNow(Communicator& comm, const CollectiveLabelPtr& label) {
  const at::Tensor output = at::zeros({2 * comm.size()});
  StartGather(comm, output, label)->Wait();
  return output;
}

at::Tensor ReduceNow(Communicator& comm, const CollectiveLabelPtr& label) {
  const at::Tensor output = at::zeros({2});
  comm.ReduceScatter(output, at::full({2 * comm.size()}, 1.0, at::kFloat),
                     label)
      ->Wait();
  return output;
}

void Turn(Communicator& comm) {
  GatherNow(comm, LabelA());
  GatherNow(comm, LabelB());
  ReduceNow(comm, LabelB());
  ReduceNow(comm, LabelA());
  const at::Tensor norm = at::full({1}, 1.0);
  comm.AllReduce(norm, Communicator::Reduction::kSum, LabelA());
  EXPECT_EQ(norm.item<float>(), comm.size());
}

TEST(OrderAgreementTest, NoStoreTrafficFromTheSecondTurnOn) {
  RunCounted(3, [](Rank& rank) {
    Communicator comm = rank.Make();
    rank.store->Reset();
    Turn(comm);
    EXPECT_GT(rank.store->calls(), 5);
    EXPECT_LE(rank.store->calls(), 5 * 14);
    rank.store->Reset();
    for (int i = 0; i < 20; ++i) Turn(comm);
    EXPECT_EQ(rank.store->calls(), 0);
  });
}

TEST(OrderAgreementTest, KeysDoNotPileUp) {
  RunCounted(2, [](Rank& rank) {
    Communicator comm = rank.Make();
    const auto before = rank.store->getNumKeys();
    for (int i = 0; i < 30; ++i) {
      GatherNow(comm, MakeCollectiveLabel(std::to_string(i)));
    }
    EXPECT_LE(rank.store->getNumKeys(), before + 2 * (2 + 4));
  });
}

TEST(OrderAgreementTest, OneForAllCommunicatorsOfAProcessGroup) {
  RunCounted(2, [](Rank& rank) {
    {
      Communicator first = rank.Make();
      EXPECT_EQ(first.NextSerial(), 1);
      Turn(first);
    }
    Communicator second = rank.Make();
    EXPECT_EQ(second.NextSerial(), 2);
    rank.store->Reset();
    Turn(second);
    EXPECT_EQ(rank.store->calls(), 0);
  });
}

TEST(OrderAgreementTest, NoneForOneRankOrWithoutAStore) {
  RunCounted(1, [](Rank& rank) {
    Communicator comm = rank.Make();
    rank.store->Reset();
    Turn(comm);
    EXPECT_EQ(rank.store->calls() + rank.store->looks(), 0);
    EXPECT_EQ(comm.NextSerial(), 0);
  });
  RunRanks(2,
           [](RankContext& rank) {
             EXPECT_EQ(OrderAgreement::Of(*rank.group,
                                          *rank.group->getBackend(c10::kCPU)),
                       nullptr);
             Communicator comm(rank.group, c10::kCPU);
             Turn(comm);
           },
           {.backend = TestBackend::kInProcess});
}

// What has to be known of the errors of all ranks.
void ExpectOnAll(const std::vector<std::string>& errors,
                 const std::string& expected) {
  for (size_t r = 0; r < errors.size(); ++r) {
    EXPECT_EQ(errors[r], expected) << "rank " << r;
  }
}

TEST(OrderAgreementTest, DifferentFromTheStart) {
  struct Case {
    std::function<void(Communicator&)> rank1;
    std::string text;
  };
  const std::string unlike =
      ". What uses sharded parameters, such as printing a norm, must be done "
      "by "
      "every rank, and in the same order.";
  const std::string unequal =
      ". Shard the same modules, with the same parameters and in the same "
      "order, on every rank.";
  const std::vector<Case> cases = {
      {[](auto& comm) { GatherNow(comm, LabelB()); },
       "rank 0: all-gather of 'a'; rank 1: all-gather of 'b'" + unlike},
      {[](auto& comm) { ReduceNow(comm, LabelA()); },
       "rank 0: all-gather of 'a'; rank 1: reduce-scatter of 'a'" + unlike},
      {[](auto& comm) { StartGather(comm, at::zeros({6}), LabelA())->Wait(); },
       "rank 0: all-gather of 'a' (8 bytes per rank as Float); rank 1: "
       "all-gather of 'a' (12 bytes per rank as Float)" +
           unequal},
      {[](auto& comm) { GatherNow(comm, MakeCollectiveLabel("a", 0, 2)); },
       "rank 0: all-gather of 'a' (8 bytes per rank as Float); rank 1: "
       "all-gather of 'a' (8 bytes per rank as Float, sharded module 2)" +
           unequal},
  };
  for (const Case& c : cases) {
    std::vector<std::string> errors(2);
    RunCounted(2, [&](Rank& rank) {
      Communicator comm = rank.Make();
      errors[rank.rank] = ErrorOf<c10::DistError>([&] {
        rank.rank == 1 ? c.rank1(comm) : (void)GatherNow(comm, LabelA());
      });
    });
    ExpectOnAll(errors,
                "Ranks are about to run different collectives over one process "
                "group (their 1st): " +
                    c.text + kUnusable);
  }
}

// Rank 1 leaves the known order; the others have posted, and wait.
TEST(OrderAgreementTest, OneOfThreeLeavesTheKnownOrder) {
  std::vector<std::string> errors(3);
  std::vector<double> seconds(3);
  RunCounted(3, [&](Rank& rank) {
    Communicator comm = rank.Make();
    for (int i = 0; i < 3; ++i) Turn(comm);
    const auto start = Clock::now();
    const at::Tensor output = at::full({6}, -1.0);
    errors[rank.rank] = ErrorOf<c10::DistError>([&] {
      StartGather(comm, output, rank.rank == 1 ? LabelB() : LabelA())->Wait();
    });
    seconds[rank.rank] =
        std::chrono::duration<double>(Clock::now() - start).count();
    if (rank.rank == 1) {
      // Nothing was posted, so nothing came.
      EXPECT_TRUE(at::equal(output, at::full({6}, -1.0)));
    }
    EXPECT_EQ(ErrorOf<c10::DistError>([&] { GatherNow(comm, LabelA()); }),
              "Rank " + std::to_string(rank.rank) +
                  " can't run all-gather of 'a', because its process group "
                  "failed before: " +
                  errors[rank.rank]);
  });
  ExpectOnAll(
      errors,
      std::string("Ranks are about to run different collectives over "
                  "one process group (their 16th): ranks 0, 2: "
                  "all-gather of 'a'; rank 1: all-gather of 'b'. What "
                  "uses sharded parameters, such as printing a norm, "
                  "must be done by every rank, and in the same order.") +
          kUnusable);
  for (const double s : seconds) EXPECT_LT(s, 5);
}

// Rank 0 has posted two collectives ahead when rank 1 leaves the order at the
// first, and has left it itself at the third.
TEST(OrderAgreementTest, WhatWasPostedAheadIsEnded) {
  std::vector<std::string> errors(2);
  const auto start = Clock::now();
  RunCounted(2, [&](Rank& rank) {
    Communicator comm = rank.Make();
    for (int i = 0; i < 3; ++i) Turn(comm);
    if (rank.rank == 1) {
      errors[1] = ErrorOf<c10::DistError>([&] { ReduceNow(comm, LabelA()); });
      return;
    }
    const at::Tensor a = at::zeros({4});
    const at::Tensor b = at::zeros({4});
    const auto first = StartGather(comm, a, LabelA());
    const auto second = StartGather(comm, b, LabelB());
    errors[0] = ErrorOf<c10::DistError>([&] { GatherNow(comm, LabelA()); });
    for (const auto* pending : {&first, &second}) {
      EXPECT_EQ(ErrorOf<c10::DistError>([&] { (*pending)->Wait(); }),
                errors[0]);
      EXPECT_EQ(ErrorOf<c10::DistError>([&] { (*pending)->Wait(); }),
                errors[0]);
    }
  });
  ExpectOnAll(errors,
              std::string("Ranks are about to run different collectives over "
                          "one process group (their 16th): rank 0: all-gather "
                          "of 'a'; rank 1: reduce-scatter of 'a'. What uses "
                          "sharded parameters, such as printing a norm, must "
                          "be done by every rank, and in the same order.") +
                  kUnusable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
}

// A rank may be ahead, and come to something new, while the others still wait
// for what it has posted.
TEST(OrderAgreementTest, SomethingNewAfterSlowCollectivesIsNoDivergence) {
  RunCounted(2, [](Rank& rank) {
    Communicator comm = rank.Make();
    for (int i = 0; i < 3; ++i) Turn(comm);
    if (rank.rank == 1) std::this_thread::sleep_for(milliseconds(700));
    const at::Tensor a = at::zeros({4});
    const auto pending = StartGather(comm, a, LabelA());
    if (rank.rank == 1) pending->Wait();
    GatherNow(comm, MakeCollectiveLabel("new"));
    pending->Wait();
    EXPECT_EQ(a[3].item<float>(), 2);
  });
}

// Ranks meet at a point of the test.
class Gate {
 public:
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30),
                                  [&] { return open_; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

TEST(OrderAgreementTest, ARankThatDoesNotComeInTime) {
  std::vector<std::string> errors(3);
  Gate gate;
  RunCounted(
      3,
      [&](Rank& rank) {
        Communicator comm = rank.Make();
        Turn(comm);
        if (rank.rank == 2) gate.Pass();
        const auto start = Clock::now();
        errors[rank.rank] = ErrorOf<c10::DistError>([&] {
          rank.rank == 2 ? GatherNow(comm, LabelA())
                         : GatherNow(comm, LabelB());
        });
        EXPECT_LT(Clock::now() - start, milliseconds(2500));
        if (rank.rank == 0) gate.Open();
      },
      milliseconds(1500));
  EXPECT_TRUE(Contains(
      errors[0],
      "Ranks did not agree on the 6th collective of their process group within "
      "1500 ms: ranks 0-1: all-gather of 'b'; rank 2: no answer. Of rank 2 "
      "nothing was heard: it has ended, is busy with something else, or does "
      "not run this collective at all. What uses sharded parameters, such as "
      "printing a norm, must be done by every rank."))
      << errors[0];
  EXPECT_TRUE(Contains(errors[0], " before is all-reduce of 'a'."))
      << errors[0];
  EXPECT_TRUE(Contains(errors[0], kUnusable)) << errors[0];
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2],
            errors[0] +
                " Since then rank 2 has come, too: ranks 0-1: all-gather of "
                "'b'; rank 2: all-gather of 'a'.");
}

TEST(OrderAgreementTest, AStoreThatFails) {
  std::string error;
  RunCounted(2, [&](Rank& rank) {
    Communicator comm = rank.Make();
    Turn(comm);
    rank.store->Fail("Connection reset by peer");
    Turn(comm);  // needs no store
    if (rank.rank == 0) {
      error = ErrorOf<c10::DistError>([&] { GatherNow(comm, LabelB()); });
      EXPECT_TRUE(
          Contains(ErrorOf<c10::DistError>([&] { Turn(comm); }), error));
    }
  });
  EXPECT_EQ(error,
            std::string("Rank 0 could not agree with the others on the 11th "
                        "collective of its process group, all-gather of 'b': "
                        "the group's store failed: Connection reset by peer. "
                        "If the process that hosts the store (rank 0, or the "
                        "launcher) has ended, its error is the cause.") +
                kUnusable);
}

TEST(OrderAgreementTest, AStoreThatFailsDuringALongWaitIsNoError) {
  RunCounted(2, [](Rank& rank) {
    Communicator comm = rank.Make();
    Turn(comm);
    rank.store->Fail("Connection reset by peer");
    if (rank.rank == 0) std::this_thread::sleep_for(milliseconds(600));
    EXPECT_EQ(GatherNow(comm, LabelA())[3].item<float>(), 2);
  });
}

TEST(OrderAgreementTest, TwoProcessGroupsDoNotMeet) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  RunRanks(2,
           [&](RankContext& rank) {
             const auto make = [&] {
               return Communicator(init_process_group(shared, rank.rank, 2),
                                   c10::kCPU);
             };
             Communicator first = make();
             Communicator second = make();
             GatherNow(first, LabelA());
             GatherNow(second, LabelB());
             GatherNow(second, LabelA());
             ReduceNow(first, LabelA());
           },
           {.backend = TestBackend::kInProcess});
}

TEST(CollectiveErrorsTest, SayWhatFailedAndWhere) {
  const auto backend =
      MakeManualBackend(2, [](const std::string& /*event*/) {});
  Communicator comm(GroupOf(backend), c10::kCPU);
  backend->Fail(0, "the cable is cut");
  const auto pending = StartGather(comm, at::zeros({4}), LabelA());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ErrorOf<c10::DistError>([&] { pending->Wait(); }),
              "all-gather of 'a' failed on rank 0 of 2: the cable is cut. If "
              "another rank has failed, its error is the cause.");
  }
}

TEST(CollectiveErrorsTest, OfARankThatHasEnded) {
  std::string error;
  RunCounted(2, [&](Rank& rank) {
    Communicator comm = rank.Make();
    for (int i = 0; i < 2; ++i) Turn(comm);
    const auto start = Clock::now();
    if (rank.rank == 0)
      error = ErrorOf<c10::DistError>([&] { GatherNow(comm, LabelA()); });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  });
  EXPECT_EQ(error.rfind("all-gather of 'a' failed on rank 0 of 2: ", 0), 0U)
      << error;
}

}  // namespace
}  // namespace composable
