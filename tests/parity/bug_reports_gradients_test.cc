// Models and loops that others' sharding gave wrong gradients for, or none.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/parity/bug_reports.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

const auto kWhole = [](auto& model, const FullyShardOptions& options) {
  fully_shard(model, options);
};
const auto kEverySubmodule = [](auto& model, const FullyShardOptions& options) {
  ShardEverySubmodule(model, FullyShardOptions(options).reshard_after_forward(
                                 ReshardAfterForward(true)));
};

// A view as output, which the caller writes to.
struct ViewOutputImpl : Module {
  Tensor forward(const Tensor& x) { return fc(x).unsqueeze(0).squeeze(0); }
  Linear fc{register_module("fc", Linear(8, 8))};
};
TORCH_MODULE(ViewOutput);

struct WritesToViewImpl : Module {
  Tensor forward(const Tensor& x) {
    Tensor h = out(x);
    Tensor o = inner(h);
    o.add_(h);
    return o;
  }
  ViewOutput inner{register_module("inner", ViewOutput())};
  Linear out{register_module("out", Linear(8, 8))};
};
TORCH_MODULE(WritesToView);

// Keeps the weight beside what autograd knows of.
struct KeepsItsWeight : torch::autograd::Function<KeepsItsWeight> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x});
    context->saved_data["weight"] = weight;
    return x.mm(weight.t());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const Tensor x = context->get_saved_variables()[0];
    const Tensor weight = context->saved_data["weight"].toTensor();
    return {gradients[0].mm(weight), gradients[0].t().mm(x)};
  }
};

struct LoraImpl : Module {
  LoraImpl()
      : frozen(register_module("frozen", Layer(8, 8))),
        down(register_module("down", Layer(8, 2))),
        up(register_module("up", Layer(2, 8))) {
    frozen->weight.requires_grad_(false);
  }
  static Linear Layer(int64_t in, int64_t out) {
    return Linear(LinearOptions(in, out).bias(false));
  }
  Tensor forward(const Tensor& x) { return frozen(x) + up(down(x)); }
  Linear frozen, down, up;
};
TORCH_MODULE(Lora);

// Two parents of one module.
struct ParentImpl : Module {
  explicit ParentImpl(const Linear& child)
      : shared(register_module("shared", child)),
        own(register_module("own", Linear(5, 5))) {}
  Tensor forward(const Tensor& x) { return own(torch::tanh(shared(x))); }
  Linear shared, own;
};
TORCH_MODULE(Parent);

struct TwoParentsImpl : Module {
  TwoParentsImpl() : shared(5, 5), a(shared), b(shared) {
    register_module("a", a);
    register_module("b", b);
  }
  Tensor forward(const Tensor& x) { return b(torch::tanh(a(x))); }
  Linear shared;
  Parent a, b;
};
TORCH_MODULE(TwoParents);

Tensor SumOfSquares(const Tensor& y) { return y.pow(2).sum(); }

class BugReportGradients : public testing::TestWithParam<BugReport> {};

