// Counterparts of PyTorch's tests of training, initialisation, autograd and state
// dicts that no other file here has. Numbers are compared bit by bit with an
// unsharded model where two addends have one sum, else as said.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "composable/describe.h"
#include "state/allow_shard_math.h"
#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"
#include "tests/support/memory_counter.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

ShardPlacementFn Always(const Placement& placement) {
  return [placement](const std::string& /*fqn*/, const Tensor& /*p*/) {
    return std::optional<Placement>(placement);
  };
}

// Two models and a stock optimizer for each, stepped alike.
template <typename Holder, typename Loss>
void ExpectSameTraining(RankContext& rank, Holder& plain, Holder& sharded,
                        int steps, Loss loss, double tolerance = 0) {
  const auto options = torch::optim::AdamWOptions(1e-2);
  torch::optim::AdamW expected(UniqueParameters(*plain), options);
  torch::optim::AdamW optimizer(UniqueParameters(*sharded), options);
  for (int step = 0; step < steps; ++step) {
    expected.zero_grad(step % 2 == 0);
    optimizer.zero_grad(step % 2 == 0);
    ExpectSameBackward(
        rank, plain, sharded,
        [&](Holder& m, int r) { return loss(m, 10 * step + r); }, tolerance);
    expected.step();
    optimizer.step();
  }
  ExpectParameters(*sharded, *plain, tolerance);
}

// --- Shapes ------------------------------------------------------------------

// Upstream's shapes of two linear layers, and one with fewer rows than ranks.
TEST(Parity1DCore, TrainParitySingleGroupShardDim0) {
  for (const int world_size : {2, 4, 8}) {
    ExactRanks(world_size, [](RankContext& rank) {
      using Shapes = std::vector<std::pair<int, int>>;
      for (const Shapes& shapes :
           {Shapes{{16, 15}, {15, 8}}, Shapes{{7, 15}, {15, 3}},
            Shapes{{16, 17}, {17, 8}}, Shapes{{16, 15}, {15, 2}}}) {
        for (const bool chunks : {true, false}) {
          auto [plain, model] = MakePair([&] {
            return Sequential(Linear(shapes[0].first, shapes[0].second), ReLU(),
                              Linear(shapes[1].first, shapes[1].second));
          });
          auto options = rank.options();
          if (chunks) options.shard_placement_fn(Always(Shard(0)));
          fully_shard(model, options);
          // Where more than two ranks are added the order is that of the ranks,
          // in both models.
          ExpectSameTraining(rank, plain, model, 4, [&](Sequential& m, int r) {
            return m->forward(Input(r, {4, shapes[0].first})).pow(2).sum();
          });
        }
      }
    });
  }
}

TEST(Parity1DCore, RootNoForwardInputs) {
  struct Impl : Module {
    Tensor forward() { return weight.pow(2).sum(); }
    Tensor weight{
        register_parameter("weight", torch::arange(12.0).view({3, 4}))};
  };
  RunRanks(2, [](RankContext& rank) {
    const auto model = std::make_shared<Impl>();
    fully_shard(model, rank.options());
    model->forward().backward();
    EXPECT_TRUE(torch::equal(model->parameters()[0].grad(),
                             2 * model->parameters()[0].detach()));
  });
}

// Newton and Schulz's iteration, the heart of Muon.
Tensor Orthogonal(const Tensor& gradient) {
  Tensor x = gradient / (gradient.norm() + 1e-7);
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t();
  for (int i = 0; i < 5; ++i) {
    const Tensor a = x.matmul(x.t());
    const Tensor b = -4.7750 * a + 2.0315 * a.matmul(a);
    x = 3.4445 * x + b.matmul(x);
  }
  return tall ? x.t() : x;
}

