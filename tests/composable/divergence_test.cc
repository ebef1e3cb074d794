// Ranks that go different ways: every rank throws, and names what each was
// about to do.
//
// This file is one program of two kinds: a test, which starts it again as two
// ranks, and, where a launcher has set RANK, one of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "composable/composable.h"
#include "state/fsdp_state.h"
#include "tests/support/counting_store.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using Clock = std::chrono::steady_clock;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t hidden = 8)
      : fc1(register_module("fc1", torch::nn::Linear(4, hidden))),
        fc2(register_module("fc2", torch::nn::Linear(hidden, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    return fc2->forward(torch::relu(fc1->forward(x)));
  }
  torch::nn::Linear fc1;
  torch::nn::Linear fc2;
};
TORCH_MODULE(Net);

Net Sharded(const ProcessGroupPtr& group, int64_t hidden = 8,
            bool sync_module_states = true) {
  auto net = RankContext::Seeded(7, [&] { return Net(hidden); });
  const auto options = FullyShardOptions()
                           .mesh(group)
                           .sync_module_states(sync_module_states)
                           .check_module_states(sync_module_states);
  fully_shard(net->fc1, options);
  fully_shard(net->fc2, options);
  fully_shard(net, options);
  return net;
}

at::Tensor Batch() { return torch::ones({2, 4}); }

void TrainStep(Net& net) {
  net->forward(Batch()).pow(2).sum().backward();
  clip_grad_norm_(net->parameters(), 1.0);
}

void Evaluate(Net& net) {
  const torch::NoGradGuard no_grad;
  net->forward(Batch());
}

void PrintNorm(const torch::nn::Linear& layer) {
  const torch::NoGradGuard no_grad;
  std::cout << layer->weight.norm().item<float>() << std::endl;
}

std::vector<at::Tensor> ShardsAndGradients(const Net& net) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& shard : net->parameters()) {
    all.push_back(shard.detach().clone());
    all.push_back(shard.grad().clone());
  }
  return all;
}

void ExpectEqual(const std::vector<at::Tensor>& a,
                 const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i]));
}

bool CanBeRead(const torch::nn::Linear& layer) {
  return fully_shard.state(layer)->group()->sharded_state() ==
         ShardedState::kUnsharded;
}

void ExpectAllSharded(const Net& net) {
  EXPECT_TRUE(fully_shard.state(net->fc1)->group()->is_sharded());
  EXPECT_TRUE(fully_shard.state(net->fc2)->group()->is_sharded());
}

constexpr const char* kDifferent =
    "Ranks are about to run different collectives over one process group "
    "(their ";

struct Result {
  std::string error;
  std::string next_error;  // of a later use of the same process group
  Clock::duration time{};
};

// Trains three steps on every rank, then runs `diverge`. Expects that it does
// not touch what the rank trains.
std::vector<Result> Diverge(
    int world_size,
    const std::function<void(const RankContext&, Net&)>& diverge,
    milliseconds timeout = std::chrono::seconds(20)) {
  std::vector<Result> results(world_size);
  RunRanks(
      world_size,
      [&](RankContext& rank) {
        Net net = Sharded(rank.group);
        for (int i = 0; i < 3; ++i) TrainStep(net);
        const auto before = ShardsAndGradients(net);
        Result& result = results[rank.rank];
        const auto start = Clock::now();
        result.error = ErrorOf<c10::DistError>([&] { diverge(rank, net); });
        result.time = Clock::now() - start;
        ExpectEqual(ShardsAndGradients(net), before);
        const auto again = Clock::now();
        if (result.error != "no error") {
          result.next_error = ErrorOf<c10::DistError>([&] { Evaluate(net); });
          EXPECT_LT(Clock::now() - again, milliseconds(500));
        }
      },
      {.timeout = timeout});
  return results;
}

void ExpectOnAll(const std::vector<Result>& results,
                 const std::string& parties) {
  for (const Result& result : results) {
    EXPECT_THAT(result.error,
                AllOf(StartsWith(kDifferent), HasSubstr(parties),
                      HasSubstr("make a new one and shard the module over it, "
                                "or start the job again.")));
    EXPECT_EQ(result.error, results[0].error);
    EXPECT_THAT(result.next_error,
                AllOf(HasSubstr(" can't run all-gather of 'fc1', because its "
                                "process group failed before: "),
                      HasSubstr(result.error)));
    EXPECT_LT(result.time, std::chrono::seconds(10));
  }
}

TEST(DivergenceTest, OtherGroupsOutsideAnyForward) {
  ExpectOnAll(
      Diverge(2,
              [](const RankContext& rank, Net& net) {
                try {
                  PrintNorm(rank.rank == 0 ? net->fc2 : net->fc1);
                } catch (const c10::DistError&) {
                  EXPECT_FALSE(CanBeRead(net->fc1));
                  EXPECT_FALSE(CanBeRead(net->fc2));
                  throw;
                }
              }),
      "rank 0: all-gather of 'fc2'; rank 1: all-gather of 'fc1'. What uses "
      "sharded parameters, such as printing a norm, must be done by every "
      "rank, and in the same order.");
}