TEST_P(BugReportGradients, AreThoseOfTheUnshardedModel) {
  RunOnAllWorldSizes(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    All, BugReportGradients,
    testing::Values(
        Matches(
            "ViewOutputIsWrittenTo", {1, 2, 3}, [] { return WritesToView(); },
            kEverySubmodule,
            [](auto& m, int r) {
              return SumOfSquares(m(Input(r, {3, 8})));
            }),
        Matches(
            "FunctionThatKeepsItsWeight", {1, 2, 3}, [] { return Mlp(); },
            kEverySubmodule,
            [](auto& m, int r) {
              Tensor x = Input(r, {4, 5});
              for (auto& layer : {m->first, m->second, m->third}) {
                x = torch::tanh(KeepsItsWeight::apply(x, layer->weight));
              }
              return SumOfSquares(x);
            }),
        Matches(
            "ModuleOfTwoParents", {1, 2, 3}, [] { return TwoParents(); },
            [](auto& m, const FullyShardOptions& options) {
              fully_shard(m->shared, options);
              fully_shard(m->a, options);
              fully_shard(m->b, options);
              fully_shard(m, options);
            },
            [](auto& m, int r) {
              return SumOfSquares(m(Input(r, {3, 5})));
            }),
        Matches(
            "ForwardOfTheImpl", {1, 2, 4},
            [] { return Linear(LinearOptions(8, 8).bias(false)); }, kWhole,
            [](auto& m, int r) {
              const Tensor y = m.ptr()->forward(Input(r, {3, 8}));
              EXPECT_EQ(y.sizes(), at::IntArrayRef({3, 8}));
              return SumOfSquares(y);
            })),
    NameOf);

// --- Containers --------------------------------------------------------------

// Stock containers with a forward of their own.
struct ListWithForwardImpl : ModuleListImpl {
  ListWithForwardImpl() : ModuleListImpl(Linear(4, 5), Linear(5, 4)) {}
  Tensor forward(Tensor x) {
    for (const auto& layer : *this)
      x = torch::tanh(layer->as<Linear>()->forward(x));
    return x;
  }
};
TORCH_MODULE(ListWithForward);

struct SequentialWithForwardImpl : SequentialImpl {
  SequentialWithForwardImpl() : SequentialImpl(Linear(4, 5), Linear(5, 4)) {}
  Tensor forward(const Tensor& x) { return x + SequentialImpl::forward(x); }
};
TORCH_MODULE(SequentialWithForward);

// Parameters of a list and a dictionary, which members hold too.
struct HoldsListsImpl : Module {
  HoldsListsImpl()
      : first(torch::randn({4, 5}).requires_grad_()),
        second(torch::randn({5}).requires_grad_()),
        list(register_module("list", ParameterList())),
        dict(register_module("dict", ParameterDict())) {
    list->append(first);
    dict->insert("second", second);
  }
  Tensor forward(const Tensor& x) { return x.mm(first) + second; }
  Tensor first, second;
  ParameterList list;
  ParameterDict dict;
};
TORCH_MODULE(HoldsLists);

class Containers : public testing::TestWithParam<BugReport> {};

TEST_P(Containers, AreTaken) { RunOnAllWorldSizes(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, Containers,
    testing::Values(
        Matches(
            "SequentialItself", {1, 2, 3},
            [] { return Sequential(Linear(4, 5), Tanh(), Linear(5, 4)); },
            kWhole,
            [](auto& m, int r) {
              return SumOfSquares(m->forward(Input(r, {3, 4})));
            }),
        Matches(
            "SubclassOfSequential", {1, 2, 3},
            [] { return SequentialWithForward(); }, kEverySubmodule,
            [](auto& m, int r) {
              return SumOfSquares(m(Input(r, {3, 4})));
            }),
        Matches(
            "ModuleListItself", {1, 2, 3},
            [] { return ModuleList(Linear(4, 5), Linear(5, 4)); }, kWhole,
            [](auto& m, int r) {
              Tensor x = Input(r, {3, 4});
              for (const auto& layer : *m) {
                x = torch::tanh(layer->template as<Linear>()->forward(x));
              }
              return SumOfSquares(x);
            }),
        Matches(
            "SubclassOfModuleList", {1, 2, 3}, [] { return ListWithForward(); },
            kEverySubmodule,
            [](auto& m, int r) {
              return SumOfSquares(m(Input(r, {3, 4})));
            }),
        Matches(
            "ModuleDictItself", {1, 2, 3},
            [] {
              return ModuleDict(
                  std::vector<std::pair<std::string, std::shared_ptr<Module>>>{
                      {"a", Linear(4, 5).ptr()}, {"b", Linear(4, 5).ptr()}});
            },
            kWhole,
            [](auto& m, int r) {
              Tensor y = torch::zeros({3, 5});
              for (const auto& key : m->keys()) {
                y = y +
                    (*m)[key]->template as<Linear>()->forward(Input(r, {3, 4}));
              }
              return SumOfSquares(y);
            }),
        Matches(
            "ParameterListAndDictWithMembers", {1, 2, 3},
            [] { return HoldsLists(); }, kWhole,
            [](auto& m, int r) {
              return SumOfSquares(m(Input(r, {3, 4})));
            })),
    NameOf);

// --- Frozen parts ------------------------------------------------------------

TEST(BugReportTest, FrozenPartsOfAGroupAreNotReduced) {
  for (const int world_size : {2, 3, 4}) {
    ExactRanks(world_size, [](RankContext& rank) {
      auto [plain, sharded] = MakePair([] { return Lora(); });
      fully_shard(sharded, rank.options());
      ExpectSameBackward(rank, plain, sharded, [](auto& m, int r) {
        return SumOfSquares(m(Input(r, {3, 8})));
      });
      const auto shards = sharded->named_parameters();
      EXPECT_FALSE(shards["frozen.weight"].grad().defined());
      // Of the two small ones, with their padding: less than the frozen one has.
      const int64_t trainable = 2 * 2 * 8 * sizeof(float);
      const int64_t reduced = fsdp_stats(sharded).reduced_bytes;
      EXPECT_GE(reduced, trainable);
      EXPECT_LT(reduced, 8 * 8 * static_cast<int64_t>(sizeof(float)));
    });
  }
}

TEST(BugReportTest, AllFrozenGivesTheInputItsGradientAndReducesNothing) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Mlp(); });
    for (auto* m : {&plain, &sharded}) {
      for (auto& p : (*m)->parameters()) p.requires_grad_(false);
    }
    ShardEverySubmodule(sharded, rank.options());
    const auto gradient = [&](Mlp& model) {
      Tensor x = Input(rank.rank, {4, 5}).requires_grad_(true);
      model(x).pow(2).sum().backward();
      return x.grad();
    };
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(torch::equal(gradient(sharded), gradient(plain)));
      EXPECT_EQ(fsdp_stats(sharded).unsharded_param_bytes, 0);
    }
    EXPECT_EQ(fsdp_stats(sharded).num_reductions, 0);
  });
}