// An optimizer that needs whole matrices works on Owned() ones: each rank steps
// those it owns.
TEST(ParityShardPlacementFn, AMuonStepOnOwnedMatrices) {
  for (const int world_size : {1, 2, 3}) {
    ExactRanks(world_size, [](RankContext& rank) {
      auto [plain, model] = MakePair([] { return Mlp(); });
      fully_shard(model, rank.options().shard_placement_fn(
                             [](const std::string& /*fqn*/, const Tensor& p) {
                               return p.dim() == 2
                                          ? std::optional<Placement>(Owned())
                                          : std::nullopt;
                             }));
      const auto step = [](Module& m) {
        const torch::NoGradGuard no_grad;
        const AllowShardMath whole;  // an owned matrix is no part
        for (auto& p : m.parameters()) {
          if (p.numel() == 0) continue;
          if (p.dim() == 2) {
            p.add_(Orthogonal(p.grad()), -0.05);
          } else {
            p.add_(p.grad(), -0.05);
          }
        }
      };
      int64_t owned = 0;
      for (const auto& item : model->named_parameters()) {
        if (item.key().find("weight") == std::string::npos) continue;
        const bool mine = item.value().numel() > 0;
        owned += mine ? 1 : 0;
        if (mine) {
          EXPECT_EQ(item.value().sizes(),
                    plain->named_parameters()[item.key()].sizes());
        }
      }
      // Balanced by bytes.
      EXPECT_GE(owned, 3 / rank.world_size);
      EXPECT_LE(owned, 4 - rank.world_size);
      for (int i = 0; i < 3; ++i) {
        plain->zero_grad();
        model->zero_grad();
        ExpectSameBackward(rank, plain, model, [&](Mlp& m, int r) {
          return MlpLoss(m, 10 * i + r);
        });
        step(*plain);
        step(*model);
      }
      const auto values = full_state_dict(model);
      for (const auto& item : plain->named_parameters()) {
        EXPECT_TRUE(torch::equal(values[item.key()], item.value()));
      }
    });
  }
}

// --- Methods other than forward ----------------------------------------------

// A vision transformer in small: an outer module calls forward_features, which
// nobody has registered, of a sharded module whose forward never runs.
struct FeaturesImpl : Module {
  Tensor forward_features(const Tensor& image) {
    return torch::tanh(proj(image)).flatten(2).transpose(1, 2) + position;
  }
  Tensor forward(const Tensor& image) { return forward_features(image).sum(1); }
  Conv2d proj{
      register_module("proj", Conv2d(Conv2dOptions(3, 6, 2).stride(2)))};
  Tensor position{register_parameter("position", torch::randn({4, 6}))};
};
COMPOSABLE_MODULE(Features);
struct VisionImpl : Module {
  Tensor forward(const Tensor& image) {
    Tensor x;
    if (scoped) {
      const ForwardScope scope(features);
      x = features->forward_features(image);
    } else {
      x = features->forward_features(image);
    }
    return head(x.mean(1));
  }
  bool scoped = false;
  Features features{register_module("features", Features())};
  Linear head{register_module("head", Linear(6, 3))};
};
COMPOSABLE_MODULE(Vision);

TEST(ParityCustomForwardMethod, RegisterFsdpForwardMethod) {
  RunRanks(2, [](RankContext& rank) {
    for (const bool scoped : {false, true}) {
      for (const bool boundary : {false, true}) {
        auto [plain, model] = MakePair([] { return Vision(); });
        fully_shard(model->features, rank.options());
        fully_shard(model, rank.options());
        model->scoped = scoped;
        ExpectSameTraining(rank, plain, model, 5, [&](Vision& m, int r) {
          const Tensor image = Input(r, {2, 3, 4, 4});
          return (boundary ? m(image) : m->forward(image)).pow(2).sum();
        });
        EXPECT_EQ(fsdp_stats(model).gathers_in_flight, 0);
      }
    }
  });
}

// --- Tied parameters ---------------------------------------------------------

struct TiedHeadImpl : Module {
  explicit TiedHeadImpl(const Tensor& shared)
      : weight(register_parameter("weight", shared)) {}
  Tensor forward(const Tensor& x) { return x.matmul(weight.t()); }
  Tensor weight;
};
TORCH_MODULE(TiedHead);
struct TiedLmImpl : Module {
  explicit TiedLmImpl(int64_t vocabulary)
      : embedding(register_module("embedding", Embedding(vocabulary, 6))),
        body(register_module("body", Linear(6, 6))),
        head(register_module("head", TiedHead(embedding->weight))) {}
  Tensor forward(const Tensor& ids) {
    return head(torch::tanh(body(embedding(ids))));
  }
  Embedding embedding;
  Linear body;
  TiedHead head;
};
TORCH_MODULE(TiedLm);

