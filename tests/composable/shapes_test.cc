// Parameters of every shape, layout and dtype: right, or refused by fully_shard
// with the parameter's name, and then nothing has changed.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

TEST(Semantics, Example) {
  // example-begin tests/composable/semantics.h
  composable::ExactRanks(2, [](composable::RankContext& rank) {
    auto [plain, sharded] =
        composable::MakePair([] { return torch::nn::Linear(5, 2); });
    composable::fully_shard(sharded, rank.options());
    composable::ExpectSameBackward(rank, plain, sharded, [](auto& m, int r) {
      return m(composable::Input(r, {3, 5})).pow(2).sum();
    });
  });
  // example-end
}

// A member parameter of any kind next to an ordinary one.
struct HoldsImpl : Module {
  explicit HoldsImpl(const Tensor& value, bool requires_grad = true)
      : other(register_module("other", Linear(3, 5))) {
    odd = register_parameter("odd", value, requires_grad);
  }
  Linear other;
  Tensor odd;
};
TORCH_MODULE(Holds);

Tensor Loss(Holds& model, int r) {
  Tensor loss = model->other(Input(r, {2, 3})).pow(2).sum();
  if (!model->odd.is_floating_point()) return loss + model->odd.sum();
  const Tensor y = model->odd.to(torch::kDouble) *
                   Input(10 + r, model->odd.sizes()).to(torch::kDouble);
  return loss + y.pow(2).sum().to(torch::kFloat);
}

void SgdStep(Module& module) {
  torch::optim::SGD(module.parameters(), 0.1).step();
}

// Two steps of training, and the weights afterwards.
void ExpectSameTraining(RankContext& rank, Holds& plain, Holds& sharded) {
  for (int step = 0; step < 2; ++step) {
    plain->zero_grad();
    sharded->zero_grad();
    ExpectSameBackward(rank, plain, sharded,
                       [](Holds& model, int r) { return Loss(model, r); });
    SgdStep(*plain);
    SgdStep(*sharded);
  }
  ExpectParameters(*sharded, *plain);
  EXPECT_TRUE(torch::equal(full_state_dict(sharded)["odd"], plain->odd));
}

// --- Sizes -------------------------------------------------------------------

using Sizes = std::vector<int64_t>;

class SizesTest : public testing::TestWithParam<std::tuple<int, Sizes>> {};

INSTANTIATE_TEST_SUITE_P(
    All, SizesTest,
    testing::Combine(testing::Values(1, 2, 3, 4),
                     testing::Values(Sizes{1}, Sizes{7}, Sizes{1, 7},
                                     Sizes{7, 1}, Sizes{1, 1}, Sizes{7, 3},
                                     Sizes{1, 1, 1, 1}, Sizes{1, 3, 5},
                                     Sizes{2, 1, 3}, Sizes{7, 5, 3},
                                     Sizes{257, 3}, Sizes{3, 257})),
    [](const auto& info) {
      std::string name = "Size";
      for (const auto size : std::get<1>(info.param)) {
        name += std::to_string(size) + "x";
      }
      name.back() = 'R';
      return name + std::to_string(std::get<0>(info.param));
    });

TEST_P(SizesTest, TrainsAsUnsharded) {
  const auto& [world_size, sizes] = GetParam();
  ExactRanks(world_size, [&, &sizes = sizes](RankContext& rank) {
    auto [plain, sharded] =
        MakePair([&] { return Holds(torch::randn(sizes)); });
    fully_shard(sharded, rank.options());
    EXPECT_EQ(sharded->odd.sizes(), plain->odd.sizes());
    const Tensor shard = sharded->named_parameters()["odd"];
    EXPECT_TRUE(shard.is_leaf());
    EXPECT_EQ(shard.dim(), plain->odd.dim());
    ExpectSameTraining(rank, plain, sharded);
  });
}

TEST(SizesDetailsTest, AllRowsAreSomewhereOnce) {
  for (const int world_size : {2, 3, 4}) {
    std::vector<int64_t> elements(world_size);
    ExactRanks(world_size, [&](RankContext& rank) {
      Linear model = RankContext::Seeded(1, [] { return Linear(3, 7); });
      fully_shard(model, rank.options());
      elements[rank.rank] = model->named_parameters()["weight"].numel() +
                            model->named_parameters()["bias"].numel();
    });
    int64_t sum = 0;
    for (const auto n : elements) sum += n;
    EXPECT_EQ(sum, 3 * 7 + 7);
  }
}

class WithoutElements : public testing::TestWithParam<Sizes> {};

INSTANTIATE_TEST_SUITE_P(All, WithoutElements,
                         testing::Values(Sizes{0}, Sizes{0, 3}, Sizes{3, 0}));

