// Whole weights out of sharded modules and into others: bit for bit on any
// number of ranks, and all or nothing.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

struct HeadImpl : Module {
  explicit HeadImpl(const Tensor& shared)
      : weight(register_parameter("weight", shared)) {}
  Tensor weight;
};
TORCH_MODULE(Head);

// Odd rows, buffers, a tied and a frozen weight, bf16, an empty parameter, and
// a part that is left plain.
struct EverythingImpl : Module {
  EverythingImpl()
      : embedding(register_module("embedding", Embedding(7, 5))),
        body(register_module("body", Linear(5, 3))),
        norm(register_module("norm", BatchNorm1d(3))),
        low(register_module("low", Linear(3, 5))),
        frozen(
            register_module("frozen", Linear(LinearOptions(5, 1).bias(false)))),
        plain(register_module("plain", Linear(1, 3))),
        head(register_module("head", Head(embedding->weight))) {
    low->to(torch::kBFloat16);
    frozen->weight.set_requires_grad(false);
    none = register_parameter("none", torch::empty({0, 3}));
    table = register_buffer("table", torch::arange(5));
    norm->running_mean.uniform_();
  }
  Tensor forward(const Tensor& x) {
    Tensor h = norm(body(x));
    h = low(h.to(torch::kBFloat16)).to(torch::kFloat);
    h = frozen(torch::matmul(h, head->weight.t()).narrow(1, 0, 5)) *
        table.sum() / 10;
    return plain(h);
  }
  Embedding embedding;
  Linear body;
  BatchNorm1d norm;
  Linear low, frozen, plain;
  Head head;
  Tensor none, table;
};
TORCH_MODULE(Everything);

Tensor Loss(Everything& model, int64_t seed) {
  return model(Input(seed, {4, 5})).pow(2).mean();
}

// What named_parameters and named_buffers of an unsharded module hold.
StateDict Expected(const Module& module) {
  StateDict result;
  for (const auto& item : module.named_parameters()) {
    result.insert(item.key(), item.value().detach().clone());
  }
  for (const auto& item : module.named_buffers()) {
    result.insert(item.key(), item.value().clone());
  }
  return result;
}

void ExpectEqual(const StateDict& actual, const StateDict& expected) {
  EXPECT_EQ(actual.keys(), expected.keys());
  for (const auto& item : expected) {
    const Tensor* value = actual.find(item.key());
    ASSERT_NE(value, nullptr) << item.key();
    EXPECT_EQ(value->scalar_type(), item.value().scalar_type()) << item.key();
    EXPECT_TRUE(torch::equal(*value, item.value())) << item.key();
    EXPECT_FALSE(value->requires_grad());
  }
}

enum class Cut { kOne, kPerModule, kAllButPlain, kNothing };

void ShardEverything(Everything& model, Cut cut,
                     const FullyShardOptions& options) {
  switch (cut) {
    case Cut::kOne:
      fully_shard(model, options);
      return;
    case Cut::kPerModule:
      ShardEverySubmodule(model, options);
      return;
    case Cut::kAllButPlain:
      fully_shard(model->embedding, options);
      fully_shard({model->body, model->low, model->frozen}, options);
      fully_shard(model->norm, options);
      fully_shard(model->head, options);
      return;
    case Cut::kNothing:
      return;
  }
}

class StateDictTest : public testing::TestWithParam<std::tuple<int, Cut>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  Cut cut() const { return std::get<1>(GetParam()); }
};

std::string StateDictTestName(
    const testing::TestParamInfo<StateDictTest::ParamType>& info) {
  const char* names[] = {"OneGroup", "GroupPerModule", "MixedWithPlain",
                         "Unsharded"};
  return names[static_cast<int>(std::get<1>(info.param))] +
         std::to_string(std::get<0>(info.param));
}

INSTANTIATE_TEST_SUITE_P(
    All, StateDictTest,
    testing::Combine(testing::Values(1, 2, 3, 4),
                     testing::Values(Cut::kOne, Cut::kPerModule,
                                     Cut::kAllButPlain, Cut::kNothing)),
    StateDictTestName);

