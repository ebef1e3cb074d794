// What belongs to one parameter, group or tree does not reach into another, and
// a shard that is cut off its group is noticed.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "state/contract_registry.h"
#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

// --- Shards whose memory is replaced -----------------------------------------

struct Replacement {
  std::string name;
  std::function<void(Linear&)> replace;
};

std::string NameOf(const testing::TestParamInfo<Replacement>& info) {
  return info.param.name;
}

const std::string kArchive = [] {
  std::stringstream archive;
  torch::manual_seed(5);
  torch::save(Linear(3, 6), archive);
  return archive.str();
}();

// set_data on a shard copies: it is the parameter's rows, or the whole of it.
class SetDataTest : public testing::TestWithParam<Replacement> {};

INSTANTIATE_TEST_SUITE_P(
    Ways, SetDataTest,
    testing::Values(Replacement{"SetData",
                                [](Linear& m) {
                                  for (auto p : m->parameters()) {
                                    p.set_data(p.detach() * 2);
                                  }
                                }},
                    Replacement{"LoadOfAFullArchive",
                                [](Linear& m) {
                                  std::stringstream archive(kArchive);
                                  torch::load(m, archive);
                                }},
                    Replacement{"ToTheSameDtypeAndDevice",
                                [](Linear& m) {
                                  m->to(torch::kFloat);
                                  m->to(torch::kCPU);
                                }},
                    Replacement{"SaveAndLoadOfShardsWhereAllowed",
                                [](Linear& m) {
                                  const AllowShardMath allowed;
                                  std::stringstream archive;
                                  torch::save(m, archive);
                                  torch::load(m, archive);
                                }},
                    Replacement{"VectorToParameters",
                                [](Linear& m) {
                                  const AllowShardMath allowed;
                                  const auto flat = utils::parameters_to_vector(
                                      m->parameters());
                                  utils::vector_to_parameters(flat.detach() * 2,
                                                              m->parameters());
                                }}),
    NameOf);

TEST_P(SetDataTest, OnShardsTrainsAsOnWholes) {
  for (const int ranks : {1, 2}) {
    RunRanks(ranks, [](RankContext& rank) {
      auto [plain, model] = MakePair([] { return Linear(3, 6); });
      fully_shard(model, rank.options());
      model(torch::ones({2, 3})).sum().backward();
      model->zero_grad();
      const Tensor entry = model->parameters()[0];
      GetParam().replace(plain);
      GetParam().replace(model);
      EXPECT_TRUE(model->parameters()[0].is_same(entry));
      EXPECT_TRUE(entry.is_leaf() && entry.requires_grad());
      ExpectParameters(*model, *plain);
      ExpectSameBackward(rank, plain, model, [](auto& m, int r) {
        return m(Input(r, {2, 3})).pow(2).sum();
      });
    });
  }
}

struct Refusal {
  std::string name;
  std::vector<std::string> texts;
  std::function<void(RankContext&, Linear&)> use;
};

class CutOffTest : public testing::TestWithParam<Refusal> {};

std::string ShardArchive(Linear& m) {
  const AllowShardMath allowed;
  std::stringstream archive;
  torch::save(m, archive);
  return archive.str();
}

