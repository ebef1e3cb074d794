// What the tests of semantics share: an unsharded model that stands for all
// ranks, and errors.
//
//   composable::ExactRanks(2, [](composable::RankContext& rank) {
//     auto [plain, sharded] = composable::MakePair(
//         [] { return torch::nn::Linear(5, 2); });
//     composable::fully_shard(sharded, rank.options());
//     composable::ExpectSameBackward(rank, plain, sharded, [](auto& m, int r) {
//       return m(composable::Input(r, {3, 5})).pow(2).sum();
//     });
//   });
//
// Every comparison is bit for bit unless a tolerance is given.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "composable/composable.h"
#include "tests/support/gradient_check.h"
#include "tests/support/ranks.h"
#include "tests/support/shards.h"

namespace composable {

// Runs ranks over a backend that adds in the order of the ranks: Gloo for up to
// two, where there is one order only, else the in-process one.
inline void ExactRanks(int world_size,
                       const std::function<void(RankContext&)>& body) {
  RunRanksOptions options;
  options.backend =
      world_size <= 2 ? TestBackend::kGloo : TestBackend::kInProcess;
  RunRanks(world_size, body, options);
}

// Normal numbers that depend on `seed` only.
inline at::Tensor Input(int64_t seed, at::IntArrayRef sizes) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator);
}

template <typename Holder>
struct Pair {
  Holder plain;
  Holder sharded;  // not sharded yet
};

// Two modules with equal values, the same on every rank.
template <typename Make>
auto MakePair(Make make) {
  using Holder = decltype(make());
  return Pair<Holder>{RankContext::Seeded(1, make),
                      RankContext::Seeded(1, make)};
}

// Adds to the gradients of `plain` the mean, over ranks, of those that
// `backward(r)` gives: what data parallelism does in one step.
template <typename Backward>
void BackwardOfAllRanks(torch::nn::Module& plain, int world_size,
                        Backward backward) {
  auto parameters = plain.parameters();
  std::vector<at::Tensor> before;
  for (const auto& parameter : parameters) before.push_back(parameter.grad());
  std::vector<at::Tensor> sums(parameters.size());
  for (int r = 0; r < world_size; ++r) {
    for (auto& parameter : parameters) parameter.mutable_grad().reset();
    backward(r);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      sums[i] = sums[i].defined() ? sums[i] + gradient : gradient.clone();
    }
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor gradient = before[i];
    if (sums[i].defined()) {
      const at::Tensor mean = sums[i] / world_size;
      gradient = gradient.defined() ? gradient + mean : mean;
    }
    parameters[i].mutable_grad() = gradient;
  }
}

// One backward of both models; expects equal losses and gradients. `loss(m, r)`
// is the loss of rank r.
template <typename Holder, typename Loss>
void ExpectSameBackward(RankContext& rank, Holder& plain, Holder& sharded,
                        Loss loss, double tolerance = 0) {
  at::Tensor expected;
  BackwardOfAllRanks(*plain, rank.world_size, [&](int r) {
    at::Tensor value = loss(plain, r);
    value.backward();
    if (r == rank.rank) expected = value.detach();
  });
  at::Tensor value = loss(sharded, rank.rank);
  EXPECT_TRUE(torch::allclose(value.detach(), expected, tolerance, /*atol=*/0))
      << value.item<double>() << " " << expected.item<double>();
  value.backward();
  ExpectGradients(*sharded, *plain, tolerance);
}

// Expects every shard to be this rank's rows of the plain parameter, and every
// parameter that is not sharded to be equal to it.
inline void ExpectParameters(torch::nn::Module& sharded,
                             torch::nn::Module& plain, double tolerance = 0) {
  const at::NoGradGuard no_grad;
  const auto expected = plain.named_parameters();
  for (const auto& item : sharded.named_parameters()) {
    const at::Tensor& whole = expected[item.key()];
    const at::Tensor rows =
        IsShard(item.value()) ? LocalRows(item.value(), whole) : whole;
    ASSERT_EQ(item.value().sizes(), rows.sizes()) << item.key();
    EXPECT_TRUE(torch::allclose(item.value(), rows, tolerance, tolerance))
        << item.key() << "\n"
        << item.value() << "\n"
        << rows;
  }
}

// Each parameter once, however many names it has.
inline std::vector<at::Tensor> UniqueParameters(
    const torch::nn::Module& module) {
  std::vector<at::Tensor> unique;
  for (const auto& parameter : module.parameters()) {
    bool known = false;
    for (const auto& other : unique) known |= other.is_same(parameter);
    if (!known) unique.push_back(parameter);
  }
  return unique;
}

// Expects `call` to throw an `Error` whose message contains all of `texts`.
template <typename Error = c10::Error, typename Call>
void ExpectThrows(Call call, const std::vector<std::string>& texts) {
  try {
    call();
  } catch (const Error& error) {
    const std::string message = error.what_without_backtrace();
    for (const auto& text : texts) {
      EXPECT_NE(message.find(text), std::string::npos)
          << "expected \"" << text << "\" in: " << message;
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type of error was thrown: " << error.what();
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

// Three layers of odd sizes.
struct MlpImpl : torch::nn::Module {
  MlpImpl()
      : first(register_module("first", torch::nn::Linear(5, 7))),
        second(register_module("second", torch::nn::Linear(7, 7))),
        third(register_module("third", torch::nn::Linear(7, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first, second, third;
};
TORCH_MODULE(Mlp);

inline at::Tensor MlpLoss(Mlp& model, int64_t seed) {
  return model(Input(seed, {4, 5})).pow(2).sum();
}

enum class Groups { kOne, kPerModule };

inline std::string Name(Groups groups) {
  return groups == Groups::kOne ? "OneGroup" : "GroupPerModule";
}

inline std::vector<FSDPModule> Shard(const ModuleRef& module, Groups groups,
                                     const FullyShardOptions& options) {
  if (groups == Groups::kPerModule) {
    return ShardEverySubmodule(module, options);
  }
  return {fully_shard(module, options)};
}

}  // namespace composable