TEST_P(StateDictTest, IsBitwiseTheUnshardedOne) {
  RunRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Everything(); });
    const StateDict expected = Expected(*plain);
    ShardEverything(sharded, cut(), rank.options());
    const StateDict first = full_state_dict(sharded);
    ExpectEqual(first, expected);
    // The values are copies, and asking changed nothing.
    for (const auto& item : first) Tensor(item.value()).zero_();
    ExpectEqual(full_state_dict(*sharded), expected);
    for (const auto& module : sharded->modules()) {
      const auto state = FindFSDPState(*module);
      if (state == nullptr || state->group() == nullptr) continue;
      EXPECT_TRUE(state->group()->is_sharded());
    }
  });
}

TEST_P(StateDictTest, LoadsIntoThisNumberOfRanks) {
  const auto source = RankContext::Seeded(7, [] { return Everything(); });
  const StateDict expected = Expected(*source);
  RunRanks(world_size(), [&](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Everything(); });
    ShardEverything(model, cut(), rank.options());
    {  // Gathered before loading: must not be believed afterwards.
      const torch::NoGradGuard no_grad;
      model->eval();
      Loss(model, 1);
    }
    load_full_state_dict(model, expected);
    ExpectEqual(full_state_dict(model), expected);
    auto plain = RankContext::Seeded(7, [] { return Everything(); });
    plain->eval();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(Loss(model, 1), Loss(plain, 1)));
  });
}

TEST_P(StateDictTest, TrainingAfterLoadEqualsUnsharded) {
  const auto source = RankContext::Seeded(7, [] { return Everything(); });
  const StateDict weights = Expected(*source);
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Everything(); });
    auto plain = RankContext::Seeded(7, [] { return Everything(); });
    ShardEverything(model, cut(), rank.options());
    load_full_state_dict(model, weights);
    plain->eval();  // one set of running statistics per rank is another matter
    model->eval();
    torch::optim::SGD plain_optimizer(UniqueParameters(*plain), 0.1);
    torch::optim::SGD optimizer(UniqueParameters(*model), 0.1);
    for (int step = 0; step < 3; ++step) {
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      // The same input on all ranks, for the sake of plain parameters.
      Tensor expected = Loss(plain, step);
      expected.backward();
      Tensor loss = Loss(model, step);
      EXPECT_TRUE(torch::allclose(loss, expected, 1e-2, 0));
      loss.backward();
      plain_optimizer.step();
      optimizer.step();
    }
    // The mean of three equal numbers is rounded, coarsely in bf16.
    const double tolerance = world_size() == 3 ? 1e-2 : 1e-5;
    const StateDict trained = full_state_dict(model);
    for (const auto& item : Expected(*plain)) {
      EXPECT_TRUE(torch::allclose(trained[item.key()], item.value(), tolerance,
                                  tolerance))
          << item.key();
    }
    EXPECT_FALSE(torch::allclose(trained["low.weight"], weights["low.weight"],
                                 1e-2, 1e-2));
  });
}

// The second name is in a module that no call covers.
TEST(StateDictDetailsTest, TiedWeightWithAnUnshardedHolder) {
  RunRanks(2, [](RankContext& rank) {
    auto [source, model] = MakePair([] { return Everything(); });
    fully_shard(model->embedding, rank.options());
    const StateDict expected = Expected(*source);
    ExpectEqual(full_state_dict(model), expected);
    StateDict other = Expected(*source);
    for (auto* key : {"embedding.weight", "head.weight"}) {
      other[key] = other[key] + 1;
    }
    load_full_state_dict(model, other);
    ExpectEqual(full_state_dict(model), other);
  });
}

TEST(StateDictMovesTest, AcrossNumbersOfRanksAndBack) {
  auto source = RankContext::Seeded(1, [] { return Everything(); });
  StateDict weights = Expected(*source);
  const StateDict expected = Expected(*source);
  for (const int world_size : {2, 3, 1, 4}) {
    StateDict moved;
    RunRanks(world_size, [&](RankContext& rank) {
      auto model =
          RankContext::Seeded(100 + world_size, [] { return Everything(); });
      ShardEverything(model, Cut::kPerModule, rank.options());
      load_full_state_dict(model, weights);
      const StateDict mine = full_state_dict(model);
      if (rank.rank == world_size - 1) moved = mine;
    });
    ExpectEqual(moved, expected);
    weights = moved;
  }
  // Into a module that was never sharded, as an ordinary checkpoint.
  auto plain = RankContext::Seeded(9, [] { return Everything(); });
  load_full_state_dict(plain, weights);
  ExpectEqual(Expected(*plain), expected);
}