INSTANTIATE_TEST_SUITE_P(
    Ways, CutOffTest,
    testing::Values(
        Refusal{"ToMeta",
                {"'weight'", "before fully_shard"},
                [](RankContext&, Linear& m) {
                  const torch::NoGradGuard no_grad;
                  m->to(torch::kMeta);
                }},
        Refusal{"SetDataOfAnotherShape",
                {"The shard of parameter 'weight'", "(this rank's rows)",
                 "[6, 3]", "[5, 3]"},
                [](RankContext&, Linear& m) {
                  m->parameters()[0].set_data(torch::ones({5, 3}));
                }},
        Refusal{"SetDataOfAMember",
                {"member of parameter 'weight'", "load_full_state_dict"},
                [](RankContext&, Linear& m) {
                  m->weight.set_data(torch::ones({6, 3}));
                }},
        Refusal{"MemberAssigned",
                {"No member holds parameter 'weight' any more",
                 "before fully_shard"},
                [](RankContext&, Linear& m) {
                  m->weight = torch::ones({6, 3});
                }},
        Refusal{"SaveOfShards",
                {"torch::save of the shard of parameter 'weight'",
                 "composable::full_state_dict(module)"},
                [](RankContext&, Linear& m) {
                  std::stringstream archive;
                  torch::save(m, archive);
                }},
        Refusal{"LoadOfShardsIntoAPlainModule",
                {"the shards of one rank", "composable::full_state_dict"},
                [](RankContext&, Linear& m) {
                  std::stringstream archive(ShardArchive(m));
                  Linear other(3, 6);
                  torch::load(other, archive);
                }},
        Refusal{"UseOfAClone",
                {"copy of a shard", "cloned from a sharded one",
                 "composable::load_full_state_dict"},
                [](RankContext&, Linear& m) {
                  const auto copy =
                      std::dynamic_pointer_cast<LinearImpl>(m->clone());
                  copy->forward(torch::ones({2, 3}));
                }},
        Refusal{"UseOfACloneWithoutGrad",
                {"copy of a shard"},
                [](RankContext&, Linear& m) {
                  const torch::NoGradGuard no_grad;
                  const auto copy =
                      std::dynamic_pointer_cast<LinearImpl>(m->clone());
                  copy->forward(torch::ones({2, 3}));
                }},
        Refusal{"RegisteredAfterwards",
                {"Parameter 'late'", "LinearImpl", "after fully_shard"},
                [](RankContext&, Linear& m) {
                  m->register_parameter("late", torch::ones({3}));
                  m(torch::ones({2, 3}));
                }},
        Refusal{"ModuleRegisteredAfterwards",
                {"Parameter 'late.weight'", "apply fully_shard"},
                [](RankContext&, Linear& m) {
                  m->register_module("late", Linear(2, 2));
                  m(torch::ones({2, 3}));
                }}),
    [](const auto& info) { return info.param.name; });

TEST_P(CutOffTest, NamesTheParameterAndTheFix) {
  RunRanks(2, [](RankContext& rank) {
    Linear model = RankContext::Seeded(1, [] { return Linear(3, 6); });
    fully_shard(model, rank.options());
    model(torch::ones({2, 3})).sum().backward();
    model->zero_grad();
    ExpectThrows<c10::ValueError>(
        [&] {
          GetParam().use(rank, model);
          model(torch::ones({2, 3}));
        },
        GetParam().texts);
  });
}

TEST(RegisteredAfterwards, AModuleThatIsShardedItselfIsFine) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Linear(3, 6); });
    fully_shard(model, rank.options());
    model(torch::ones({2, 3})).sum().backward();
    model->zero_grad();
    Linear late = RankContext::Seeded(2, [] { return Linear(6, 2); });
    fully_shard(late, rank.options());
    model->register_module("late", late);
    plain->register_module("late", Linear(6, 2));
    ExpectSameBackward(rank, plain, model, [](auto& m, int r) {
      return m(Input(r, {2, 3})).pow(2).sum();
    });
  });
}

// --- Versions are per parameter ----------------------------------------------

struct TwoPartsImpl : Module {
  TwoPartsImpl()
      : generator(register_module("generator", Linear(3, 4))),
        critic(register_module("critic", Linear(4, 5))) {}
  Linear generator, critic;
};
TORCH_MODULE(TwoParts);

class RankCount : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RankCount, testing::Values(1, 2, 4));

// As a GAN does: the critic is stepped between the generator's forward and its
// backward. All parameters are of one group; with four ranks some ranks hold no
// row of some parameters.
TEST_P(RankCount, WritingOneParameterLeavesGraphsOfOthersAlone) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return TwoParts(); });
    fully_shard(sharded, rank.options());
    const auto step = [&](TwoParts& model) {
      const Tensor fake = model->generator(Input(rank.rank, {2, 3}));
      {
        const torch::NoGradGuard no_grad;
        for (auto& p : model->critic->parameters()) p.mul_(0.5);
      }
      model->critic(fake).pow(2).sum().backward();
    };
    step(sharded);
    // The reverse is an error, on every rank.
    sharded->zero_grad();
    const Tensor score =
        sharded->critic(sharded->generator(Input(rank.rank, {2, 3})));
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : sharded->critic->parameters()) p.mul_(0.5);
    }
    ExpectThrows<c10::Error>([&] { score.pow(2).sum().backward(); },
                             {"modified by an inplace operation"});
    // And the tree works on.
    step(sharded);
  });
}

