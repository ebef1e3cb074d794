#include "collectives/communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

void Ignore(const std::string& /*event*/) {}

class CommunicatorTest
    : public testing::TestWithParam<std::pair<TestBackend, int>> {
 protected:
  static void Run(const std::function<void(Communicator&)>& body) {
    RunRanks(GetParam().second,
             [&](RankContext& rank) {
               Communicator comm(rank.group, c10::kCPU);
               EXPECT_EQ(comm.rank(), rank.rank);
               EXPECT_EQ(comm.size(), rank.world_size);
               body(comm);
             },
             {.backend = GetParam().first});
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest,
                         testing::Values(std::pair(TestBackend::kGloo, 1),
                                         std::pair(TestBackend::kGloo, 2),
                                         std::pair(TestBackend::kGloo, 3),
                                         std::pair(TestBackend::kInProcess, 1),
                                         std::pair(TestBackend::kInProcess,
                                                   3)));

TEST_P(CommunicatorTest, AllGatherPutsTheRanksInOrder) {
  Run([](Communicator& comm) {
    for (const auto dtype : {c10::kFloat, c10::kDouble, c10::kInt}) {
      const at::Tensor input = at::arange(5, dtype) + 10 * comm.rank();
      const at::Tensor output = at::full({5 * comm.size()}, -1, dtype);
      comm.AllGather(output, input)->Wait();
      for (int r = 0; r < comm.size(); ++r) {
        EXPECT_TRUE(at::equal(output.narrow(0, 5 * r, 5),
                              at::arange(5, dtype) + 10 * r));
      }
      EXPECT_TRUE(at::equal(input, at::arange(5, dtype) + 10 * comm.rank()));
    }
  });
}

TEST_P(CommunicatorTest, ReduceScatterSumsEachRanksPart) {
  Run([](Communicator& comm) {
    const int n = comm.size();
    // Rank r sends 100 * part + i + r.
    const at::Tensor input =
        at::arange(4).repeat({n}).to(c10::kFloat) +
        100 * at::arange(n).repeat_interleave(4).to(c10::kFloat) + comm.rank();
    const at::Tensor output = at::full({4}, -1, c10::kFloat);
    comm.ReduceScatter(output, input)->Wait();
    const double sum_of_ranks = n * (n - 1) / 2.0;
    const at::Tensor expected =
        n * (at::arange(4).to(c10::kFloat) + 100 * comm.rank()) + sum_of_ranks;
    EXPECT_TRUE(at::equal(output, expected)) << output << expected;
  });
}

TEST_P(CommunicatorTest, AllReduce) {
  Run([](Communicator& comm) {
    const int n = comm.size();
    at::Tensor sum = at::full({3}, comm.rank() + 1, c10::kDouble);
    comm.AllReduce(sum, Communicator::Reduction::kSum);
    EXPECT_TRUE(at::equal(sum, at::full({3}, n * (n + 1) / 2.0, c10::kDouble)));
    at::Tensor max = at::full({3}, -1.5 * (comm.rank() + 1), c10::kDouble);
    comm.AllReduce(max, Communicator::Reduction::kMax);
    EXPECT_TRUE(at::equal(max, at::full({3}, -1.5, c10::kDouble)));
  });
}

TEST_P(CommunicatorTest, SeveralAtATime) {
  Run([](Communicator& comm) {
    std::vector<at::Tensor> outputs;
    std::vector<PendingCollectivePtr> pending;
    for (int i = 0; i < 4; ++i) {
      outputs.push_back(at::zeros({comm.size()}));
      pending.push_back(
          comm.AllGather(outputs[i], at::full({1}, 10.0 * i + comm.rank())));
    }
    for (int i = 0; i < 4; ++i) {
      pending[i]->Wait();
      EXPECT_EQ(outputs[i][comm.size() - 1].item<float>(),
                10.0 * i + comm.size() - 1);
    }
  });
}

TEST_P(CommunicatorTest, DroppingWithoutWaitingWaits) {
  Run([](Communicator& comm) {
    const at::Tensor output = at::zeros({comm.size()});
    { const auto dropped = comm.AllGather(output, at::full({1}, 1.0)); }
    EXPECT_TRUE(at::equal(output, at::full({comm.size()}, 1.0)));
  });
}

TEST(CommunicatorRulesTest, NoGroup) {
  try {
    Communicator comm(nullptr, c10::kCPU);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "expected a process group, got none.");
  }
}