TEST_P(WithoutElements, AreLeftAlone) {
  ExactRanks(2, [&](RankContext& rank) {
    auto [plain, sharded] =
        MakePair([&] { return Holds(torch::empty(GetParam())); });
    fully_shard(sharded, rank.options());
    EXPECT_TRUE(sharded->named_parameters()["odd"].is_same(sharded->odd));
    EXPECT_EQ(sharded->odd.sizes(), Sizes(GetParam()));
    const auto loss = [](Holds& model, int r) {
      return model->other(Input(r, {2, 3})).pow(2).sum() + model->odd.sum();
    };
    ExpectSameBackward(rank, plain, sharded, loss);
    SgdStep(*sharded);
    EXPECT_EQ(full_state_dict(sharded)["odd"].sizes(), Sizes(GetParam()));
  });
}

TEST(UndefinedEntry, OfALayerWithoutBias) {
  for (const auto groups : {Groups::kOne, Groups::kPerModule}) {
    ExactRanks(3, [&](RankContext& rank) {
      auto [plain, sharded] = MakePair([] {
        return Sequential(
            Linear(LinearOptions(3, 7).bias(false)),
            Conv1d(Conv1dOptions(1, 3, 3).bias(false)),
            LayerNorm(LayerNormOptions({5}).elementwise_affine(false)));
      });
      Shard(sharded, groups, rank.options());
      EXPECT_EQ(sharded->parameters().size(), 2);
      EXPECT_FALSE(sharded[0]->as<Linear>()->bias.defined());
      ExpectSameBackward(rank, plain, sharded, [](Sequential& model, int r) {
        return model->forward(Input(r, {2, 1, 3})).pow(3).sum();
      });
    });
  }
}

TEST(NoParametersAtAll, IsFine) {
  ExactRanks(2, [](RankContext& rank) {
    auto model = Sequential(ReLU(), Flatten());
    auto handle = fully_shard(model, rank.options());
    handle.unshard();
    handle.reshard();
    const Tensor x = Input(1, {2, 3});
    EXPECT_TRUE(torch::equal(model->forward(x), torch::relu(x)));
  });
}

// --- Memory layout -----------------------------------------------------------

struct Layout {
  std::string name;
  std::function<Tensor()> make;
};

const std::vector<Layout>& Layouts() {
  static const auto* layouts = new std::vector<Layout>{
      {"Transposed",
       [] {
         return torch::randn({5, 7}).t();
       }},
      {"TransposedOneRow",
       [] {
         return torch::randn({7, 1}).t();
       }},
      {"Permuted",
       [] {
         return torch::randn({3, 5, 7}).permute({2, 0, 1});
       }},
      {"ChannelsLast",
       [] {
         return torch::randn({7, 3, 2, 2})
             .contiguous(at::MemoryFormat::ChannelsLast);
       }},
      {"ChannelsLast3d",
       [] {
         return torch::randn({3, 2, 2, 2, 2})
             .contiguous(at::MemoryFormat::ChannelsLast3d);
       }},
      {"SliceOfRows",
       [] {
         return torch::randn({9, 3}).narrow(0, 1, 7);
       }},
  };
  return *layouts;
}

// The same layout in memory of its own: a parameter of its own, not a view.
Tensor InOwnMemory(const Tensor& view) {
  return torch::empty_strided(view.sizes(), view.strides()).copy_(view);
}

class LayoutTest : public testing::TestWithParam<std::tuple<int, size_t>> {};

INSTANTIATE_TEST_SUITE_P(
    All, LayoutTest,
    testing::Combine(testing::Values(2, 3, 4),
                     testing::Range<size_t>(0, Layouts().size())),
    [](const auto& info) {
      return Layouts()[std::get<1>(info.param)].name +
             std::to_string(std::get<0>(info.param));
    });

TEST_P(LayoutTest, KeepsStridesAndTrainsAsUnsharded) {
  const auto [world_size, index] = GetParam();
  ExactRanks(world_size, [&, index = index](RankContext& rank) {
    auto [plain, sharded] =
        MakePair([&] { return Holds(InOwnMemory(Layouts()[index].make())); });
    fully_shard(sharded, rank.options());
    for (int64_t d = 0; d < plain->odd.dim(); ++d) {
      // The stride of a single element means nothing.
      if (plain->odd.size(d) == 1) continue;
      EXPECT_EQ(sharded->odd.stride(d), plain->odd.stride(d));
    }
    ExpectSameTraining(rank, plain, sharded);
  });
}