TEST_P(RankCount, GradientsPastAWrittenParameterAreRight) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return TwoParts(); });
    fully_shard(sharded, rank.options());
    ExpectSameBackward(rank, plain, sharded, [](auto& model, int r) {
      const Tensor fake = model->generator(Input(r, {2, 3}));
      return model->critic(fake).pow(2).sum();
    });
    for (auto* model : {&plain, &sharded}) (*model)->zero_grad();
    for (auto& p : sharded->critic->parameters()) {
      const torch::NoGradGuard no_grad;
      p.add_(1);
    }
    for (auto& p : plain->critic->parameters()) {
      const torch::NoGradGuard no_grad;
      p.add_(1);
    }
    ExpectSameBackward(rank, plain, sharded, [](auto& model, int r) {
      const Tensor fake = model->generator(Input(r, {2, 3}));
      return model->critic(fake).pow(2).sum();
    });
  });
}

// --- Trees -------------------------------------------------------------------

struct HeadImpl : Module {
  explicit HeadImpl(Linear trunk)
      : trunk(register_module("trunk", std::move(trunk))),
        out(register_module("out", Linear(4, 2))) {}
  Tensor forward(const Tensor& x) { return out(torch::tanh(trunk(x))); }
  Linear trunk, out;
};
TORCH_MODULE(Head);

struct ActorCriticImpl : Module {
  ActorCriticImpl() : trunk(3, 4), actor(trunk), critic(trunk) {
    register_module("actor", actor);
    register_module("critic", critic);
  }
  Linear trunk;
  Head actor, critic;
};
TORCH_MODULE(ActorCritic);

TEST_P(RankCount, TwoRootsMayShareAShardedModule) {
  ExactRanks(GetParam(), [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return ActorCritic(); });
    fully_shard(sharded->trunk, rank.options());
    fully_shard(sharded->actor, rank.options());
    fully_shard(sharded->critic, rank.options());
    const auto loss = [](auto& model, int r) {
      return model->critic(Input(r, {2, 3})).pow(2).sum() +
             model->actor(Input(r + 10, {2, 3})).pow(2).sum();
    };
    for (int i = 0; i < 3; ++i) {
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(rank, plain, sharded, loss);
    }
    EXPECT_EQ(fsdp_stats(sharded).gathers_in_flight, 0);
    EXPECT_EQ(fsdp_stats(sharded).unsharded_param_bytes, 0);
  });
}

TEST(TreeTest, ARootWithoutParametersMayDieBeforeItsBlocks) {
  RunRanks(2, [](RankContext& rank) {
    auto block = RankContext::Seeded(1, [] { return Linear(3, 3); });
    auto root = Sequential(block);
    fully_shard(block, rank.options());
    fully_shard(root, rank.options());
    root->forward(torch::ones({2, 3})).sum().backward();
    root = nullptr;
    // Applying the API sweeps the registry, which frees the root's state.
    auto other = RankContext::Seeded(2, [] { return Linear(3, 3); });
    fully_shard(other, rank.options());
    block->zero_grad();
    block(torch::ones({2, 3})).sum().backward();
    EXPECT_TRUE(block->parameters()[0].grad().defined());
    EXPECT_EQ(fsdp_stats(block).unsharded_param_bytes, 0);
  });
}

