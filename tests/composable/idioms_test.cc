// What C++ programs do with parameters through members, and with the shards that
// module->parameters() holds: each is right, or an error or a warning that names
// the way out.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "composable/rebind.h"
#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"

namespace composable {
namespace {

using torch::Tensor;
using torch::autograd::grad;

struct Idiom {
  std::string name;
  std::function<void(RankContext&)> check;
};

// Two groups, `second` in its own.
Mlp Sharded(RankContext& rank) {
  Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
  fully_shard(model->second, rank.options());
  fully_shard(model, rank.options());
  return model;
}

Mlp Plain() {
  return RankContext::Seeded(1, [] { return Mlp(); });
}

// The mean over ranks of what one rank computes from its loss.
std::vector<Tensor> MeanOverRanks(
    RankContext& rank, const std::function<std::vector<Tensor>(int)>& of_rank) {
  std::vector<Tensor> sum = of_rank(0);
  for (int r = 1; r < rank.world_size; ++r) {
    const auto more = of_rank(r);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + more[i];
  }
  for (Tensor& tensor : sum) tensor = tensor / rank.world_size;
  return sum;
}

struct PostAccumulate : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulate(std::function<void(const Tensor&)> hook)
      : call(std::move(hook)) {}
  void operator()(const Tensor& tensor) override { call(tensor); }
  std::function<void(const Tensor&)> call;
};

// `use` throws a ValueError with these texts, and the model trains on, right.
Idiom Refused(std::string name, std::vector<std::string> texts,
              std::function<void(RankContext&, Mlp&)> use) {
  return {std::move(name), [=](RankContext& rank) {
            Mlp plain = Plain();
            Mlp sharded = Sharded(rank);
            ExpectThrows<c10::Error>([&] { use(rank, sharded); }, texts);
            sharded->zero_grad();
            ExpectSameBackward(rank, plain, sharded, MlpLoss);
          }};
}

const std::vector<Idiom>& Idioms() {
  static const auto* idioms = new std::vector<Idiom>{
      // --- Gradients ---
      Refused("MemberGradient",
              {"The gradient of 'first.weight' was asked for through the "
               "module's member",
               "named_parameters()[\"first.weight\"].grad()"},
              [](RankContext& rank, Mlp& m) {
                MlpLoss(m, rank.rank).backward();
                (void)m->first->weight.grad();
              }),
      Refused(
          "MemberMutableGradient", {"through the module's member"},
          [](RankContext&, Mlp& m) { m->second->bias.mutable_grad().reset(); }),
      {"MemberThatRetainsItsGradientHasTheLocalWhole",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         sharded->first->weight.retain_grad();
         MlpLoss(sharded, rank.rank).backward();
         MlpLoss(plain, rank.rank).backward();
         EXPECT_TRUE(torch::equal(sharded->first->weight.grad(),
                                  plain->first->weight.grad()));
       }},
      {"GradOfParametersIsReduced",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const auto expected = MeanOverRanks(rank, [&](int r) {
           return grad({MlpLoss(plain, r)}, plain->parameters());
         });
         const auto rows =
             grad({MlpLoss(sharded, rank.rank)}, sharded->parameters());
         ASSERT_EQ(rows.size(), expected.size());
         for (size_t i = 0; i < rows.size(); ++i) {
           const Tensor shard = sharded->parameters()[i];
           EXPECT_TRUE(torch::equal(rows[i], LocalRows(shard, expected[i])));
           EXPECT_FALSE(shard.grad().defined());
         }
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
      {"GradOfOneParameterReducesItsGroupOnly",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const auto expected = MeanOverRanks(rank, [&](int r) {
           return grad({MlpLoss(plain, r)}, {plain->second->weight});
         });
         const Tensor shard = sharded->named_parameters()["second.weight"];
         const Tensor rows = grad({MlpLoss(sharded, rank.rank)}, {shard})[0];
         EXPECT_TRUE(torch::equal(rows, LocalRows(shard, expected[0])));
         EXPECT_EQ(fsdp_stats(sharded).num_reductions, 1);
       }},
      {"GradOfInputReducesNothing",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const Tensor x = Input(rank.rank, {4, 5}).requires_grad_(true);
         const Tensor expected = grad({plain(x).pow(2).sum()}, {x})[0];
         EXPECT_TRUE(
             torch::equal(grad({sharded(x).pow(2).sum()}, {x})[0], expected));
         EXPECT_EQ(fsdp_stats(sharded).num_reductions, 0);
         EXPECT_EQ(fsdp_stats(sharded).unsharded_param_bytes, 0);
       }},
      {"GradOfMemberIsTheLocalWhole",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const Tensor expected =
             grad({MlpLoss(plain, rank.rank)}, {plain->first->weight})[0];
         const Tensor local =
             grad({MlpLoss(sharded, rank.rank)}, {sharded->first->weight})[0];
         EXPECT_TRUE(torch::equal(local, expected));
       }},
      Refused("GraphThroughAReducedGradient",
              {"The gradient of 'first.weight' is a sum over ranks",
               "the module's member"},
              [](RankContext& rank, Mlp& m) {
                const Tensor loss = MlpLoss(m, rank.rank);
                const Tensor rows =
                    grad({loss}, {m->parameters()[0]}, {}, true, true)[0];
                AllowShardMath allowed;
                rows.pow(2).sum().backward();
              }),
      {"PenaltyOnTheGradientOfTheInput",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         ExpectSameBackward(rank, plain, sharded, [](auto& m, int r) {
           const Tensor x = Input(r, {4, 5}).requires_grad_(true);
           const Tensor g = grad({m(x).pow(2).sum()}, {x}, {}, true, true)[0];
           return g.pow(2).sum();
         });
       }},
      {"BackwardWithParametersAsInputs",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         BackwardOfAllRanks(*plain, rank.world_size,
                            [&](int r) { MlpLoss(plain, r).backward(); });
         MlpLoss(sharded, rank.rank)
             .backward({}, false, false, sharded->parameters());
         ExpectGradients(*sharded, *plain, 0);
       }},
      {"BackwardWithOneParameterAsInput",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         BackwardOfAllRanks(*plain, rank.world_size, [&](int r) {
           MlpLoss(plain, r).backward({}, false, false,
                                      std::vector<Tensor>{plain->first->bias});
         });
         const std::vector<Tensor> inputs{
             sharded->named_parameters()["first.bias"]};
         MlpLoss(sharded, rank.rank).backward({}, false, false, inputs);
         ExpectGradients(*sharded, *plain, 0);
       }},
      {"BackwardWithInputsOfTheModel",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const Tensor a = Input(rank.rank, {4, 5}).requires_grad_(true);
         const Tensor b = Input(rank.rank, {4, 5}).requires_grad_(true);
         plain(a).pow(2).sum().backward({}, false, false,
                                        std::vector<Tensor>{a});
         sharded(b).pow(2).sum().backward({}, false, false,
                                          std::vector<Tensor>{b});
         EXPECT_TRUE(torch::equal(a.grad(), b.grad()));
         for (const auto& p : sharded->parameters()) {
           EXPECT_FALSE(p.grad().defined());
         }
         EXPECT_EQ(fsdp_stats(sharded).unsharded_param_bytes, 0);
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
      Refused("BackwardWithAMemberAsInput",
              {"backward(inputs = ...) was given the member of parameter "
               "'second.weight'",
               "module->parameters()"},
              [](RankContext& rank, Mlp& m) {
                const std::vector<Tensor> inputs{m->second->weight};
                MlpLoss(m, rank.rank).backward({}, false, false, inputs);
              }),
      // --- Hooks ---
      {"HookOnAMemberBeforeMovesToTheShard",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Plain();
         for (auto* m : {&plain, &sharded}) {
           (*m)->first->weight.register_hook(
               [](const Tensor& g) { return g * 2; });
         }
         fully_shard(sharded, rank.options());
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
      {"HookOfBeforeIsRemovedThroughTheMember",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Plain();
         const unsigned hook = sharded->first->weight.register_hook(
             [](const Tensor& g) { return g * 2; });
         fully_shard(sharded, rank.options());
         sharded->first->weight.remove_hook(hook);
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
      {"HookOnAShardSeesReducedRowsOnce",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         plain->first->weight.register_hook(
             [](const Tensor& g) { return g * 4; });
         int calls = 0;
         const Tensor shard = sharded->named_parameters()["first.weight"];
         shard.register_hook([&](const Tensor& g) {
           ++calls;
           EXPECT_EQ(g.sizes(), shard.sizes());
           return g * 4;
         });
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
         EXPECT_EQ(calls, 1);
       }},
      {"HookOnAMemberSeesTheLocalWhole",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         for (auto* m : {&plain, &sharded}) {
           (*m)->second->weight.register_hook([](const Tensor& g) {
             EXPECT_EQ(g.sizes(), at::IntArrayRef({7, 7}));
             return g * 2;
           });
         }
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
      {"HookThatReadsAMember",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         double seen = 0;
         sharded->parameters()[0].register_hook([&](const Tensor& g) {
           seen = sharded->second->weight.norm().item<double>();
           return g;
         });
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
         EXPECT_EQ(seen, plain->second->weight.norm().item<double>());
       }},
      {"PostAccumulateHookOfAShardSeesTheGradient",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const Tensor shard = sharded->parameters()[0];
         Tensor seen;
         torch::autograd::impl::set_post_acc_grad_hooks(
             shard, std::make_unique<PostAccumulate>([&](const Tensor& tensor) {
               EXPECT_TRUE(tensor.is_same(shard));
               seen = tensor.grad().clone();
             }));
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
         ASSERT_TRUE(seen.defined());
         EXPECT_TRUE(torch::equal(seen, shard.grad()));
       }},
      {"HookOnAMemberSurvivesFreezing",
       [](RankContext& rank) {
         Mlp sharded = Sharded(rank);
         int calls = 0;
         sharded->second->weight.register_hook([&](const Tensor& g) {
           ++calls;
           return g;
         });
         for (const bool on : {true, false, true}) {
           for (auto p : sharded->second->parameters()) p.requires_grad_(on);
           MlpLoss(sharded, rank.rank).backward();
         }
         EXPECT_EQ(calls, 2);
       }},
      {"HookOnAMemberWithoutAGradientIsNotCalled",
       [](RankContext& rank) {
         Mlp sharded = Sharded(rank);
         int calls = 0;
         sharded->first->bias.register_hook([&](const Tensor& g) {
           ++calls;
           return g * 2;
         });
         Input(0, {4, 5}).mm(sharded->first->weight.t()).sum().backward();
         EXPECT_EQ(calls, 0);
       }},
      {"HookThatKeepsWhatItGot",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         Tensor kept;
         sharded->parameters()[0].register_hook([&](const Tensor& g) {
           kept = g;
           return g;
         });
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
         const Tensor before = kept.clone();
         sharded->zero_grad(/*set_to_none=*/false);
         EXPECT_TRUE(torch::equal(kept, before));
       }},
      Refused("BackwardInAHookOfAShard",
              {"A hook on a shard runs a backward", "after the backward"},
              [](RankContext& rank, Mlp& m) {
                const auto armed = std::make_shared<bool>(true);
                m->named_parameters()["third.bias"].register_hook(
                    [&rank, &m, armed](const Tensor& g) {
                      if (std::exchange(*armed, false)) {
                        const at::AutoGradMode grad_mode(true);
                        MlpLoss(m, rank.rank).backward();
                      }
                      return g;
                    });
                MlpLoss(m, rank.rank).backward();
              }),
      // --- Freezing ---
      {"FreezeAMemberBefore",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Plain();
         for (auto* m : {&plain, &sharded}) {
           (*m)->first->weight.requires_grad_(false);
         }
         fully_shard(sharded, rank.options());
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
      {"FreezeAMemberAfter",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         for (const bool on : {false, true, false}) {
           for (auto* m : {&plain, &sharded}) {
             (*m)->first->weight.requires_grad_(on);
             EXPECT_EQ((*m)->first->weight.requires_grad(), on);
             (*m)->zero_grad();
           }
           ExpectSameBackward(rank, plain, sharded, MlpLoss);
         }
       }},
      // --- Optimizers ---
      Refused("OptimizerOfMembers",
              {"An optimizer was given the member of parameter 'first.weight'",
               "Build it from module->parameters(), after fully_shard"},
              [](RankContext&, Mlp& m) {
                torch::optim::SGD({m->first->weight},
                                  torch::optim::SGDOptions(0.1));
              }),
      Refused("OptimizerBuiltBeforeIsRefusedAtZeroGrad",
              {"built from members or before fully_shard",
               "composable::rebind(optimizer, module)"},
              [](RankContext& rank, Mlp&) {
                Mlp model = Plain();
                torch::optim::SGD optimizer(model->parameters(), 0.1);
                fully_shard(model, rank.options());
                optimizer.zero_grad();
              }),
      Refused("OptimizerBuiltBeforeIsRefusedAtStep",
              {"composable::rebind(optimizer, module)"},
              [](RankContext& rank, Mlp&) {
                Mlp model = Plain();
                torch::optim::AdamW optimizer(model->parameters());
                fully_shard(model, rank.options());
                MlpLoss(model, rank.rank).backward();
                optimizer.step();
              }),
      Refused("LBFGS",
              {"reads the gradient or a copy of a shard",
               "such as LBFGS, can't work on shards"},
              [](RankContext& rank, Mlp& m) {
                torch::optim::LBFGS optimizer(m->parameters());
                optimizer.step([&] {
                  optimizer.zero_grad();
                  Tensor loss = MlpLoss(m, rank.rank);
                  loss.backward();
                  return loss;
                });
              }),
      Refused("StockClipGradNorm", {"composable::clip_grad_norm_"},
              [](RankContext& rank, Mlp& m) {
                MlpLoss(m, rank.rank).backward();
                torch::nn::utils::clip_grad_norm_(m->parameters(), 1.0);
              }),
      {"StockClipGradValue",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         BackwardOfAllRanks(*plain, rank.world_size,
                            [&](int r) { MlpLoss(plain, r).backward(); });
         MlpLoss(sharded, rank.rank).backward();
         torch::nn::utils::clip_grad_value_(plain->parameters(), 0.5);
         torch::nn::utils::clip_grad_value_(sharded->parameters(), 0.5);
         ExpectGradients(*sharded, *plain, 0);
       }},
      Refused("NormOfAGradientOfAShard", {"composable::clip_grad_norm_"},
              [](RankContext& rank, Mlp& m) {
                MlpLoss(m, rank.rank).backward();
                (void)m->parameters()[0].grad().norm();
              }),
      // --- Shards in operators ---
      Refused("PenaltyOverParameters",
              {"reads the shard of parameter 'first.weight'",
               "composable::AllowShardMath"},
              [](RankContext& rank, Mlp& m) {
                Tensor loss = MlpLoss(m, rank.rank);
                for (const auto& p : m->parameters()) {
                  loss = loss + 0.1 * p.pow(2).sum();
                }
                loss.backward();
              }),
      {"PenaltyOverParametersAllowed",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const auto penalty = [](Mlp& m) {
           Tensor sum = torch::zeros({});
           for (const auto& p : m->parameters()) sum = sum + p.pow(2).sum();
           return 0.1 * sum;
         };
         BackwardOfAllRanks(*plain, rank.world_size, [&](int r) {
           (MlpLoss(plain, r) + penalty(plain)).backward();
         });
         AllowShardMath allowed;
         (MlpLoss(sharded, rank.rank) + penalty(sharded)).backward();
         ExpectGradients(*sharded, *plain, 1e-6);  // added in another order
       }},
      {"PenaltyOverMembers",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         ExpectSameBackward(rank, plain, sharded, [](auto& m, int r) {
           return MlpLoss(m, r) + 0.1 * m->first->weight.pow(2).sum() +
                  0.1 * m->second->weight.pow(2).sum();
         });
       }},
      Refused("ForwardThatLoopsOverNamedParameters",
              {"reads the shard of parameter 'first.weight'",
               "use the module's member"},
              [](RankContext&, Mlp& m) {
                Tensor x = Input(0, {4, 5});
                for (const auto& item : m->named_parameters()) {
                  if (item.value().dim() == 2) {
                    x = torch::tanh(torch::matmul(x, item.value().t()));
                  }
                }
              }),
      Refused("PrintingAShard",
              {"reads the shard of parameter '", "composable::full_state_dict"},
              [](RankContext&, Mlp& m) {
                std::ostringstream out;  // of those with rows on this rank
                for (const auto& p : m->parameters()) out << p;
              }),
      {"PrintingRowsWithoutGrad",
       [](RankContext& rank) {
         Mlp sharded = Sharded(rank);
         const torch::NoGradGuard no_grad;
         std::ostringstream shown;
         std::ostringstream expected;
         shown << sharded->parameters()[0];
         expected << LocalRows(sharded->parameters()[0],
                               Plain()->first->weight.detach());
         EXPECT_EQ(shown.str(), expected.str());
       }},
      {"PrintingAMemberShowsTheWhole",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         std::ostringstream shown;
         std::ostringstream expected;
         {
           const torch::NoGradGuard no_grad;
           shown << sharded->first->weight;
           expected << plain->first->weight;
         }
         EXPECT_EQ(shown.str(), expected.str());
         // With its gradient function, as any tensor that is no leaf.
         std::ostringstream graph;
         graph << sharded->first->weight;
         EXPECT_NE(graph.str().find("CPUFloatType{7,5}"), std::string::npos);
       }},
      // --- Initialisation ---
      Refused("InitOfAMember",
              {"writes the whole parameter 'first.weight'",
               "composable::FullParameters scope",
               "initialise a module before fully_shard"},
              [](RankContext&, Mlp& m) {
                torch::nn::init::xavier_uniform_(m->first->weight);
              }),
      Refused("ConstantInitOfAMember", {"writes the whole parameter"},
              [](RankContext&, Mlp& m) {
                torch::nn::init::zeros_(m->first->bias);
              }),
      Refused("RandomInitOfAShard",
              {"fills the shard of parameter 'first.weight'",
               "ranks with one seed would draw equal rows",
               "composable::load_full_state_dict"},
              [](RankContext&, Mlp& m) {
                torch::nn::init::xavier_uniform_(m->parameters()[0]);
              }),
      Refused("NormalInitOfAShard", {"fills the shard of parameter"},
              [](RankContext&, Mlp& m) {
                torch::nn::init::normal_(m->parameters()[0]);
              }),
      Refused("EyeInitOfAShard",
              {"fills the shard of parameter 'first.weight'",
               "depends on the whole size"},
              [](RankContext&, Mlp& m) {
                torch::nn::init::eye_(m->parameters()[0]);
              }),
      Refused("SetOfAMember",
              {"aten::set_ writes the whole parameter 'first.weight'"},
              [](RankContext&, Mlp& m) {
                m->first->weight.set_(torch::ones({7, 5}));
              }),
      Refused("DetachOfAMemberInPlace",
              {"aten::detach_ writes the whole parameter 'first.weight'"},
              [](RankContext&, Mlp& m) { m->first->weight.detach_(); }),
      // --- Where and how ---
      {"ShardedInInferenceMode",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Plain();
         {
           const c10::InferenceMode inference;
           fully_shard(sharded->second, rank.options());
           fully_shard(sharded, rank.options());
         }
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
      {"ViewTakenBeforeWarns",
       [](RankContext& rank) {
         Mlp model = Plain();
         const Tensor view = model->first->weight.view(-1);
         WarningsOfThisThread warnings;
         fully_shard(model, rank.options());
         EXPECT_EQ(warnings.Count("parameter 'first.weight' shares its memory "
                                  "with another tensor"),
                   1)
             << warnings.text();
       }},
      {"StepInsideAnAutocastScopeIsSeen",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         const auto run = [](Mlp& m) {
           const bool before = at::autocast::is_autocast_enabled(at::kCPU);
           at::autocast::set_autocast_enabled(at::kCPU, true);
           const Tensor y = m(Input(0, {4, 5}));
           at::autocast::set_autocast_enabled(at::kCPU, before);
           return y;
         };
         at::autocast::increment_nesting();
         (void)run(sharded);
         {
           const torch::NoGradGuard no_grad;
           for (const auto& p : sharded->parameters()) p.data().mul_(2);
           for (const auto& p : plain->parameters()) p.data().mul_(2);
         }
         const Tensor seen = run(sharded);
         EXPECT_TRUE(torch::equal(seen, run(plain)));
         at::autocast::decrement_nesting();
         at::autocast::clear_cache();
       }},
      {"ConstantInitOfAShardIsRight",
       [](RankContext& rank) {
         Mlp plain = Plain();
         Mlp sharded = Sharded(rank);
         for (auto* m : {&plain, &sharded}) {
           for (const auto& p : (*m)->parameters()) {
             torch::nn::init::constant_(p, 0.25);
           }
         }
         ExpectSameBackward(rank, plain, sharded, MlpLoss);
       }},
  };
  return *idioms;
}

class IdiomTest : public testing::TestWithParam<Idiom> {};

TEST_P(IdiomTest, IsRightOrNamesTheFix) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    ExactRanks(ranks, GetParam().check);
  }
}

INSTANTIATE_TEST_SUITE_P(All, IdiomTest, testing::ValuesIn(Idioms()),
                         [](const auto& info) { return info.param.name; });

TEST(WarningsOfThisThreadTest, CountsThoseThatHaveAText) {
  // example-begin tests/composable/warnings.h
  composable::WarningsOfThisThread warnings;
  TORCH_WARN("The gradient was cleared.");
  EXPECT_EQ(warnings.Count("was cleared"), 1) << warnings.text();
  // example-end
  EXPECT_EQ(warnings.Count("was kept"), 0);
}

}  // namespace
}  // namespace composable