// The other rank goes on with its next iteration.
TEST(DivergenceTest, ANormPrintedByOneRank) {
  ExpectOnAll(Diverge(2,
                      [](const RankContext& rank, Net& net) {
                        if (rank.rank == 0) PrintNorm(net->fc2);
                        for (int i = 0; i < 3; ++i) TrainStep(net);
                      }),
              "rank 0: all-gather of 'fc2'; rank 1: all-gather of 'fc1'.");
}

// The norm of the group that everybody gathers next: what comes after differs.
TEST(DivergenceTest, ANormOfTheGroupThatIsNext) {
  const auto results = Diverge(2, [](const RankContext& rank, Net& net) {
    if (rank.rank == 0) {
      PrintNorm(net->fc1);
      for (auto& parameter : net->fc1->parameters()) {
        const torch::NoGradGuard no_grad;
        parameter.mul_(1);  // gathered before, so it is stale
      }
    }
    for (int i = 0; i < 3; ++i) TrainStep(net);
  });
  ExpectOnAll(results,
              "rank 0: all-gather of 'fc1'; rank 1: reduce-scatter of 'fc2'.");
}

TEST(DivergenceTest, ANormPrintedByOneRankWhenTheOtherHasDone) {
  const auto results = Diverge(
      2,
      [](const RankContext& rank, Net& net) {
        if (rank.rank == 0) PrintNorm(net->fc2);
      },
      milliseconds(2000));
  EXPECT_THAT(
      results[0].error,
      AllOf(StartsWith("Ranks did not agree on the "),
            HasSubstr(" collective of their process group within 2000 ms: rank "
                      "0: all-gather of 'fc2'; rank 1: no answer. Of rank 1 "
                      "nothing was heard: "),
            HasSubstr(" The last one of rank 0 before is all-reduce of "
                      "'clip_grad_norm_'.")));
  EXPECT_LT(results[0].time, milliseconds(4000));
  EXPECT_EQ(results[1].error, "no error");
}

TEST(DivergenceTest, OneRankOfThreeSkipsALayer) {
  ExpectOnAll(Diverge(3,
                      [](const RankContext& rank, Net& net) {
                        if (rank.rank == 1) {
                          PrintNorm(net->fc1);
                          PrintNorm(net->fc1);
                          net->fc1->forward(Batch()).sum().backward();
                        } else {
                          TrainStep(net);
                        }
                      }),
              "ranks 0, 2: reduce-scatter of 'fc2'; rank 1: reduce-scatter of "
              "'fc1'.");
}

TEST(DivergenceTest, OneRankClips) {
  ExpectOnAll(
      Diverge(2,
              [](const RankContext& rank, Net& net) {
                if (rank.rank == 1) clip_grad_norm_(net->parameters(), 1.0);
                Evaluate(net);
              }),
      "rank 0: all-gather of 'fc1'; rank 1: all-reduce of 'clip_grad_norm_'.");
}

TEST(DivergenceTest, UnequalModulesAreFoundAtTheFirstGather) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](RankContext& rank) {
    Net net = Sharded(rank.group, rank.rank == 0 ? 8 : 16,
                      /*sync_module_states=*/false);
    errors[rank.rank] = ErrorOf<c10::DistError>([&] { TrainStep(net); });
    ExpectAllSharded(net);
  });
  EXPECT_THAT(
      errors[0],
      AllOf(HasSubstr("(their 1st): rank 0: all-gather of 'fc1' ("),
            HasSubstr(" bytes per rank as Byte, sharded module 1, plan "),
            HasSubstr("; rank 1: all-gather of 'fc1' ("),
            HasSubstr("). Shard the same modules, with the same parameters and "
                      "in the same order, on every rank.")));
  EXPECT_EQ(errors[1], errors[0]);
}

TEST(DivergenceTest, UnequalModulesAreFoundWhenTheyAreSharded) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](RankContext& rank) {
    errors[rank.rank] = ErrorOf<c10::DistError>(
        [&] { Sharded(rank.group, rank.rank == 0 ? 8 : 16); });
  });
  EXPECT_THAT(
      errors[0],
      AllOf(HasSubstr("rank 0: broadcast of 'sync_module_states of "
                      "torch::nn::LinearImpl with 'weight''"),
            HasSubstr("Shard the same modules, with the same parameters "
                      "and in the same order, on every rank.")));
  EXPECT_EQ(errors[1], errors[0]);
}

struct OtherNameImpl : torch::nn::Module {
  explicit OtherNameImpl(const std::string& name)
      : weight(register_parameter(name, torch::ones({4, 4}))) {}
  at::Tensor weight;
};
TORCH_MODULE(OtherName);

TEST(DivergenceTest, OtherNamesOfParameters) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](RankContext& rank) {
    OtherName module(rank.rank == 0 ? "scale" : "shift");
    fully_shard(
        module,
        rank.options().sync_module_states(false).check_module_states(false));
    errors[rank.rank] = ErrorOf<c10::DistError>([&] { module->weight.sum(); });
  });
  EXPECT_THAT(errors[0],
              AllOf(HasSubstr("rank 0: all-gather of '(root)' (32 bytes"),
                    HasSubstr("; rank 1: all-gather of '(root)' (32 bytes")));
  EXPECT_EQ(errors[1], errors[0]);
}