TEST(TreeTest, TopDownIsRefused) {
  RunRanks(1, [](RankContext& rank) {
    Sequential model(Linear(3, 4), Linear(4, 5));
    fully_shard(model, rank.options());
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(model->ptr(0), rank.options()); },
        {"all parameters of this module of type torch::nn::LinearImpl",
         "bottom-up"});
    // A module without parameters has nothing to be taken.
    Sequential plain(ReLU(), Linear(3, 4));
    fully_shard(plain->ptr(0), rank.options());
    fully_shard(plain, rank.options());
  });
}

TEST(TreeTest, AModuleNamedTwiceInAListCountsOnce) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Linear(3, 6); });
    fully_shard({model, model}, rank.options());
    EXPECT_EQ(ContractRegistry::Get().Apis(*model),
              std::vector<std::string>{"fully_shard"});
    ExpectSameBackward(rank, plain, model, [](auto& m, int r) {
      return m(Input(r, {2, 3})).pow(2).sum();
    });
  });
}

// --- Parameters that can't be told apart, or trained --------------------------

TEST(MemoryTest, TwoTensorsOverOneMemoryAreRefused) {
  RunRanks(1, [](RankContext& rank) {
    Sequential model(Linear(4, 4), Linear(4, 4));
    model[0]->as<Linear>()->weight.set_data(
        model[1]->as<Linear>()->weight.data());
    ExpectThrows<c10::ValueError>([&] { fully_shard(model, rank.options()); },
                                  {"'0.weight' and '1.weight'", "same memory",
                                   "Register one tensor in both modules"});
  });
}

TEST(MemoryTest, InferenceParametersAreRefused) {
  RunRanks(1, [](RankContext& rank) {
    Linear model{nullptr};
    {
      const c10::InferenceMode inference;
      model = Linear(3, 4);
    }
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(model, rank.options()); },
        {"'weight'", "InferenceMode", "outside of it"});
  });
}

// --- Nested backwards ----------------------------------------------------------

// Runs a part of a model again in its backward, as a re-entrant checkpoint does.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.ptr().get());
    return layer(x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const Tensor x =
        context->get_saved_variables()[0].detach().requires_grad_(true);
    auto* layer =
        reinterpret_cast<LinearImpl*>(context->saved_data["layer"].toInt());
    {
      const at::AutoGradMode enable(true);
      layer->forward(x).backward(gradients[0]);
    }
    return {x.grad(), Tensor()};
  }
};

TEST(NestedBackwardTest, EndsWithTheOutermost) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] {
      return Sequential(Linear(3, 3), Linear(3, 3), Linear(3, 3), Linear(3, 3));
    });
    for (size_t i = 0; i < sharded->size(); ++i) {
      fully_shard(sharded->ptr(i), rank.options());
    }
    fully_shard(sharded, rank.options());
    const auto loss = [](auto& model, int r) {
      Tensor x = Input(r, {2, 3}).requires_grad_(true);
      for (size_t i = 0; i < model->size(); ++i) {
        x = Recompute::apply(x, Linear(model->template ptr<LinearImpl>(i)));
      }
      return x.pow(2).sum();
    };
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      sharded->zero_grad();
      int reshards = 0;
      int reductions = 0;
      set_trace_observer(sharded, [&](TraceEvent event, const std::string&) {
        reshards += event == TraceEvent::kReshard ? 1 : 0;
        reductions += event == TraceEvent::kReduce ? 1 : 0;
      });
      ExpectSameBackward(rank, plain, sharded, loss);
      EXPECT_EQ(reductions, 4);
      // Each group is freed for another one in forward, or by its own sink.
      EXPECT_LE(reshards, 6) << step;
    }
  });
}

// --- Failures in a reduction -------------------------------------------------

TEST(ReductionTest, AWrongGradientIsAnErrorAndTheTreeWorksOn) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Linear(3, 6); });
    fully_shard(model, rank.options());
    model->parameters()[0].mutable_grad() = torch::ones({1, 1, 7});
    EXPECT_ANY_THROW(model(torch::ones({2, 3})).sum().backward());
    model->zero_grad();
    ExpectSameBackward(rank, plain, model, [](auto& m, int r) {
      return m(Input(r, {2, 3})).pow(2).sum();
    });
  });
}

}  // namespace
}  // namespace composable