// A vocabulary that no number of ranks divides, in one list group, in one group
// for each name, and with the rows that Shard(0) gives. Upstream asks whether
// every row has changed; here that, and that it is the unsharded one.
TEST(ParitySharedParams, TrainSharedParamsUnevenShard) {
  for (const int world_size : {2, 3}) {
    ExactRanks(world_size, [](RankContext& rank) {
      const int64_t vocabulary = 4 * rank.world_size + 1;
      for (const bool list : {true, false}) {
        for (const bool chunks : {true, false}) {
          auto [plain, model] = MakePair([&] { return TiedLm(vocabulary); });
          auto options = rank.options();
          if (chunks) options.shard_placement_fn(Always(Shard(0)));
          const Tensor before = plain->embedding->weight.detach().clone();
          if (list) {
            fully_shard({ModuleRef(model->embedding), ModuleRef(model->head)},
                        options);
          } else {
            fully_shard(model->embedding, options);
            fully_shard(model->head, options);
          }
          fully_shard(model, options);
          ExpectSameTraining(rank, plain, model, 10, [&](TiedLm& m, int r) {
            const Tensor ids = torch::arange(6).add(r).view({2, 3});
            return m(ids.remainder(vocabulary)).pow(2).sum();
          });
          const auto values = full_state_dict(model);
          EXPECT_TRUE(
              (values["embedding.weight"] != before).any(1).all().item<bool>());
          EXPECT_TRUE(
              torch::equal(values["embedding.weight"], values["head.weight"]));
        }
      }
    });
  }
}

// --- autograd ----------------------------------------------------------------

struct BundleImpl : Module {
  using List = std::vector<Tensor>;
  using Map = std::map<std::string, Tensor>;
  // Between modules: a list, a pair, a map.
  Tensor forward(const Tensor& x) {
    const List list = {a(x), x};
    const std::pair<Tensor, Tensor> pair = {b(list[0]) + list[1], list[0]};
    const Map map = {{"first", pair.first}, {"second", c(pair.second)}};
    return map.at("first") * map.at("second");
  }
  Linear a{register_module("a", Linear(5, 5))};
  Linear b{register_module("b", Linear(5, 5))};
  Linear c{register_module("c", Linear(5, 5))};
};
TORCH_MODULE(Bundle);

TEST(ParityFullyShardAutograd, NontensorActivations) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Bundle(); });
    Shard(model, Groups::kPerModule, rank.options());
    ExpectSameTraining(rank, plain, model, 5, [](Bundle& m, int r) {
      return m(Input(r, {4, 5})).pow(2).sum();
    });
  });
}

struct PostAccumulate : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulate(std::function<void(const Tensor&)> hook)
      : call(std::move(hook)) {}
  void operator()(const Tensor& tensor) override { call(tensor); }
  std::function<void(const Tensor&)> call;
};

// An optimizer for each shard, which steps as soon as its gradient is reduced and
// gives that up.
class OptimizerInBackward {
 public:
  explicit OptimizerInBackward(Module& module) {
    for (const Tensor& p : module.parameters()) {
      auto optimizer = std::make_shared<torch::optim::AdamW>(
          std::vector<Tensor>{p}, torch::optim::AdamWOptions(1e-2));
      torch::autograd::impl::set_post_acc_grad_hooks(
          p, std::make_unique<PostAccumulate>(
                 [this, optimizer](const Tensor& /*shard*/) {
                   optimizer->step();
                   optimizer->zero_grad();
                   ++steps;
                 }));
    }
  }
  int steps = 0;
};

TEST(ParityFullyShardPostAccGradHook, RunsOnceAndOptimizesAsAStockOptimizer) {
  RunRanks(2, [](RankContext& rank) {
    for (const Groups groups : {Groups::kOne, Groups::kPerModule}) {
      auto [plain, model] = MakePair([] { return Mlp(); });
      Shard(model, groups, rank.options());
      torch::optim::AdamW expected(plain->parameters(),
                                   torch::optim::AdamWOptions(1e-2));
      OptimizerInBackward optimizer(*model);
      for (int i = 0; i < 5; ++i) {
        expected.zero_grad();
        BackwardOfAllRanks(*plain, 2, [&, &plain = plain](int r) {
          MlpLoss(plain, 3 * i + r).backward();
        });
        expected.step();
        MlpLoss(model, 3 * i + rank.rank).backward();
        EXPECT_EQ(optimizer.steps, 6 * (i + 1));
        for (const auto& p : model->parameters()) {
          EXPECT_FALSE(p.grad().defined());
        }
      }
      ExpectParameters(*model, *plain);
    }
  });
}

// Upstream's bound on this memory is vacuous (it divides by 1e-6).
TEST(ParityFullyShardMemory, OptimizerInBackwardHoldsNoGradients) {
  constexpr int64_t kDim = 128;
  constexpr int kLayers = 12;
  constexpr int64_t kShard = kDim * (kDim + 1) * 4 / 2;
  RunRanks(2, [&](RankContext& rank) {
    const auto peak = [&](bool in_backward) {
      MemoryCounter memory;
      Sequential model;
      for (int i = 0; i < kLayers; ++i) model->push_back(Linear(kDim, kDim));
      for (size_t i = 0; i < model->size(); ++i) {
        fully_shard(model->ptr(i), rank.options());
      }
      fully_shard(model, rank.options());
      const auto step = [&] {
        model->forward(torch::ones({1, kDim})).sum().backward();
        for (auto& p : model->parameters()) {
          EXPECT_EQ(p.grad().defined(), !in_backward);
          p.mutable_grad().reset();
        }
      };
      std::optional<OptimizerInBackward> optimizer;
      if (in_backward) optimizer.emplace(*model);
      step();  // makes the optimizer's state
      const int64_t before = memory.live();
      memory.ResetPeak();
      step();
      return memory.peak() - before;
    };
    const int64_t all = peak(false);
    const int64_t none = peak(true);
    // All shards' gradients against those of one or two groups and what AdamW
    // makes of one.
    EXPECT_GT(all - none, (kLayers - 5) * kShard);
  });
}