TEST(CommunicatorRulesTest, GroupWithoutABackendForTheDevice) {
  const auto group = GroupOf(MakeManualBackend(2, &Ignore));
  EXPECT_THROW(Communicator(group, c10::kCUDA), c10::ValueError);
}

TEST(CommunicatorRulesTest, Equality) {
  const auto group = GroupOf(MakeManualBackend(2, &Ignore));
  const auto other = GroupOf(MakeManualBackend(2, &Ignore));
  const Communicator comm(group, c10::kCPU);
  EXPECT_TRUE(comm == Communicator(group, c10::kCPU));
  EXPECT_FALSE(comm == Communicator(other, c10::kCPU));
}

TEST(CommunicatorRulesTest, KeepsItsGroupAlive) {
  auto backend = MakeManualBackend(2, &Ignore);
  backend->set_finish_on_wait(true);
  Communicator comm(GroupOf(backend), c10::kCPU);
  backend.reset();
  const at::Tensor output = at::zeros({2});
  comm.AllGather(output, at::full({1}, 3.0))->Wait();
  EXPECT_TRUE(at::equal(output, at::full({2}, 3.0)));
}

TEST(CommunicatorRulesTest, ReturnsBeforeTheCollectiveIsDone) {
  const auto backend = MakeManualBackend(2, &Ignore);
  Communicator comm(GroupOf(backend), c10::kCPU);
  const at::Tensor output = at::zeros({2});
  const auto pending = comm.AllGather(output, at::full({1}, 3.0));
  EXPECT_FALSE(backend->waited(0));
  EXPECT_TRUE(output.isnan().all().item<bool>());
  backend->Finish(0);
  pending->Wait();
  pending->Wait();  // does nothing
  EXPECT_TRUE(at::equal(output, at::full({2}, 3.0)));
}

TEST(CommunicatorRulesTest, KeepsItsTensorsAliveUntilTheWait) {
  const auto backend = MakeManualBackend(2, &Ignore);
  Communicator comm(GroupOf(backend), c10::kCPU);
  at::Tensor output = at::zeros({2});
  const auto pending = comm.AllGather(output, at::full({1}, 3.0));
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(output.getIntrusivePtr());
  output.reset();
  EXPECT_FALSE(weak.expired());
  backend->Finish(0);
  pending->Wait();
  EXPECT_TRUE(weak.expired());
}

TEST(CommunicatorRulesTest, EachWaitThrowsWhatTheCollectiveFailedWith) {
  const auto backend = MakeManualBackend(2, &Ignore);
  Communicator comm(GroupOf(backend), c10::kCPU);
  backend->Fail(0, "the cable is cut");
  backend->Fail(1, "the cable is cut");
  const auto pending = comm.AllGather(at::zeros({2}), at::zeros({1}));
  EXPECT_THROW(pending->Wait(), c10::DistError);
  EXPECT_THROW(pending->Wait(), c10::DistError);
  // Dropped: there is nobody to tell.
  comm.ReduceScatter(at::zeros({1}), at::zeros({2}));
  EXPECT_TRUE(backend->waited(1));
}

TEST(CommunicatorRulesTest, SizesThatDoNotMatchAreABug) {
  Communicator comm(GroupOf(MakeManualBackend(2, &Ignore)), c10::kCPU);
  EXPECT_THROW(comm.AllGather(at::zeros({3}), at::zeros({1})), c10::Error);
  EXPECT_THROW(comm.ReduceScatter(at::zeros({1}), at::zeros({3})), c10::Error);
}

TEST(CommunicatorRulesTest, MissingRankMakesWaitThrowAfterTheTimeout) {
  const auto start = std::chrono::steady_clock::now();
  std::string error;
  RunRanks(
      2,
      [&](RankContext& rank) {
        Communicator comm(rank.group, c10::kCPU);
        if (rank.rank == 1) return;  // does not take part
        try {
          comm.AllGather(at::zeros({2}), at::zeros({1}))->Wait();
        } catch (const std::exception& e) {
          error = e.what();
        }
      },
      {.backend = TestBackend::kInProcess, .timeout = std::chrono::seconds(1)});
  EXPECT_NE(error, "");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

}  // namespace
}  // namespace composable