TEST(DivergenceTest, EqualTreesOverOneProcessGroup) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](RankContext& rank) {
    Net first = Sharded(rank.group);
    Net second = Sharded(rank.group);
    for (int i = 0; i < 4; ++i) {
      TrainStep(first);
      TrainStep(second);
    }
    errors[rank.rank] = ErrorOf<c10::DistError>(
        [&] { Evaluate(rank.rank == 0 ? first : second); });
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 0: all-gather of 'fc1' ("),
                               HasSubstr("sharded module 1, plan "),
                               HasSubstr("; rank 1: all-gather of 'fc1' ("),
                               HasSubstr("sharded module 3, plan ")));
  EXPECT_EQ(errors[1], errors[0]);
}

TEST(DivergenceTest, ANewProcessGroupTrainsOn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunRanks(2, [&](RankContext& rank) {
    Net net = Sharded(rank.group);
    TrainStep(net);
    EXPECT_THAT(ErrorOf<c10::DistError>(
                    [&] { PrintNorm(rank.rank == 0 ? net->fc1 : net->fc2); }),
                StartsWith(kDifferent));
    Net again = Sharded(init_process_group(store, rank.rank, 2));
    for (int i = 0; i < 3; ++i) TrainStep(again);
  });
}

TEST(AgreedOrderTest, TrainingAndEvaluationCostFewExchanges) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  RunRanks(2, [&](RankContext& rank) {
    const auto store = c10::make_intrusive<CountingStore>(shared);
    Net net = Sharded(init_process_group(store, rank.rank, 2));
    for (int i = 0; i < 3; ++i) TrainStep(net);
    store->Reset();
    for (int i = 0; i < 5; ++i) TrainStep(net);
    EXPECT_EQ(store->calls(), 0);
    for (int round = 0; round < 3; ++round) {
      store->Reset();
      for (int i = 0; i < 3; ++i) Evaluate(net);
      for (int i = 0; i < 3; ++i) TrainStep(net);
      // An exchange makes at most 13 calls.
      EXPECT_LE(store->calls(), (round == 0 ? 5 : 2) * 13) << round;
    }
  });
}

// --- Processes

const auto kTimeout = milliseconds(4000);

// What each rank runs: argv[1] says who does what.
int RunAsRank(const std::string& way) {
  const auto group =
      init_process_group(ProcessGroupOptions().timeout(kTimeout));
  const int printing = way == "host ends" ? 1 : 0;
  Net net = Sharded(group);
  for (int i = 0; i < 3; ++i) TrainStep(net);
  const auto start = Clock::now();
  const std::string error = ErrorOf<c10::DistError>([&] {
    if (rank() == printing) PrintNorm(net->fc2);
    if (way == "others go on") {
      for (int i = 0; i < 3; ++i) TrainStep(net);
    }
  });
  std::cout << (Clock::now() - start < kTimeout + milliseconds(2000)
                    ? "in time: "
                    : "late: ")
            << error << std::endl;
  return 0;
}

TEST(DivergenceOfProcessesTest, OthersGoOn) {
  const ProcessResult run =
      RunRankProcesses(2, {ThisProgram(), "others go on"});
  ASSERT_EQ(run.exit_code, 0) << run.output();
  for (const char* rank : {"0", "1"}) {
    EXPECT_THAT(run.out, HasSubstr(std::string("[rank") + rank +
                                   "]: in time: " + kDifferent))
        << run.output();
  }
  EXPECT_THAT(run.out, HasSubstr("rank 0: all-gather of 'fc2'; rank 1: "
                                 "all-gather of 'fc1'."));
}

TEST(DivergenceOfProcessesTest, OtherHasEnded) {
  const ProcessResult run = RunRankProcesses(2, {ThisProgram(), "other ends"});
  ASSERT_EQ(run.exit_code, 0) << run.output();
  EXPECT_THAT(run.out,
              AllOf(HasSubstr("[rank0]: in time: Ranks did not agree on the "),
                    HasSubstr("rank 0: all-gather of 'fc2'; rank 1: no answer"),
                    HasSubstr("[rank1]: in time: no error")))
      << run.output();
}

TEST(DivergenceOfProcessesTest, HostOfTheStoreHasEnded) {
  const ProcessResult run = RunRankProcesses(2, {ThisProgram(), "host ends"});
  ASSERT_EQ(run.exit_code, 0) << run.output();
  EXPECT_THAT(run.out, AllOf(HasSubstr("[rank1]: in time: "),
                             HasSubstr("all-gather of 'fc2'"),
                             HasSubstr("[rank0]: in time: no error")))
      << run.output();
}

}  // namespace
}  // namespace composable

int main(int argc, char** argv) {
  if (std::getenv("RANK") != nullptr && argc == 2) {
    return composable::RunAsRank(argv[1]);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