// A module that writes its input, where that needs a gradient.
struct WritesInputImpl : Module {
  Tensor forward(Tensor x) {
    x.mul_(2).add_(1);
    return fc(x);
  }
  Linear fc{register_module("fc", Linear(5, 5))};
};
COMPOSABLE_MODULE(WritesInput);
struct ChainImpl : Module {
  Tensor forward(const Tensor& x) {
    return second(torch::sin(first(torch::sin(x))));
  }
  WritesInput first{register_module("first", WritesInput())};
  WritesInput second{register_module("second", WritesInput())};
};
COMPOSABLE_MODULE(Chain);

TEST(ParityInputs, MayBeWrittenInPlace) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Chain(); });
    fully_shard(model->first, rank.options());
    fully_shard(model->second, rank.options());
    fully_shard(model, rank.options());
    ExpectSameTraining(rank, plain, model, 3, [](Chain& m, int r) {
      const Tensor x = Input(r, {4, 5}).requires_grad_();
      const Tensor y = m(x).pow(2).sum();
      // The gradient of the input goes through the writes too.
      return y + torch::autograd::grad({y}, {x}, {}, true, true)[0].sum();
    });
  });
}

// Outputs that are views, or the input itself, in modules with a boundary and
// without.
struct ViewsImpl : Module {
  Tensor forward(const Tensor& x) {
    if (identity) return x;
    return fc(x).view({2, -1}).transpose(0, 1);
  }
  bool identity = false;
  Linear fc{register_module("fc", Linear(5, 5))};
};
COMPOSABLE_MODULE(Views);

TEST(ParityOutputs, ViewsWarnOfNothingAndMayBeWritten) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Views(); });
    fully_shard(model, rank.options());
    const WarningsOfThisThread warnings;
    for (const bool boundary : {false, true}) {
      ExpectSameBackward(rank, plain, model, [&](Views& m, int r) {
        const Tensor x = Input(r, {4, 5});
        Tensor y = boundary ? m(x) : m->forward(x);
        y.mul_(3);
        return y.pow(2).sum();
      });
    }
    model->identity = true;
    Tensor x = Input(1, {4, 5}).requires_grad_();
    model(x).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), torch::ones_like(x)));
    EXPECT_EQ(warnings.text(), "");
  });
}

// The first forward in inference mode, with buffers of a policy, several groups
// and both values of reshard_after_forward; then training, bit by bit.
TEST(ParityFirstForward, InInferenceModeLeavesNothingThatTrainingMeets) {
  RunRanks(2, [](RankContext& rank) {
    for (const bool freed : {true, false}) {
      auto [plain, model] = MakePair([] { return Mlp(); });
      Shard(model, Groups::kPerModule,
            rank.options().reshard_after_forward(freed));
      for (int round = 0; round < 2; ++round) {
        {
          const c10::InferenceMode inference;
          EXPECT_TRUE(torch::equal(MlpLoss(model, 1), MlpLoss(plain, 1)));
          full_state_dict(model);
        }
        ExpectSameTraining(rank, plain, model, 3,
                           [](Mlp& m, int r) { return MlpLoss(m, r); });
      }
    }
  });
}

// --- What a call manages -----------------------------------------------------

struct SharedImpl : Module {
  Tensor forward(const Tensor& x) { return b(a(x)) + inner(x); }
  Linear a{register_module("a", Linear(5, 5))};
  Linear b{register_module("b", a)};  // the same module
  Mlp inner_mlp{register_module("inner_mlp", Mlp())};
  Tensor inner(const Tensor& x) {
    return torch::cat({inner_mlp(x), x.narrow(1, 0, 2)}, 1);
  }
};
TORCH_MODULE(Shared);