// --- Shapes ------------------------------------------------------------------

TEST(BugReportTest, FiveRowsOverFourRanksComeBackAsFive) {
  for (const bool chunks : {false, true}) {
    ExactRanks(4, [&](RankContext& rank) {
      auto [plain, sharded] =
          MakePair([] { return Linear(LinearOptions(10, 5).bias(false)); });
      auto options = rank.options();
      if (chunks) {
        options.shard_placement_fn(
            [](const std::string&, const Tensor&) { return Shard(0); });
      }
      fully_shard(sharded, options);
      const StateDict whole = full_state_dict(sharded);
      EXPECT_EQ(whole["weight"].sizes(), at::IntArrayRef({5, 10}));
      EXPECT_TRUE(torch::equal(whole["weight"], plain->weight));
      EXPECT_EQ(sharded->weight.sizes(), at::IntArrayRef({5, 10}));
      EXPECT_TRUE(torch::equal(sharded->weight.detach(), plain->weight));
    });
  }
}

TEST(BugReportTest, TwoRowsAreCutAlongTheirLengthByShardOne) {
  ExactRanks(4, [](RankContext& rank) {
    auto [plain, sharded] =
        MakePair([] { return Linear(LinearOptions(8, 2).bias(false)); });
    fully_shard(sharded, rank.options().shard_placement_fn(
                             [](const std::string&, const Tensor&) {
                               return Shard(1);
                             }));
    EXPECT_EQ(sharded->parameters()[0].sizes(), at::IntArrayRef({2, 2}));
    ExpectSameBackward(rank, plain, sharded, [](auto& m, int r) {
      return SumOfSquares(m(Input(r, {3, 8})));
    });
  });
}

TEST(BugReportTable, Example) {
  // example-begin tests/parity/bug_reports.h
  const std::vector<composable::BugReport> cases{composable::Matches(
      "LinearLayer", {1, 2}, [] { return torch::nn::Linear(3, 4); },
      [](auto& model, const FullyShardOptions& options) {
        composable::fully_shard(model, options);
      },
      [](auto& model, int r) {
        return model(composable::Input(r, {2, 3})).pow(2).sum();
      })};
  // example-end
  RunOnAllWorldSizes(cases.front());
}

}  // namespace
}  // namespace composable
