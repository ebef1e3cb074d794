// Training a small GPT sharded gives the numbers of training it unsharded: of
// one process on the concatenated batch, and, bit by bit on two ranks, of a
// data-parallel loop written by hand.
//
// Every comparison is also made with odd sizes: hardly any parameter then has a
// number of rows that the ranks divide.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "composable/composable.h"
#include "examples/gpt.h"
#include "state/fsdp_state.h"
#include "tests/support/data_parallel_reference.h"
#include "tests/support/ranks.h"
#include "tests/support/shards.h"

namespace composable {
namespace {

using examples::GPT;
using examples::GPTConfig;

constexpr int64_t kSteps = 20;
constexpr int64_t kBatch = 2;  // sequences per rank
constexpr uint64_t kSeed = 7;

// Losses of sharded and unsharded runs: the same sums in another order, about
// 1e-7 per step.
constexpr double kLossTolerance = 1e-5;
// LibTorch adds up a norm in float, ours is added up in double: a few 1e-7.
constexpr double kNormTolerance = 1e-5;
// Largest difference of a weight after all steps. SGD adds gradients up, which
// differ by rounding, to weights of up to 4, whose last bit is worth 5e-7.
constexpr double kSGDTolerance = 2e-6;
// AdamW moves every weight by about its rate at each step, however small the
// gradient is, and so enlarges the rounding of small ones. A thousandth of the
// path is left to that. A wrong sign, rank or row is worth the whole path; a
// wrong scale AdamW hides, which is why SGD is here too.
constexpr double kAdamWPath = 1e-3 * kSteps;
constexpr double kAdamWTolerance = kAdamWPath / 1000;

enum class Optimizer { kAdamW, kSGD };

struct Case {
  std::string name;
  GPTConfig config;
  Optimizer optimizer = Optimizer::kAdamW;
  double clip = 0;  // largest norm; 0: no clipping
  int world_size = 2;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const GPTConfig kEven = {
    .vocab = 64, .seq = 32, .layers = 4, .dim = 64, .heads = 4};
const GPTConfig kOdd = {
    .vocab = 61, .seq = 29, .layers = 3, .dim = 63, .heads = 3};

// Sequences that can be learned: the next token is three times this one plus 0,
// 1 or 2. Shape [kSteps, world_size * kBatch, seq + 1].
at::Tensor DrawBatches(const GPTConfig& config, int world_size) {
  std::mt19937 generator(kSeed);
  const auto draw = [&](int64_t below) {
    return static_cast<int64_t>(generator() % below);
  };
  const int64_t rows = world_size * kBatch;
  at::Tensor batches = torch::empty({kSteps, rows, config.seq + 1}, at::kLong);
  auto* next = batches.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < kSteps * rows; ++row) {
    int64_t token = draw(config.vocab);
    for (int64_t t = 0; t <= config.seq; ++t) {
      *next++ = token;
      token = (3 * token + draw(3)) % config.vocab;
    }
  }
  return batches;
}

// The rows of `rank` in a global batch.
at::Tensor RowsOf(int rank, const at::Tensor& batch) {
  return batch.narrow(0, rank * kBatch, kBatch);
}

// AdamW is the stock one, with LibTorch's own hyperparameters.
std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    Optimizer kind, const torch::nn::Module& model) {
  if (kind == Optimizer::kAdamW) {
    return std::make_unique<torch::optim::AdamW>(model.parameters());
  }
  return std::make_unique<torch::optim::SGD>(
      model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

GPT MakeModel(const GPTConfig& config) {
  return RankContext::Seeded(kSeed, [&] { return GPT(config); });
}

GPT MakeShardedModel(const GPTConfig& config, const RankContext& rank) {
  GPT model = MakeModel(config);
  for (auto& block : *model->blocks) fully_shard(block, rank.options());
  fully_shard(model, rank.options());
  return model;
}

// What a run leaves behind to compare.
struct Result {
  std::vector<double> losses;
  std::vector<double> norms;  // before clipping, if there was any
  StateDict first_gradients;
  StateDict weights;
};

StateDict Weights(const torch::nn::Module& model) {
  StateDict weights;
  for (const auto& item : model.named_parameters()) {
    weights.insert(item.key(), item.value().detach().clone());
  }
  return weights;
}

StateDict Gradients(const torch::nn::Module& model) {
  StateDict gradients;
  for (const auto& item : model.named_parameters()) {
    gradients.insert(item.key(), item.value().grad().clone());
  }
  return gradients;
}

// One process, on the batches of all ranks.
Result TrainUnsharded(const Case& c, const at::Tensor& batches) {
  at::set_num_threads(1);
  Result result;
  GPT model = MakeModel(c.config);
  auto optimizer = MakeOptimizer(c.optimizer, *model);
  for (const at::Tensor& batch : batches.unbind()) {
    at::Tensor loss = model->loss(batch);
    loss.backward();
    if (result.losses.empty()) result.first_gradients = Gradients(*model);
    if (c.clip > 0) {
      result.norms.push_back(
          torch::nn::utils::clip_grad_norm_(model->parameters(), c.clip));
    }
    optimizer->step();
    optimizer->zero_grad();
    result.losses.push_back(loss.item<double>());
  }
  result.weights = Weights(*model);
  return result;
}

double Relative(double a, double b) { return std::abs(a - b) / std::abs(b); }

double Distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// The parameter without what has a gradient of nothing but rounding, which
// AdamW takes for a direction to walk in: the keys' part of attention's bias
// adds the same to all scores of a query, and softmax drops that.
at::Tensor WithoutKeyBias(const std::string& name, const at::Tensor& value) {
  if (name.find("qkv.bias") == std::string::npos) return value;
  const auto parts = value.chunk(3);
  return torch::cat({parts[0], parts[2]});
}

// Expects gradients of this rank's rows to be those of `whole`, within
// `tolerance` of each parameter's largest element.
void ExpectRows(const torch::nn::Module& sharded, const StateDict& whole,
                double tolerance) {
  for (const auto& item : sharded.named_parameters()) {
    const at::Tensor& expected = whole[item.key()];
    const at::Tensor rows = LocalRows(item.value(), expected);
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    ASSERT_EQ(item.value().grad().sizes(), rows.sizes()) << item.key();
    if (rows.numel() == 0) continue;
    EXPECT_LE(Distance(item.value().grad(), rows),
              tolerance * expected.abs().max().item<double>())
        << item.key();
  }
}

// One of the ranks, on its own rows. The losses are those of the rank.
Result TrainSharded(const Case& c, const at::Tensor& batches,
                    const RankContext& rank,
                    const StateDict* first_gradients = nullptr) {
  Result result;
  GPT model = MakeShardedModel(c.config, rank);
  auto optimizer = MakeOptimizer(c.optimizer, *model);
  for (const at::Tensor& batch : batches.unbind()) {
    at::Tensor loss = model->loss(RowsOf(rank.rank, batch));
    loss.backward();
    if (result.losses.empty() && first_gradients != nullptr) {
      ExpectRows(*model, *first_gradients, 1e-5);
    }
    if (c.clip > 0) {
      result.norms.push_back(clip_grad_norm_(model->parameters(), c.clip));
    }
    optimizer->step();
    optimizer->zero_grad();
    result.losses.push_back(loss.item<double>());
  }
  result.weights = full_state_dict(model);
  return result;
}

// --- Against one process on the concatenated batch ---------------------------

class AgainstUnsharded : public testing::TestWithParam<Case> {};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int world_size : {2, 4}) {
    const std::string ranks = std::to_string(world_size) + "Ranks";
    for (const bool odd : {false, true}) {
      Case c;
      c.config = odd ? kOdd : kEven;
      c.world_size = world_size;
      const std::string base = (odd ? "Odd" : "Even") + ranks;
      c.name = "AdamW" + base;
      cases.push_back(c);
      c.name = "AdamWClipped" + base;
      c.clip = 0.5;
      cases.push_back(c);
      c.name = "SGD" + base;
      c.clip = 0;
      c.optimizer = Optimizer::kSGD;
      cases.push_back(c);
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(GPT, AgainstUnsharded, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(AgainstUnsharded, LossesNormsGradientsAndWeights) {
  const Case& c = GetParam();
  const at::Tensor batches = DrawBatches(c.config, c.world_size);
  const Result expected = TrainUnsharded(c, batches);
  std::vector<Result> ranks(c.world_size);
  RunRanks(c.world_size, [&](RankContext& rank) {
    ranks[rank.rank] =
        TrainSharded(c, batches, rank, &expected.first_gradients);
  });

  // The run is one in which something can go wrong.
  EXPECT_LT(expected.losses.back(), 0.95 * expected.losses.front());
  for (int64_t step = 0; step < kSteps; ++step) {
    double mean = 0;
    for (const Result& result : ranks) {
      mean += result.losses[step] / c.world_size;
    }
    EXPECT_LE(Relative(mean, expected.losses[step]), kLossTolerance)
        << "step " << step << ": " << mean << " " << expected.losses[step];
    if (c.clip == 0) continue;
    EXPECT_GT(expected.norms[step], c.clip) << "nothing is clipped";
    for (const Result& result : ranks) {
      EXPECT_LE(Relative(result.norms[step], expected.norms[step]),
                kNormTolerance)
          << "step " << step;
    }
  }
  ASSERT_EQ(ranks[0].weights.size(), expected.weights.size());
  for (const auto& item : expected.weights) {
    const std::string& name = item.key();
    const at::Tensor& weight = ranks[0].weights[name];
    for (const Result& result : ranks) {
      EXPECT_TRUE(torch::equal(result.weights[name], weight)) << name;
    }
    EXPECT_LE(Distance(WithoutKeyBias(name, weight),
                       WithoutKeyBias(name, item.value())),
              c.optimizer == Optimizer::kSGD ? kSGDTolerance : kAdamWTolerance)
        << name;
    EXPECT_LE(Distance(weight, item.value()), kAdamWPath) << name;
  }
}

// --- Against a data-parallel loop, bit by bit --------------------------------

// The padded buffers of a sharded model's groups.
std::vector<data_parallel::FlatGroup> FlatGroups(const GPT& model) {
  std::vector<data_parallel::FlatGroup> groups;
  std::set<const FSDPState*> seen;
  const auto names = model->named_parameters();
  for (const auto& module : model->modules()) {
    const auto state = fully_shard.state(module);
    if (state == nullptr || !seen.insert(state.get()).second) continue;
    for (const auto& segment : state->group()->segments()) {
      data_parallel::FlatGroup flat;
      flat.total_numel = segment.layout.unsharded_numel();
      for (const int index : segment.params) {
        const FSDPParam& param = state->group()->params()[index];
        for (const auto& item : names) {
          if (!item.value().is_same(param.sharded)) continue;
          flat.parameters.push_back(
              {item.key(), param.offset(), param.numel()});
        }
      }
      groups.push_back(std::move(flat));
    }
  }
  return groups;
}

class AgainstDataParallel : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(GPT, AgainstDataParallel,
                         testing::Values(Case{"AdamWEven", kEven},
                                         Case{"AdamWOdd", kOdd},
                                         Case{"SGDOdd", kOdd, Optimizer::kSGD}),
                         [](const auto& info) { return info.param.name; });

TEST_P(AgainstDataParallel, LossesAndWeightsBitByBit) {
  const Case& c = GetParam();
  const at::Tensor batches = DrawBatches(c.config, c.world_size);
  RunRanks(c.world_size, [&](RankContext& rank) {
    const Result sharded = TrainSharded(c, batches, rank);
    const auto groups = FlatGroups(MakeShardedModel(c.config, rank));
    ASSERT_EQ(groups.size(), c.config.layers + 1);

    GPT model = MakeModel(c.config);
    auto optimizer = MakeOptimizer(c.optimizer, *model);
    const auto backend = rank.group->getBackend(c10::DeviceType::CPU);
    for (int64_t step = 0; step < kSteps; ++step) {
      const at::Tensor loss = data_parallel::DataParallelStep(
          *model, *optimizer, *backend, groups,
          [&] { return model->loss(RowsOf(rank.rank, batches[step])); });
      EXPECT_EQ(sharded.losses[step], loss.item<double>()) << "step " << step;
    }
    const StateDict expected = Weights(*model);
    ASSERT_EQ(sharded.weights.size(), expected.size());
    for (const auto& item : expected) {
      EXPECT_TRUE(torch::equal(sharded.weights[item.key()], item.value()))
          << item.key();
    }
  });
}

}  // namespace
}  // namespace composable
