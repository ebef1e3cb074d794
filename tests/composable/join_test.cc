// Ranks whose graphs differ: FullyShardOptions::rank_dependent.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/composable/semantics.h"
#include "tests/support/errors.h"

namespace composable {
namespace {

// Each rank uses the experts that its number says.
struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(int count)
      : enter(register_module("enter", torch::nn::Linear(4, 4))) {
    for (int i = 0; i < count; ++i) {
      experts.push_back(register_module("expert" + std::to_string(i),
                                        torch::nn::Linear(4, 4)));
    }
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& route) {
    x = enter(x);
    for (const int i : route) x = torch::tanh(experts[i](x));
    return x;
  }
  torch::nn::Linear enter;
  std::vector<torch::nn::Linear> experts;
};
COMPOSABLE_MODULE(Experts);

template <typename Error>
void ExpectError(const std::function<void()>& body,
                 const std::vector<std::string>& parts) {
  const std::string text = ErrorOf<Error>(body);
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
}

FullyShardOptions Joining(const RankContext& rank) {
  return rank.options().rank_dependent(true);
}

void ShardExperts(Experts& model, const FullyShardOptions& options) {
  for (auto& expert : model->experts) fully_shard(expert, options);
  fully_shard(model, options);
}

// The experts that a rank uses, in order; and those of each rank.
using Route = std::vector<int>;
using Routes = std::vector<Route>;

void ExpectTrainsAsUnsharded(const Routes& routes, int count,
                             const FullyShardOptions& given = {}) {
  ExactRanks(static_cast<int>(routes.size()), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([&] { return Experts(count); });
    FullyShardOptions options = given;
    options.mesh(rank.group).rank_dependent(true);
    ShardExperts(sharded, options);
    torch::optim::SGD of_plain(plain->parameters(), 0.5);
    torch::optim::SGD of_sharded(sharded->parameters(), 0.5);
    for (int step = 0; step < 3; ++step) {
      of_plain.zero_grad();
      of_sharded.zero_grad();
      const auto loss = [&](auto& model, int r) {
        // Another route in each step.
        const auto& route = routes[(r + step) % routes.size()];
        return model(Input(10 * step + r, {3, 4}), route).pow(2).sum();
      };
      ExpectSameBackward(rank, plain, sharded, loss, /*tolerance=*/1e-6);
      of_plain.step();
      of_sharded.step();
    }
    EXPECT_EQ(fsdp_stats(sharded).unsharded_param_bytes, 0);
  });
}

TEST(JoinTest, TwoRanksUseOneGroupEach) {
  ExpectTrainsAsUnsharded({{0}, {1}}, 2);
}

TEST(JoinTest, OneRankUsesMoreThanTheOther) {
  ExpectTrainsAsUnsharded({{0, 1, 2, 1}, {}}, 3);
}

TEST(JoinTest, RanksUseTheSameGroupsInAnotherOrder) {
  ExpectTrainsAsUnsharded({{0, 1, 2}, {2, 1, 0}}, 3);
  ExpectTrainsAsUnsharded({{0, 1, 2}, {2, 0}, {1, 1, 0}}, 3);
}

TEST(JoinTest, WithinOneSlot) {
  ExpectTrainsAsUnsharded({{0, 1, 2, 3, 0}, {3, 1}, {2}}, 4,
                          FullyShardOptions().limit_all_gathers(1));
}

TEST(JoinTest, WithGroupsThatStay) {
  ExpectTrainsAsUnsharded({{0, 1, 0}, {1, 0, 2}}, 3,
                          FullyShardOptions().reshard_after_forward(false));
}

TEST(JoinTest, EveryRowOfEveryGroupIsUpdatedOnAllRanks) {
  ExactRanks(2, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(2); });
    const auto before = model->experts[rank.rank]->weight.detach().clone();
    ShardExperts(model, Joining(rank));
    model(Input(rank.rank, {3, 4}), Route{rank.rank}).pow(2).sum().backward();
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
    }
    torch::optim::SGD(model->parameters(), 1.0).step();
    const auto after = full_state_dict(model);
    const std::string name = "expert" + std::to_string(rank.rank) + ".weight";
    EXPECT_TRUE((after[name] != before).any(1).all().item<bool>()) << name;
  });
}

// Without joining: no rank waits for the timeout of 20 s.
TEST(JoinTest, WithoutItAllRanksThrowAndNameBothGroups) {
  RunRanks(2, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(2); });
    ShardExperts(model, rank.options());
    const auto start = std::chrono::steady_clock::now();
    ExpectError<c10::DistError>(
        [&] {
          model(Input(rank.rank, {3, 4}), Route{rank.rank}).sum().backward();
        },
        {"'expert0'", "'expert1'"});
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(2));
  });
}

TEST(JoinTest, NobodysGroupHasNoGradient) {
  ExactRanks(2, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(3); });
    ShardExperts(model, Joining(rank));
    model(Input(rank.rank, {3, 4}), Route{rank.rank}).sum().backward();
    EXPECT_FALSE(model->experts[2]->parameters()[0].grad().defined());
    EXPECT_TRUE(model->experts[1]->parameters()[0].grad().defined());
  });
}

