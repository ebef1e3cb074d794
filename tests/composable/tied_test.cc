// One weight under several names, in every way that groups can be cut around
// it: the gradient is the sum over its uses, and it stays one tensor.
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

struct TiedOutputImpl : Module {
  explicit TiedOutputImpl(const Tensor& shared)
      : weight(register_parameter("weight", shared)) {}
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight.t()); }
  Tensor weight;
};
TORCH_MODULE(TiedOutput);

struct TiedImpl : Module {
  TiedImpl()
      : embedding(register_module("embedding", Embedding(7, 5))),
        body(register_module("body", Linear(5, 5))),
        output(register_module("output", TiedOutput(embedding->weight))) {}
  Tensor forward(const Tensor& ids) {
    return output(torch::tanh(body(embedding(ids))));
  }
  Embedding embedding;
  Linear body;
  TiedOutput output;
};
TORCH_MODULE(Tied);

Tensor Loss(Tied& model, int64_t seed) {
  const Tensor ids = Input(seed, {2, 3}).abs().mul(100).to(torch::kLong) % 7;
  return model(ids).pow(2).sum();
}

enum class Cut {
  kOneGroup,
  kInRoot,  // the root's group holds both names
  kEmbeddingFirst,
  kOutputFirst,
  kList,
};

std::string Name(Cut cut) {
  switch (cut) {
    case Cut::kOneGroup:
      return "OneGroup";
    case Cut::kInRoot:
      return "InRoot";
    case Cut::kEmbeddingFirst:
      return "EmbeddingFirst";
    case Cut::kOutputFirst:
      return "OutputFirst";
    case Cut::kList:
      return "List";
  }
  return "";
}

void ShardTied(Tied& model, Cut cut, const FullyShardOptions& options) {
  switch (cut) {
    case Cut::kOneGroup:
      break;
    case Cut::kInRoot:
      fully_shard(model->body, options);
      break;
    case Cut::kEmbeddingFirst:
      fully_shard(model->embedding, options);
      fully_shard(model->body, options);
      fully_shard(model->output, options);
      break;
    case Cut::kOutputFirst:
      fully_shard(model->output, options);
      fully_shard(model->body, options);
      fully_shard(model->embedding, options);
      break;
    case Cut::kList:
      fully_shard({model->embedding, model->output}, options);
      break;
  }
  fully_shard(model, options);
}

class TiedTest : public testing::TestWithParam<std::tuple<int, Cut>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  Cut cut() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    Cuts, TiedTest,
    testing::Combine(testing::Values(1, 2, 3),
                     testing::Values(Cut::kOneGroup, Cut::kInRoot,
                                     Cut::kEmbeddingFirst, Cut::kOutputFirst,
                                     Cut::kList)),
    [](const auto& info) {
      return Name(std::get<1>(info.param)) +
             std::to_string(std::get<0>(info.param));
    });

TEST_P(TiedTest, TrainsAsUnsharded) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return Tied(); });
    ShardTied(sharded, cut(), rank.options());
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    torch::optim::SGD plain_optimizer(UniqueParameters(*plain), options);
    torch::optim::SGD optimizer(UniqueParameters(*sharded), options);
    for (int step = 0; step < 3; ++step) {
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      ExpectSameBackward(rank, plain, sharded, [&](auto& model, int r) {
        return Loss(model, 10 * step + r);
      });
      plain_optimizer.step();
      optimizer.step();
    }
    ExpectParameters(*sharded, *plain);
  });
}

TEST_P(TiedTest, StaysOneTensor) {
  ExactRanks(world_size(), [&](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Tied(); });
    const Tensor member = model->embedding->weight;
    ShardTied(model, cut(), rank.options());
    const auto expect_one = [&] {
      const auto names = model->named_parameters();
      EXPECT_TRUE(IsShard(names["embedding.weight"]));
      EXPECT_TRUE(names["embedding.weight"].is_same(names["output.weight"]));
      EXPECT_TRUE(model->embedding->weight.is_same(member));
      EXPECT_TRUE(model->output->weight.is_same(member));
      EXPECT_EQ(UniqueParameters(*model).size(), 3);
    };
    expect_one();
    Loss(model, rank.rank).backward();
    expect_one();
  });
}

// Two registrations of one module, as opposed to one tensor in two modules.
struct SharedModuleImpl : Module {
  SharedModuleImpl() : block(5, 5) {
    register_module("a", block);
    register_module("b", block);
  }
  Tensor forward(const Tensor& x) { return block(torch::tanh(block(x))); }
  Linear block;
};
TORCH_MODULE(SharedModule);

class SharedModuleTest
    : public testing::TestWithParam<std::tuple<int, Groups>> {};

INSTANTIATE_TEST_SUITE_P(Groups, SharedModuleTest,
                         testing::Combine(testing::Values(2, 3),
                                          testing::Values(Groups::kOne,
                                                          Groups::kPerModule)),
                         [](const auto& info) {
                           return Name(std::get<1>(info.param)) +
                                  std::to_string(std::get<0>(info.param));
                         });

TEST_P(SharedModuleTest, OneModuleUnderTwoNames) {
  ExactRanks(std::get<0>(GetParam()), [&](RankContext& rank) {
    auto [plain, sharded] = MakePair([] { return SharedModule(); });
    Shard(sharded, std::get<1>(GetParam()), rank.options());
    const auto names = sharded->named_parameters();
    EXPECT_TRUE(names["a.weight"].is_same(names["b.weight"]));
    ExpectSameBackward(rank, plain, sharded, [](auto& model, int r) {
      return model(Input(r, {3, 5})).pow(2).sum();
    });
  });
}

}  // namespace
}  // namespace composable
