// Shapes of the autograd graph that a shard must not notice: views, escapes,
// repeated use, several forwards per backward and the reverse, accumulation,
// and graphs that differ between ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

class GraphTest : public testing::TestWithParam<std::tuple<int, Groups>> {
 protected:
  // One backward of `loss(model, r)`, sharded and not.
  template <typename Make, typename Loss>
  void Check(Make make, Loss loss) {
    ExactRanks(world_size(), [&](RankContext& rank) {
      auto [plain, sharded] = MakePair(make);
      Shard(sharded, groups(), rank.options());
      ExpectSameBackward(rank, plain, sharded, loss);
      // And once more: nothing of the first is left over.
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(rank, plain, sharded, loss);
    });
  }
  int world_size() const { return std::get<0>(GetParam()); }
  Groups groups() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, GraphTest,
                         testing::Combine(testing::Values(2, 3),
                                          testing::Values(Groups::kOne,
                                                          Groups::kPerModule)),
                         [](const auto& info) {
                           return Name(std::get<1>(info.param)) +
                                  std::to_string(std::get<0>(info.param));
                         });

TEST_P(GraphTest, InPlaceOperatorOnViewOfOutput) {
  Check([] { return Mlp(); },
        [](Mlp& model, int r) {
          Tensor h = model->first(Input(r, {4, 5}));
          h.narrow(0, 0, 2).mul_(2);
          h.select(1, 3).add_(1);
          Tensor y = model->second(h);
          y.t().mul_(3);
          return model->third(y).pow(2).sum();
        });
}

// Keeps an intermediate result where the loss finds it.
struct StashImpl : Module {
  StashImpl()
      : first(register_module("first", Linear(5, 7))),
        second(register_module("second", Linear(7, 3))) {}
  Tensor forward(const Tensor& x) {
    stash = torch::tanh(first(x));
    return second(stash);
  }
  Linear first, second;
  Tensor stash;
};
TORCH_MODULE(Stash);

TEST_P(GraphTest, LossFromTensorThatEscapedForward) {
  Check([] { return Stash(); },
        [](Stash& model, int r) {
          model(Input(r, {4, 5}));
          return model->stash.pow(2).sum();
        });
}

TEST_P(GraphTest, LossFromOutputAndEscapedTensor) {
  Check([] { return Stash(); },
        [](Stash& model, int r) {
          const Tensor y = model(Input(r, {4, 5}));
          return y.pow(2).sum() + model->stash.pow(3).sum();
        });
}

TEST_P(GraphTest, ModuleCalledTwice) {
  Check([] { return Mlp(); },
        [](Mlp& model, int r) {
          Tensor h = model->first(Input(r, {4, 5}));
          h = model->second(torch::tanh(model->second(h)));
          return model->third(h).pow(2).sum();
        });
}

TEST_P(GraphTest, TwoForwardsOneBackward) {
  Check([] { return Mlp(); },
        [](Mlp& model, int r) {
          return MlpLoss(model, r) * MlpLoss(model, 100 + r);
        });
}

TEST_P(GraphTest, TwoForwardsThenTwoBackwards) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    for (const int seed : {0, 100}) {
      BackwardOfAllRanks(*plain, rank.world_size, [&, &plain = plain](int r) {
        MlpLoss(plain, seed + r).backward();
      });
    }
    Tensor one = MlpLoss(sharded, rank.rank);
    Tensor two = MlpLoss(sharded, 100 + rank.rank);
    one.backward();
    two.backward();
    ExpectGradients(*sharded, *plain, 0);
  });
}

TEST_P(GraphTest, NoGradForwardBetweenForwardAndBackward) {
  Check([] { return Mlp(); },
        [](Mlp& model, int r) {
          Tensor loss = MlpLoss(model, r);
          const torch::NoGradGuard no_grad;
          MlpLoss(model, 50 + r);
          return loss;
        });
}

TEST_P(GraphTest, RetainedGraphTwice) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    for (int i = 0; i < 2; ++i) {
      BackwardOfAllRanks(*plain, rank.world_size, [&, &plain = plain](int r) {
        MlpLoss(plain, r).backward();
      });
    }
    Tensor loss = MlpLoss(sharded, rank.rank);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    ExpectGradients(*sharded, *plain, 0);
  });
}

TEST_P(GraphTest, GradientOfInputOnlyLeavesParametersAlone) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    const auto input_gradient = [&](Mlp& model) {
      Tensor x = Input(rank.rank, {4, 5}).requires_grad_(true);
      return torch::autograd::grad({model(x).pow(2).sum()}, {x})[0];
    };
    EXPECT_TRUE(torch::equal(input_gradient(sharded), input_gradient(plain)));
    for (const auto& shard : sharded->parameters()) {
      EXPECT_FALSE(shard.grad().defined());
    }
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& model, int r) { return MlpLoss(model, r); });
  });
}