// A parameter that autograd takes for a view of another tensor, which is what
// register_parameter("odd", torch::randn({5, 7}).t()) gives.
TEST_P(LayoutTest, ViewOfAnotherTensorTrainsAsUnshardedOrIsRefused) {
  const auto [world_size, index] = GetParam();
  ExactRanks(world_size, [&, index = index](RankContext& rank) {
    auto [plain, sharded] =
        MakePair([&] { return Holds(Layouts()[index].make()); });
    try {
      fully_shard(sharded, rank.options());
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("'odd'"), std::string::npos);
      return;
    }
    ExpectSameBackward(rank, plain, sharded,
                       [](Holds& model, int r) { return Loss(model, r); });
    SgdStep(*plain);
    SgdStep(*sharded);
    ExpectParameters(*sharded, *plain);
  });
}

TEST(LayoutDetailsTest, ChannelsLastConvolution) {
  ExactRanks(3, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] {
      Conv2d model(Conv2dOptions(3, 7, 3));
      model->weight.set_data(
          model->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
      return model;
    });
    fully_shard(sharded, rank.options());
    EXPECT_TRUE(sharded->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
    ExpectSameBackward(rank, plain, sharded, [](Conv2d& model, int r) {
      return model(Input(r, {2, 3, 5, 5})
                       .contiguous(at::MemoryFormat::ChannelsLast))
          .pow(2)
          .sum();
    });
  });
}

TEST(LayoutDetailsTest, TransposedLinearWeight) {
  ExactRanks(3, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] {
      Linear model(3, 7);
      model->weight.set_data(torch::randn({3, 7}).t());
      return model;
    });
    fully_shard(sharded, rank.options());
    EXPECT_EQ(sharded->weight.stride(0), 1);
    ExpectSameBackward(rank, plain, sharded, [](Linear& model, int r) {
      return model(Input(r, {2, 3})).pow(2).sum();
    });
  });
}

// --- Dtypes ------------------------------------------------------------------

class DtypeTest
    : public testing::TestWithParam<std::tuple<int, at::ScalarType>> {};

INSTANTIATE_TEST_SUITE_P(
    All, DtypeTest,
    testing::Combine(testing::Values(2, 3),
                     testing::Values(torch::kFloat, torch::kDouble,
                                     torch::kBFloat16, torch::kHalf)),
    [](const auto& info) {
      return std::string(c10::toString(std::get<1>(info.param))) +
             std::to_string(std::get<0>(info.param));
    });

TEST_P(DtypeTest, NextToFloatInOneGroup) {
  const auto [world_size, dtype] = GetParam();
  ExactRanks(world_size, [&, dtype = dtype](RankContext& rank) {
    auto [plain, sharded] = MakePair([&] {
      return Holds(torch::randn({7, 3}).to(dtype));
    });
    fully_shard(sharded, rank.options());
    EXPECT_EQ(sharded->odd.scalar_type(), dtype);
    EXPECT_EQ(sharded->named_parameters()["odd"].scalar_type(), dtype);
    for (int step = 0; step < 2; ++step) {
      plain->zero_grad();
      sharded->zero_grad();
      ExpectSameBackward(rank, plain, sharded,
                         [](Holds& model, int r) { return Loss(model, r); });
      EXPECT_EQ(sharded->named_parameters()["odd"].grad().scalar_type(), dtype);
      SgdStep(*plain);
      SgdStep(*sharded);
    }
    ExpectParameters(*sharded, *plain);
  });
}

TEST_P(DtypeTest, WholeModel) {
  const auto [world_size, dtype] = GetParam();
  ExactRanks(world_size, [&, dtype = dtype](RankContext& rank) {
    auto [plain, sharded] = MakePair([&] {
      Mlp model;
      model->to(dtype);
      return model;
    });
    ShardEverySubmodule(sharded, rank.options());
    ExpectSameBackward(rank, plain, sharded, [&](Mlp& model, int r) {
      return model(Input(r, {4, 5}).to(dtype)).pow(2).sum();
    });
  });
}

TEST(MixedDtypesTest, FourDtypesTrainableAndFrozenInOneGroup) {
  struct MixImpl : Module {
    MixImpl() {
      int i = 0;
      for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16,
                               torch::kHalf, torch::kFloat, torch::kDouble}) {
        const std::string name = "p" + std::to_string(i);
        parts.push_back(register_parameter(
            name, torch::randn({7 - i, 3}).to(dtype), /*requires_grad=*/i < 4));
        ++i;
      }
    }
    std::vector<Tensor> parts;
  };
  ExactRanks(3, [](RankContext& rank) {
    auto [plain, sharded] =
        MakePair([] { return std::make_shared<MixImpl>(); });
    fully_shard(sharded, rank.options());
    ExpectSameBackward(
        rank, plain, sharded, [](std::shared_ptr<MixImpl>& model, int r) {
          Tensor sum = torch::zeros({3}, torch::kDouble);
          for (const auto& part : model->parts) {
            sum = sum + (part.to(torch::kDouble) *
                         Input(r, part.sizes()).to(torch::kDouble))
                            .sum(0);
          }
          return sum.pow(2).sum();
        });
  });
}