TEST(StateDictErrorsTest, ListsEverythingAndChangesNothing) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Everything(); });
    ShardEverything(model, Cut::kAllButPlain, rank.options());
    const StateDict before = full_state_dict(model);
    StateDict wrong = full_state_dict(model);
    for (const auto& item : wrong) {
      Tensor value = item.value();
      value.zero_();
    }
    wrong.erase("body.weight");
    wrong.erase("norm.running_var");
    wrong.erase("plain.bias");
    wrong.insert("stranger", torch::ones({1}));
    wrong.insert("body.other", torch::ones({1}));
    wrong["low.weight"] = torch::zeros({3, 5});
    wrong["table"] = torch::zeros({6});
    ExpectThrows<c10::ValueError>(
        [&] { load_full_state_dict(model, wrong); },
        {"Everything", "Missing: [body.weight, plain.bias, norm.running_var]",
         "Unexpected: [stranger, body.other]",
         "low.weight (expected [5, 3], got [3, 5])",
         "table (expected [5], got [6])", "Nothing was loaded"});
    ExpectEqual(full_state_dict(model), before);
    // Shapes are no matter of strictness.
    ExpectThrows<c10::ValueError>(
        [&] { load_full_state_dict(model, wrong, /*strict=*/false); },
        {"Missing: []", "Unexpected: []", "low.weight"});
    ExpectEqual(full_state_dict(model), before);
  });
}

TEST(StateDictErrorsTest, NotStrictLoadsWhatFits) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Everything(); });
    ShardEverything(model, Cut::kPerModule, rank.options());
    StateDict expected = full_state_dict(model);
    StateDict part;
    part.insert("body.weight", torch::full({3, 5}, 2.0));
    part.insert("norm.running_mean", torch::full({3}, 3.0));
    part.insert("stranger", torch::ones({1}));
    const LoadResult result =
        load_full_state_dict(model, part, /*strict=*/false);
    EXPECT_EQ(result.unexpected, std::vector<std::string>{"stranger"});
    std::vector<std::string> missing;
    for (const auto& item : expected) {
      if (!part.contains(item.key())) missing.push_back(item.key());
    }
    EXPECT_EQ(result.missing, missing);
    expected["body.weight"] = part["body.weight"];
    expected["norm.running_mean"] = part["norm.running_mean"];
    ExpectEqual(full_state_dict(model), expected);
  });
}

TEST(StateDictDetailsTest, ConvertsTheDtype) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(3, 5); });
    fully_shard(model, rank.options());
    StateDict weights;
    weights.insert("weight", Input(1, {5, 3}).to(torch::kDouble));
    weights.insert("bias", torch::arange(5));
    load_full_state_dict(model, weights);
    const StateDict loaded = full_state_dict(model);
    EXPECT_EQ(loaded["weight"].scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(loaded["weight"], Input(1, {5, 3})));
    EXPECT_TRUE(torch::equal(loaded["bias"], torch::arange(5.0)));
  });
}

TEST(StateDictDetailsTest, BetweenForwardAndBackward) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(sharded, rank.options());
    const StateDict expected = Expected(*plain);
    ExpectSameBackward(rank, plain, sharded, [&](Mlp& model, int r) {
      Tensor loss = MlpLoss(model, r);
      if (model.ptr() == sharded.ptr()) {
        ExpectEqual(full_state_dict(model), expected);
      }
      return loss;
    });
  });
}

TEST(StateDictDetailsTest, KeepsWhatUnshardGathered) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(3, 5); });
    auto handle = fully_shard(model, rank.options());
    handle.unshard();
    full_state_dict(model);
    EXPECT_NO_THROW(model->weight.data_ptr<float>());
    handle.reshard();
  });
}

TEST(StateDictDetailsTest, OptimizerStateStaysInPlace) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(3, 5); });
    fully_shard(model, rank.options());
    const auto shards = model->parameters();
    load_full_state_dict(model, full_state_dict(model));
    for (size_t i = 0; i < shards.size(); ++i) {
      EXPECT_TRUE(model->parameters()[i].is_same(shards[i]));
    }
  });
}

}  // namespace
}  // namespace composable