// A second backward inside the first one, over the same groups.
struct NestedBackward : torch::autograd::Function<NestedBackward> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, const std::shared_ptr<Linear>& layer) {
    context->saved_data["x"] = x.detach();
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.get());
    return (*layer)(x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const at::AutoGradMode enable(true);
    Tensor x = context->saved_data["x"].toTensor().requires_grad_(true);
    auto& layer =
        *reinterpret_cast<Linear*>(context->saved_data["layer"].toInt());
    layer(x).backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

TEST_P(GraphTest, BackwardInsideBackward) {
  Check([] { return Mlp(); },
        [](Mlp& model, int r) {
          const Tensor h = torch::tanh(model->first(Input(r, {4, 5})));
          const auto layer =
              std::shared_ptr<Linear>(&model->second, [](Linear*) {});
          return model->third(NestedBackward::apply(h, layer)).pow(2).sum();
        });
}

TEST_P(GraphTest, AccumulatesOverBackwardsWithoutZeroGrad) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    Shard(sharded, groups(), rank.options());
    for (int step = 0; step < 3; ++step) {
      ExpectSameBackward(rank, plain, sharded, [&](Mlp& model, int r) {
        return MlpLoss(model, 10 * step + r);
      });
    }
  });
}

size_t PendingBytes(const std::vector<FSDPModule>& handles) {
  size_t bytes = 0;
  for (const auto& handle : handles) bytes += handle.pending_gradient_bytes();
  return bytes;
}

TEST_P(GraphTest, MicroBatchesWithoutSync) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handles = Shard(sharded, groups(), rank.options());
    FSDPModule& root = handles.back();
    for (int step = 0; step < 2; ++step) {
      for (int micro = 0; micro < 3; ++micro) {
        root.set_requires_gradient_sync(micro == 2);
        MlpLoss(sharded, 10 * step + 100 * micro + rank.rank).backward();
        for (const auto& shard : sharded->parameters()) {
          EXPECT_EQ(shard.grad().defined(), micro == 2);
        }
        EXPECT_EQ(PendingBytes(handles) > 0, micro < 2);
      }
      // Each rank adds its own micro batches, then ranks are averaged.
      BackwardOfAllRanks(*plain, rank.world_size, [&, &plain = plain](int r) {
        for (int micro = 0; micro < 3; ++micro) {
          MlpLoss(plain, 10 * step + 100 * micro + r).backward();
        }
      });
      ExpectGradients(*sharded, *plain, 0);
      plain->zero_grad();
      sharded->zero_grad();
    }
  });
}

TEST_P(GraphTest, LastMicroBatchDoesNotReachAllParameters) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handles = Shard(sharded, groups(), rank.options());
    const auto last = [](Mlp& model, int r) {
      return model->first(Input(70 + r, {4, 5})).pow(2).sum();
    };
    handles.back().set_requires_gradient_sync(false);
    MlpLoss(sharded, rank.rank).backward();
    handles.back().set_requires_gradient_sync(true);
    last(sharded, rank.rank).backward();
    BackwardOfAllRanks(*plain, rank.world_size, [&, &plain = plain](int r) {
      MlpLoss(plain, r).backward();
      last(plain, r).backward();
    });
    ExpectGradients(*sharded, *plain, 0);
    EXPECT_EQ(PendingBytes(handles), 0);
  });
}

TEST_P(GraphTest, ClearPendingGradients) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto handles = Shard(sharded, groups(), rank.options());
    handles.back().set_requires_gradient_sync(false);
    MlpLoss(sharded, 7 + rank.rank).backward();
    EXPECT_GT(PendingBytes(handles), 0);
    handles.back().clear_pending_gradients();
    EXPECT_EQ(PendingBytes(handles), 0);
    handles.back().set_requires_gradient_sync(true);
    ExpectSameBackward(rank, plain, sharded,
                       [](Mlp& model, int r) { return MlpLoss(model, r); });
  });
}

TEST(GradientSyncTest, OfOneGroupWithoutRecurse) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    auto second = fully_shard(sharded->second, rank.options());
    auto root = fully_shard(sharded, rank.options());
    root.set_requires_gradient_sync(false, /*recurse=*/false);
    MlpLoss(sharded, rank.rank).backward();
    EXPECT_FALSE(sharded->named_parameters()["first.weight"].grad().defined());
    EXPECT_TRUE(sharded->named_parameters()["second.weight"].grad().defined());
    EXPECT_GT(root.pending_gradient_bytes(), 0);
    EXPECT_EQ(second.pending_gradient_bytes(), 0);
    root.set_requires_gradient_sync(true, /*recurse=*/false);
    MlpLoss(sharded, 50 + rank.rank).backward();
    // Sums of each rank's own (first, third) and of the ranks (second) come to
    // the same up to rounding.
    for (const int seed : {0, 50}) {
      BackwardOfAllRanks(*plain, rank.world_size, [&, &plain = plain](int r) {
        MlpLoss(plain, seed + r).backward();
      });
    }
    ExpectGradients(*sharded, *plain, 1e-6);
  });
}

