// Optimizers see shards: training equals unsharded training, whatever reads the
// whole weights between backward and step; and weights that change between
// forward and backward are an error, as they are without sharding.
#include <ATen/ops/_fused_adamw.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;

// LibTorch's fused operator, which no C++ optimizer class wraps.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      first_.push_back(torch::zeros_like(parameter.detach()));
      second_.push_back(torch::zeros_like(parameter.detach()));
      steps_.push_back(torch::zeros({}));
    }
  }
  void Step() {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      gradients.push_back(parameters_[i].grad());
      steps_[i].add_(1);
    }
    at::_fused_adamw_(parameters_, gradients, first_, second_, {}, steps_,
                      /*lr=*/0.05, /*beta1=*/0.9, /*beta2=*/0.99,
                      /*weight_decay=*/0.01, /*eps=*/1e-8, /*amsgrad=*/false,
                      /*maximize=*/false);
  }

 private:
  std::vector<Tensor> parameters_, first_, second_, steps_;
};

template <typename Optimizer, typename Options>
std::function<std::function<void()>(const std::vector<Tensor>&)> Stock(
    Options options) {
  return [options](const std::vector<Tensor>& parameters) {
    auto optimizer = std::make_shared<Optimizer>(parameters, options);
    return [optimizer] { optimizer->step(); };
  };
}

struct OptimizerCase {
  std::string name;
  // Gives the function that makes a step.
  std::function<std::function<void()>(const std::vector<Tensor>&)> make;
  // Vectorised operators round differently at the ends of a tensor, and a
  // shard's ends are elsewhere.
  double tolerance = 0;
};

const std::vector<OptimizerCase>& Optimizers() {
  using namespace torch::optim;  // NOLINT
  static const auto* cases = new std::vector<OptimizerCase>{
      {"SGD", Stock<SGD>(SGDOptions(0.05))},
      {"Momentum",
       Stock<SGD>(
           SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.1))},
      {"AdamW", Stock<AdamW>(AdamWOptions(0.05))},
      {"AmsgradAdam", Stock<Adam>(AdamOptions(0.05).amsgrad(true))},
      {"RMSprop", Stock<RMSprop>(RMSpropOptions(0.05))},
      {"Adagrad", Stock<Adagrad>(AdagradOptions(0.05))},
      {"FusedAdamW",
       [](const std::vector<Tensor>& parameters) -> std::function<void()> {
         auto optimizer = std::make_shared<FusedAdamW>(parameters);
         return [optimizer] { optimizer->Step(); };
       },
       1e-5},
  };
  return *cases;
}

enum class Keep { kDefault, kReshard, kKeep };

class OptimizerTest
    : public testing::TestWithParam<std::tuple<size_t, Groups, Keep>> {
 protected:
  const OptimizerCase& optimizer() const {
    return Optimizers()[std::get<0>(GetParam())];
  }
  void ShardModel(Mlp& model, const RankContext& rank) const {
    auto options = rank.options();
    const Keep keep = std::get<2>(GetParam());
    if (keep != Keep::kDefault) {
      options.reshard_after_forward(keep == Keep::kReshard);
    }
    Shard(model, std::get<1>(GetParam()), options);
  }
};