// ManagedModulesAndStates and ParamModuleInfos: which parameters a call takes,
// each once, and under which names they are replaced.
TEST(ParityManagedModules, SingleNestedSharedAndLists) {
  RunRanks(2, [](RankContext& rank) {
    const auto fqns = [](const ModuleRef& module) {
      std::vector<std::string> names;
      const auto group = fully_shard.state(module)->group();
      for (const auto& p : group->params()) names.push_back(p.fqn);
      return names;
    };
    using Names = std::vector<std::string>;
    {
      auto [plain, model] = MakePair([] { return Shared(); });
      fully_shard(model->inner_mlp->second, rank.options());
      fully_shard(model, rank.options());
      ExpectSameBackward(rank, plain, model, [](Shared& m, int r) {
        return m(Input(r, {4, 5})).pow(2).sum();
      });
      // A nested group is left out, a module with two names counts once.
      EXPECT_EQ(fqns(model->inner_mlp->second),
                (Names{"inner_mlp.second.weight", "inner_mlp.second.bias"}));
      EXPECT_EQ(fqns(model),
                (Names{"a.weight", "a.bias", "inner_mlp.first.weight",
                       "inner_mlp.first.bias", "inner_mlp.third.weight",
                       "inner_mlp.third.bias"}));
      // Both names give the one shard.
      const auto parameters = model->named_parameters();
      EXPECT_TRUE(model->b->parameters()[0].is_same(model->a->parameters()[0]));
      EXPECT_TRUE(IsShard(model->b->parameters()[0]));
    }
    {
      Mlp one, two;
      fully_shard({one, two}, rank.options());
      EXPECT_EQ(fully_shard.state(one), fully_shard.state(two));
      EXPECT_EQ(fully_shard.state(one)->group()->params().size(), 12U);
      MlpLoss(one, 1).backward();
      EXPECT_EQ(fsdp_stats(one).num_reductions, 1);
    }
    {
      // fully_shard_state: a state for each call, none for other modules.
      Mlp model;
      fully_shard(model->first, rank.options());
      fully_shard(model, rank.options());
      EXPECT_NE(fully_shard.state(model), fully_shard.state(model->first));
      EXPECT_EQ(fully_shard.state(model->second), nullptr);
    }
  });
}

// Lists as roots: PyTorch requires a single root module.
TEST(ParityFullyShardLazyInit, AListMayBeTheRoot) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    fully_shard({model->first, model->second, model->third}, rank.options());
    ExpectSameTraining(rank, plain, model, 3,
                       [](Mlp& m, int r) { return MlpLoss(m, r); });
    EXPECT_EQ(describe(model).trees.size(), 1U);
  });
}

// Layers that are built, sharded and dropped one after the other get addresses
// that others had; nothing is taken for a tie.
TEST(ParitySharedParams, LayerByLayerShardNoFalsePositive) {
  RunRanks(2, [](RankContext& rank) {
    Sequential model;
    for (int i = 0; i < 8; ++i) {
      for (int dropped = 0; dropped < 3; ++dropped) {
        Linear other(5, 5);
        fully_shard(other, rank.options());
        other(Input(1, {2, 5})).sum().backward();
      }
      Linear layer = RankContext::Seeded(i, [] { return Linear(5, 5); });
      fully_shard(layer, rank.options());
      model->push_back(layer);
    }
    fully_shard(model, rank.options());
    Sequential plain;
    for (int i = 0; i < 8; ++i) {
      plain->push_back(RankContext::Seeded(i, [] { return Linear(5, 5); }));
    }
    std::set<const void*> states;
    for (size_t i = 0; i < model->size(); ++i) {
      states.insert(fully_shard.state(model->ptr(i)).get());
    }
    EXPECT_EQ(states.size(), 8U);
    ExpectSameTraining(rank, plain, model, 3, [](Sequential& m, int r) {
      return m->forward(Input(r, {4, 5})).pow(2).sum();
    });
  });
}

// --- State dicts -------------------------------------------------------------

// What was taken once from named_parameters() is the live shard through training,
// loading and evaluation: the memory never moves.
TEST(ParityFullyShardStateDict, CachedShardsStayAliased) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    Shard(model, Groups::kPerModule, rank.options());
    std::map<std::string, Tensor> cached;
    for (const auto& item : model->named_parameters()) {
      cached[item.key()] = item.value().detach();
    }
    for (int i = 0; i < 5; ++i) {
      ExpectSameTraining(rank, plain, model, 1,
                         [&](Mlp& m, int r) { return MlpLoss(m, r + i); });
      full_state_dict(model);
      load_full_state_dict(model, full_state_dict(model));
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(cached[item.key()].data_ptr(), item.value().data_ptr());
        EXPECT_TRUE(torch::equal(cached[item.key()], item.value().detach()));
      }
    }
  });
}

}  // namespace
}  // namespace composable
