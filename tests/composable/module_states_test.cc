// Where modules start: rank 0's values on all ranks, or an error; and buffers
// later on.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "state/initial_values.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

struct WithBuffersImpl : Module {
  WithBuffersImpl()
      : fc(register_module("fc", Linear(5, 7))),
        norm(register_module("norm", BatchNorm1d(7))),
        flags(register_buffer("flags", torch::zeros({3}, torch::kBool))) {}
  Tensor forward(const Tensor& x) { return norm(fc(x)); }
  Linear fc;
  BatchNorm1d norm;
  Tensor flags;
};
TORCH_MODULE(WithBuffers);

// Ranks are given other seeds, so every value differs.
WithBuffers MakeWithBuffers(int64_t seed) {
  WithBuffers model;
  const torch::NoGradGuard no_grad;
  int64_t i = 0;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(Input(100 * seed + i++, parameter.sizes()));
  }
  model->norm->running_mean.fill_(seed);
  model->norm->num_batches_tracked.fill_(seed);
  model->flags[1].fill_(seed != 0);
  return model;
}

class SyncModuleStatesTest
    : public testing::TestWithParam<std::tuple<int, Groups>> {};

INSTANTIATE_TEST_SUITE_P(All, SyncModuleStatesTest,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(Groups::kOne,
                                                          Groups::kPerModule)),
                         [](const auto& info) {
                           return Name(std::get<1>(info.param)) +
                                  std::to_string(std::get<0>(info.param));
                         });

TEST_P(SyncModuleStatesTest, RankZerosValuesAreEverybodys) {
  const auto [world_size, groups] = GetParam();
  RunRanks(world_size, [&, groups = groups](RankContext& rank) {
    WithBuffers plain = MakeWithBuffers(0);
    WithBuffers model = MakeWithBuffers(rank.rank);
    Shard(model, groups, rank.options());
    ExpectParameters(*model, *plain);
    for (const auto& item : plain->named_buffers()) {
      EXPECT_TRUE(
          torch::equal(model->named_buffers()[item.key()], item.value()))
          << item.key();
    }
    // The members that a program keeps are the buffers still.
    EXPECT_TRUE(model->flags.is_same(model->named_buffers()["flags"]));
    const auto weights = full_state_dict(model);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(weights[item.key()], item.value()));
    }
  });
}

// Other dtypes, strides and a frozen parameter travel as they are, -0 and NaN
// included.
TEST(SyncModuleStatesDetails, AnyBitsOfAnyDtype) {
  RunRanks(2, [](RankContext& rank) {
    struct OddImpl : Module {
      explicit OddImpl(int r)
          : half(register_parameter("half",
                                    Input(r, {7, 3}).to(torch::kBFloat16))),
            whole(register_parameter("whole", torch::full({5}, r, torch::kLong),
                                     /*requires_grad=*/false)),
            turned(register_parameter(
                "turned",
                Input(r, {3, 5}).t().clone(torch::MemoryFormat::Preserve))),
            odd(register_parameter(
                "odd", torch::tensor({r == 0 ? -0.0F : 1.0F, std::nanf("")}))) {
      }
      Tensor half, whole, turned, odd;
    };
    const auto plain = std::make_shared<OddImpl>(0);
    const auto model = std::make_shared<OddImpl>(rank.rank);
    fully_shard(model, rank.options());
    const auto weights = full_state_dict(model);
    for (const auto& item : plain->named_parameters()) {
      const Tensor mine = weights[item.key()].contiguous();
      const Tensor expected = item.value().detach().contiguous();
      ASSERT_EQ(mine.nbytes(), expected.nbytes());
      EXPECT_EQ(std::memcmp(mine.const_data_ptr(), expected.const_data_ptr(),
                            mine.nbytes()),
                0)
          << item.key();
    }
  });
}

// Rank 0 alone has loaded a model; the others never had its memory.
TEST(SyncModuleStatesDetails, OthersMayBeOnTheMetaDevice) {
  RunRanks(3, [](RankContext& rank) {
    WithBuffers plain = MakeWithBuffers(0);
    WithBuffers model(nullptr);
    if (rank.rank == 0) {
      model = MakeWithBuffers(0);
    } else {
      const MetaDevice meta;
      model = WithBuffers();
    }
    fully_shard(model->fc, rank.options());
    fully_shard(model, rank.options());
    ExpectParameters(*model, *plain);
    for (const auto& item : plain->named_buffers()) {
      EXPECT_TRUE(
          torch::equal(model->named_buffers()[item.key()], item.value()));
    }
    ExpectSameBackward(
        rank, plain, model,
        [](WithBuffers& m, int r) {
          m->eval();
          return m(Input(r, {4, 5})).pow(2).sum();
        },
        1e-5);
  });
}

// Rank 0's lack of values is everybody's.
TEST(SyncModuleStatesDetails, RankZeroOnTheMetaDeviceLeavesAllWithoutValues) {
  RunRanks(2, [](RankContext& rank) {
    Linear model(nullptr);
    if (rank.rank == 0) {
      const MetaDevice meta;
      model = Linear(3, 3);
    } else {
      model = Linear(3, 3);
    }
    fully_shard(model, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] {
          model(Input(1, {2, 3}));
        },
        {"'weight', 'bias'", "materialize"});
  });
}