std::string OptimizerTestName(
    const testing::TestParamInfo<OptimizerTest::ParamType>& info) {
  const char* keep[] = {"Default", "Reshard", "Keep"};
  return Optimizers()[std::get<0>(info.param)].name +
         Name(std::get<1>(info.param)) +
         keep[static_cast<int>(std::get<2>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(
    All, OptimizerTest,
    testing::Combine(testing::Range<size_t>(0, Optimizers().size()),
                     testing::Values(Groups::kOne, Groups::kPerModule),
                     testing::Values(Keep::kDefault, Keep::kReshard,
                                     Keep::kKeep)),
    OptimizerTestName);

TEST_P(OptimizerTest, NoGradForwardBetweenBackwardAndStep) {
  RunRanks(2, [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardModel(sharded, rank);
    const auto plain_step = optimizer().make(plain->parameters());
    const auto step = optimizer().make(sharded->parameters());
    for (int i = 0; i < 4; ++i) {
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(
          rank, plain, sharded,
          [&](Mlp& model, int r) { return MlpLoss(model, 10 * i + r); },
          optimizer().tolerance);
      {
        const torch::NoGradGuard no_grad;
        MlpLoss(sharded, 1000);  // leaves all groups gathered
      }
      plain_step();
      step();
      // Evaluation reads the new weights too.
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::allclose(MlpLoss(sharded, 1001), MlpLoss(plain, 1001),
                                  optimizer().tolerance, 0));
    }
    ExpectParameters(*sharded, *plain, optimizer().tolerance);
  });
}

TEST_P(OptimizerTest, StepBetweenForwardAndBackwardIsAutogradsOwnError) {
  RunRanks(2, [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    ShardModel(sharded, rank);
    const auto plain_step = optimizer().make(plain->parameters());
    const auto step = optimizer().make(sharded->parameters());
    BackwardOfAllRanks(*plain, 2, [&, &plain = plain](int r) {
      MlpLoss(plain, r).backward();
    });
    MlpLoss(sharded, rank.rank).backward();
    // LibTorch itself does not notice all of these optimizers; shards do.
    Tensor loss = MlpLoss(sharded, 5);
    step();
    plain_step();
    ExpectThrows([&] { loss.backward(); },
                 {"modified by an inplace operation"});
    // Training goes on as if that backward had not been.
    for (int i = 0; i < 2; ++i) {
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(
          rank, plain, sharded,
          [&](Mlp& model, int r) { return MlpLoss(model, 10 * i + r); },
          optimizer().tolerance);
      plain_step();
      step();
    }
  });
}

// Other ways to write to shards, each while the groups are gathered.
struct Write {
  std::string name;
  std::function<void(Tensor& parameter)> write;
};

const std::vector<Write>& Writes() {
  static const auto* writes = new std::vector<Write>{
      {"Add", [](Tensor& p) { p.add_(1); }},
      {"DataMul", [](Tensor& p) { p.data().mul_(2); }},
      {"DetachZero", [](Tensor& p) { p.detach().zero_(); }},
      {"Copy", [](Tensor& p) { p.copy_(torch::ones_like(p)); }},
      {"Foreach", [](Tensor& p) { at::_foreach_mul_({p}, 3); }},
      {"Out", [](Tensor& p) { torch::mul_out(p, p.clone(), p.clone() + 1); }},
      {"View", [](Tensor& p) { p.view({-1}).fill_(0.5); }},
      {"Init", [](Tensor& p) { torch::nn::init::constant_(p, 0.25); }},
      {"Inference",
       [](Tensor& p) {
         const c10::InferenceMode inference;
         p.add_(1);
       }},
  };
  return *writes;
}

class WriteTest : public testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(All, WriteTest,
                         testing::Range<size_t>(0, Writes().size()),
                         [](const auto& info) {
                           return Writes()[info.param].name;
                         });

TEST_P(WriteTest, IsSeenByTheNextForward) {
  RunRanks(2, [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, Groups::kPerModule,
          rank.options().reshard_after_forward(false));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(MlpLoss(sharded, 1), MlpLoss(plain, 1)));
    for (auto& parameter : plain->parameters()) {
      Writes()[GetParam()].write(parameter);
    }
    for (auto& parameter : sharded->parameters()) {
      Writes()[GetParam()].write(parameter);
    }
    EXPECT_TRUE(torch::equal(MlpLoss(sharded, 1), MlpLoss(plain, 1)));
  });
}

TEST(RawWriteTest, IsSeenAfterMarkDirty) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handle =
        fully_shard(sharded, rank.options().reshard_after_forward(false));
    const torch::NoGradGuard no_grad;
    const Tensor before = MlpLoss(sharded, 1);
    for (auto& parameter : sharded->parameters()) {
      auto* data = parameter.data_ptr<float>();
      std::fill(data, data + parameter.numel(), 0.5F);
    }
    for (auto& parameter : plain->parameters()) parameter.fill_(0.5);
    handle.mark_dirty();
    EXPECT_TRUE(torch::equal(MlpLoss(sharded, 1), MlpLoss(plain, 1)));
    EXPECT_FALSE(torch::equal(MlpLoss(sharded, 1), before));
  });
}

}  // namespace
}  // namespace composable