class IntegerTest
    : public testing::TestWithParam<std::tuple<int, at::ScalarType>> {};

INSTANTIATE_TEST_SUITE_P(
    All, IntegerTest,
    testing::Combine(testing::Values(2, 3),
                     testing::Values(torch::kLong, torch::kInt, torch::kByte,
                                     torch::kChar, torch::kBool,
                                     torch::kShort)),
    [](const auto& info) {
      return std::string(c10::toString(std::get<1>(info.param))) +
             std::to_string(std::get<0>(info.param));
    });

TEST_P(IntegerTest, FrozenParameter) {
  const auto [world_size, dtype] = GetParam();
  // Over Gloo, which does not know all dtypes.
  RunRanks(world_size, [&, dtype = dtype](RankContext& rank) {
    auto [plain, sharded] = MakePair([&] {
      return Holds(torch::randint(0, 2, {7, 3}).to(dtype),
                   /*requires_grad=*/false);
    });
    fully_shard(sharded, rank.options());
    ExpectSameBackward(
        rank, plain, sharded,
        [](Holds& model, int r) { return Loss(model, r); }, 1e-6);
    EXPECT_TRUE(torch::equal(full_state_dict(sharded)["odd"], plain->odd));
  });
}

TEST(BuffersTest, OfAnyDtypeStayWhole) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return BatchNorm1d(3); });
    fully_shard(sharded, rank.options());
    plain(Input(rank.rank, {4, 3}));
    sharded(Input(rank.rank, {4, 3}));
    for (const auto& item : plain->named_buffers()) {
      EXPECT_TRUE(
          torch::equal(sharded->named_buffers()[item.key()], item.value()))
          << item.key();
    }
  });
}

TEST(ComplexTest, ParametersAreRightOrRefusedByName) {
  const auto make = [] {
    return Holds(torch::randn({7, 3}, torch::kComplexFloat));
  };
  const auto loss = [](Holds& model, int r) {
    return torch::abs(model->odd * Input(r, {7, 3})).sum();
  };
  RunRanks(2, [&](RankContext& rank) {
    auto [plain, sharded] = MakePair(make);
    try {
      fully_shard(sharded, rank.options());
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("'odd'"), std::string::npos);
      return;
    }
    ExpectSameBackward(rank, plain, sharded, loss, 1e-6);
  });
}

// --- Refused -----------------------------------------------------------------

struct Refused {
  std::string name;
  std::function<Holds()> make;
  std::vector<std::string> texts;
};

const std::vector<Refused>& Refusals() {
  static const auto* refusals = new std::vector<Refused>{
      {"Overlapping",
       [] {
         return Holds(torch::randn({1, 3}).expand({7, 3}));
       },
       {"of sizes [7, 3] and strides [0, 1] is not dense", "contiguous()"}},
      {"WithGaps",
       [] {
         return Holds(torch::randn({7, 6}).slice(1, 0, 6, 2));
       },
       {"of sizes [7, 3] and strides [6, 2] is not dense", "contiguous()"}},
      {"Sparse",
       [] {
         return Holds(torch::ones({7, 3}).to_sparse(), /*requires_grad=*/false);
       },
       {"has layout", "to_dense()"}},
  };
  return *refusals;
}

class RefusalTest : public testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(All, RefusalTest,
                         testing::Range<size_t>(0, Refusals().size()),
                         [](const auto& info) {
                           return Refusals()[info.param].name;
                         });

TEST_P(RefusalTest, NamesTheParameterAndChangesNothing) {
  const Refused& refused = Refusals()[GetParam()];
  RunRanks(1, [&](RankContext& rank) {
    Holds model = RankContext::Seeded(1, refused.make);
    ModuleList parent(Linear(3, 3), model);
    const auto before = parent->parameters();
    for (int attempt = 0; attempt < 2; ++attempt) {
      auto texts = refused.texts;
      texts.push_back("fully_shard: parameter '1.odd'");
      ExpectThrows([&] { fully_shard(parent, rank.options()); }, texts);
      EXPECT_EQ(fully_shard.state(parent), nullptr);
      const auto after = parent->parameters();
      ASSERT_EQ(after.size(), before.size());
      for (size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(after[i].is_same(before[i]));
        EXPECT_FALSE(IsShard(after[i]));
      }
    }
    // What is fit to be sharded still can be.
    fully_shard(model->other, rank.options());
    model->other(Input(1, {2, 3})).sum().backward();
    EXPECT_TRUE(model->other->parameters()[0].grad().defined());
  });
}

}  // namespace
}  // namespace composable