// A layer that only some ranks use, in a group that all of them use.
class UsedBySomeRanks : public testing::TestWithParam<std::tuple<int, int>> {};

INSTANTIATE_TEST_SUITE_P(WorldAndUsers, UsedBySomeRanks,
                         testing::Values(std::tuple{2, 0}, std::tuple{2, 1},
                                         std::tuple{3, 1}, std::tuple{4, 3},
                                         std::tuple{2, -1}, std::tuple{3, -1}));

TEST_P(UsedBySomeRanks, GradientIsMeanOverAllRanksOrUndefinedOnAll) {
  const auto [world_size, user] = GetParam();
  ExactRanks(world_size, [&, user = user](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Stash(); });
    fully_shard(sharded, rank.options());
    const auto loss = [&](Stash& model, int r) {
      Tensor y = model->first(Input(r, {4, 5}));
      if (r == user) y = y.sum() + model->second(y).sum();
      return y.pow(2).sum();
    };
    ExpectSameBackward(rank, plain, sharded, loss);
    // Said once more, without the help of the comparison.
    const auto names = sharded->named_parameters();
    EXPECT_TRUE(names["first.weight"].grad().defined());
    EXPECT_EQ(names["second.weight"].grad().defined(), user >= 0);
    EXPECT_EQ(names["second.bias"].grad().defined(), user >= 0);
  });
}

// The same, in a micro batch whose gradients wait for the next one.
TEST_P(UsedBySomeRanks, InAMicroBatchWithoutSync) {
  const auto [world_size, user] = GetParam();
  ExactRanks(
      world_size, [&, world_size = world_size, user = user](RankContext& rank) {
        auto [plain, sharded] = MakePair([] { return Stash(); });
        auto handle = fully_shard(sharded, rank.options());
        const auto first = [&](Stash& model, int r) {
          Tensor y = model->first(Input(r, {4, 5}));
          if (r == user) y = y.sum() + model->second(y).sum();
          y.pow(2).sum().backward();
        };
        const auto second = [](Stash& model, int r) {
          model->first(Input(20 + r, {4, 5})).pow(2).sum().backward();
        };
        BackwardOfAllRanks(*plain, world_size, [&, &plain = plain](int r) {
          first(plain, r);
          second(plain, r);
        });
        handle.set_requires_gradient_sync(false);
        first(sharded, rank.rank);
        handle.set_requires_gradient_sync(true);
        second(sharded, rank.rank);
        ExpectGradients(*sharded, *plain, 0);
      });
}

// One operator that reads parameters of several groups.
struct TwoHalvesImpl : Module {
  TwoHalvesImpl()
      : a(register_module("a", Linear(5, 5))),
        b(register_module("b", Linear(5, 5))),
        c(register_module("c", Linear(5, 5))) {}
  Linear a, b, c;
};
TORCH_MODULE(TwoHalves);

class SeveralGroupsPerOperator
    : public testing::TestWithParam<std::tuple<int, bool>> {};

INSTANTIATE_TEST_SUITE_P(
    LimitAndReshard, SeveralGroupsPerOperator,
    testing::Combine(testing::Values(1, 2, 3), testing::Bool()),
    [](const auto& info) {
      return "Limit" + std::to_string(std::get<0>(info.param)) +
             (std::get<1>(info.param) ? "Reshard" : "Keep");
    });

TEST_P(SeveralGroupsPerOperator, AreAllGathered) {
  const auto [limit, reshard] = GetParam();
  ExactRanks(2, [&, limit = limit, reshard = reshard](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return TwoHalves(); });
    auto handles = ShardEverySubmodule(
        sharded,
        rank.options().limit_all_gathers(limit).reshard_after_forward(reshard));
    const auto loss = [&](TwoHalves& model, int r) {
      const auto free = [&] {
        if (model.ptr() != sharded.ptr()) return;
        for (auto& handle : handles) handle.reshard();
      };
      const Tensor x = Input(r, {4, 5});
      Tensor w =
          torch::stack({model->a->weight, model->b->weight, model->c->weight});
      free();
      Tensor y = torch::einsum("bi,koi->bko", {x, w});
      Tensor z = model->a->weight.mm(model->b->weight);
      free();
      Tensor v = torch::addmm(model->c->bias, x, z);
      Tensor u = torch::cat({model->a->bias, model->c->bias, model->b->bias});
      Tensor t = torch::where(model->a->weight > 0, model->b->weight,
                              model->c->weight);
      free();
      return y.pow(2).sum() + v.pow(2).sum() + u.pow(3).sum() + t.sum();
    };
    for (int step = 0; step < 3; ++step) {
      ExpectSameBackward(rank, plain, sharded, loss);
    }
  });
}

}  // namespace
}  // namespace composable