TEST(JoinTest, EvaluationAndPlainCollectivesComeInBetween) {
  ExactRanks(2, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(2); });
    ShardExperts(model, Joining(rank));
    for (int step = 0; step < 2; ++step) {
      {
        const torch::NoGradGuard no_grad;
        model(Input(7, {3, 4}), Route{(rank.rank + step) % 2});
      }
      model(Input(rank.rank, {3, 4}), Route{rank.rank}).sum().backward();
      clip_grad_norm_(model->parameters(), 1.0);
      EXPECT_EQ(full_state_dict(model).size(), 6U);
    }
  });
}

// What is still gathered after a pass differs from rank to rank.
TEST(JoinTest, CallsOutsideOfPassesWhereRanksHoldDifferentGroups) {
  ExactRanks(3, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(3); });
    std::vector<FSDPModule> handles;
    for (auto& expert : model->experts) {
      handles.push_back(fully_shard(expert, Joining(rank)));
    }
    FSDPModule root =
        fully_shard(model, Joining(rank).reshard_after_forward(false));
    const auto forward = [&] {
      model(Input(rank.rank, {3, 4}), Route{rank.rank, (rank.rank + 1) % 3});
    };
    // A collective of the program's own: no rank may be in another one.
    const auto meet = [&] {
      std::vector<at::Tensor> ones{torch::ones({1})};
      rank.group->allreduce(ones)->wait();
      EXPECT_EQ(ones[0].item<float>(), 3);
    };
    const at::Tensor weight = full_state_dict(model)["expert1.weight"];
    {
      const torch::NoGradGuard no_grad;
      forward();
      EXPECT_TRUE(full_state_dict(model)["expert1.weight"].equal(weight));
      meet();
      forward();
      handles[1].unshard();
      meet();
      EXPECT_TRUE(model->experts[1]->weight.equal(weight));
      handles[1].reshard();
      forward();
      const FullParameters whole(model);
      meet();
      EXPECT_TRUE(model->experts[1]->weight.equal(weight));
    }
    root.set_manual_backward_finalization(true);
    root.set_requires_gradient_sync(false);
    model(Input(rank.rank, {3, 4}), Route{rank.rank}).sum().backward();
    root.set_requires_gradient_sync(true);
    root.finalize_backward();
    meet();
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(item.value().grad().defined()) << item.key();
    }
    model->zero_grad();
    root.set_manual_backward_finalization(false);
    root.set_requires_gradient_sync(false);
    model(Input(rank.rank, {3, 4}), Route{rank.rank}).sum().backward();
    root.synchronize_gradients();
    meet();
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(item.value().grad().defined()) << item.key();
    }
  });
}

TEST(JoinTest, ARankThatOnlyTakesPartHoldsNoMoreThanItsSlots) {
  ExactRanks(2, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(8); });
    ShardExperts(model, Joining(rank));
    const Route route =
        rank.rank == 0 ? Route{} : Route{0, 1, 2, 3, 4, 5, 6, 7};
    model(Input(rank.rank, {3, 4}), route).sum().backward();
    const int64_t expert_bytes = 2 * 64;  // 10 floats a rank, and padding
    // The root, which stays, and two slots.
    EXPECT_LE(fsdp_stats(model).peak_unsharded_bytes, 3 * expert_bytes);
  });
}

TEST(JoinTest, NeedsTheBoundaryOfTheRoot) {
  RunRanks(2, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(2); });
    ShardExperts(model, Joining(rank));
    ExpectError<c10::ValueError>(
        [&] {
          model->forward(Input(1, {3, 4}), Route{rank.rank});
        },
        {"rank_dependent", "enter.weight", "COMPOSABLE_MODULE"});
  });
}

TEST(JoinTest, RanksThatEndDifferentPassesThrow) {
  RunRanks(2, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(1); });
    ShardExperts(model, Joining(rank));
    const at::Tensor loss = model(Input(1, {3, 4}), Route{0}).sum();
    if (rank.rank == 0) {
      ExpectError<c10::DistError>(
          [&] { loss.backward(); },
          {"different passes", "rank 0 a backward", "rank 1 a forward"});
    } else {
      const torch::NoGradGuard no_grad;
      ExpectError<c10::DistError>(
          [&] {
            model(Input(1, {3, 4}), Route{0});
          },
          {"different passes", "rank 0 a backward", "rank 1 a forward"});
    }
  });
}

TEST(JoinTest, PartsThatStayAreRefused) {
  RunRanks(4, [](RankContext& rank) {
    Experts model = RankContext::Seeded(1, [] { return Experts(1); });
    auto options = Joining(rank);
    fully_shard(model->experts[0],
                FullyShardOptions(options).reshard_after_forward(2));
    fully_shard(model, options);
    ExpectError<c10::NotImplementedError>(
        [&] {
          model(Input(1, {3, 4}), Route{0});
        },
        {"rank_dependent", "expert0", "reshard_after_forward(k)"});
  });
}

}  // namespace
}  // namespace composable