TEST(CheckModuleStatesTest, NamesWhatDiffersOnAllRanks) {
  RunRanks(3, [](RankContext& rank) {
    const auto options = rank.options().sync_module_states(false);
    WithBuffers model = MakeWithBuffers(0);
    if (rank.rank == 2) {
      const torch::NoGradGuard no_grad;
      model->fc->bias[3].add_(1e-3);
      model->norm->running_var[0].fill_(2);
    }
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(model, options); },
        {"fully_shard: ranks start with other values",
         "'fc.bias' (ranks 2), 'norm.running_var' (ranks 2)",
         "sync_module_states(true)", "check_module_states(false)"});
    // Nothing has changed, and the ranks go on together.
    EXPECT_EQ(fully_shard.state(model), nullptr);
    EXPECT_FALSE(IsShard(model->parameters()[0]));
    fully_shard(model, rank.options());
    WithBuffers plain = MakeWithBuffers(0);
    ExpectParameters(*model, *plain);
  });
}

TEST(CheckModuleStatesTest, EqualValuesPassAndOthersMayBeWanted) {
  RunRanks(2, [](RankContext& rank) {
    WithBuffers equal = MakeWithBuffers(3);
    EXPECT_NO_THROW(
        fully_shard(equal, rank.options().sync_module_states(false)));
    WithBuffers plain = MakeWithBuffers(rank.rank);
    WithBuffers other = MakeWithBuffers(rank.rank);
    fully_shard(
        other,
        rank.options().sync_module_states(false).check_module_states(false));
    ExpectParameters(*other, *plain);  // this rank's own rows
    EXPECT_EQ(other->norm->running_mean[0].item<float>(), rank.rank);
  });
}

// A rank that throws before the collective does not leave others for ever.
TEST(SyncModuleStatesDetails, AnErrorOnOneRankEndsTheOthersInTime) {
  std::string error;
  RunRanksOptions options;
  options.timeout = std::chrono::seconds(2);
  RunRanks(
      2,
      [&](RankContext& rank) {
        Linear model(3, 3);
        if (rank.rank == 1) {
          ExpectThrows<c10::ValueError>(
              [&] { fully_shard(model, rank.options().limit_all_gathers(0)); },
              {"limit_all_gathers"});
          return;
        }
        error = "none";
        try {
          fully_shard(model, rank.options());
        } catch (const c10::Error& thrown) {
          error = thrown.what_without_backtrace();
        }
        EXPECT_FALSE(IsShard(model->parameters()[0]));
      },
      options);
  EXPECT_NE(error.find("sync_module_states of torch::nn::LinearImpl with "
                       "'weight'"),
            std::string::npos)
      << error;
}

// What HSDP does over its replicas.
TEST(BroadcastShardsTest, GivesAllRanksTheShardsOfRankZero) {
  RunRanks(2, [](RankContext& rank) {
    // One rank's shards of a world of one are the same rows on each replica.
    RunRanks(1, [&](RankContext& alone) {
      Linear plain(3, 5);
      Linear model(3, 5);
      const torch::NoGradGuard no_grad;
      plain->weight.fill_(1);
      plain->bias.fill_(2);
      model->weight.fill_(rank.rank + 1);
      model->bias.fill_(2 * (rank.rank + 1));
      fully_shard(model, alone.options());
      Communicator replicas(rank.group, c10::kCPU);
      BroadcastShards(replicas, *fully_shard.state(model)->group(), "Linear");
      ExpectParameters(*model, *plain);
    });
  });
}

class SyncBuffersTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, SyncBuffersTest, testing::Values(1, 2, 3));

TEST_P(SyncBuffersTest, BroadcastAndMean) {
  RunRanks(GetParam(), [](RankContext& rank) {
    WithBuffers model = MakeWithBuffers(0);
    fully_shard(model, rank.options());
    for (int r = 0; r <= rank.rank; ++r) {
      model->train();
      model(Input(rank.rank, {4, 5}));
    }
    // By hand: the mean over ranks of what each has.
    const Tensor mean = model->norm->running_mean.to(torch::kDouble);
    Communicator(rank.group, c10::kCPU)
        .AllReduce(mean, Communicator::Reduction::kSum);
    const int64_t own_batches =
        model->norm->num_batches_tracked.item<int64_t>();
    EXPECT_EQ(own_batches, rank.rank + 1);
    sync_buffers(model, BufferSync::kMean);
    EXPECT_TRUE(torch::equal(model->norm->running_mean,
                             (mean / rank.world_size).to(torch::kFloat)));
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 1);
    model->norm->running_var.fill_(rank.rank + 5);
    model->flags.fill_(rank.rank == 0);
    sync_buffers(model);
    EXPECT_TRUE(torch::equal(model->norm->running_var, torch::full({7}, 5.0F)));
    EXPECT_TRUE(model->flags.all().item<bool>());
  });
}

TEST(SyncBuffersDetails, NothingToDoNeedsNoProcessGroup) {
  Linear model(3, 3);
  EXPECT_NO_THROW(sync_buffers(model));
  BatchNorm1d norm(3);
  ExpectThrows<c10::ValueError>([&] { sync_buffers(norm); },
                                {"no default process group"});
}

}  // namespace
}  // namespace composable
