// Compares a sharded module with the same module unsharded: loss and gradients.
//
//   composable::CheckGradients(
//       rank, [] { return torch::nn::Linear(4, 3); },
//       [] { return std::vector<at::Tensor>{torch::randn({2, 4})}; },
//       [](auto& m, const auto& in, const auto& mid) {
//         auto y = m(in[0]);
//         mid();
//         return y.pow(2).sum();
//       });
//
// Every rank has inputs of its own; the reference is the mean of the gradients
// that the unsharded module has for each rank's inputs. The module is put twice
// into a parent, and every submodule with parameters is its own group, so there
// are always several groups. `mid` reshards all of them: called between uses,
// it makes each use gather anew.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "composable/composable.h"
#include "tests/support/ranks.h"
#include "tests/support/shards.h"

namespace composable {

template <typename Holder>
struct TwiceImpl : torch::nn::Module {
  template <typename Make>
  explicit TwiceImpl(Make make) : first(make()), second(make()) {
    register_module("first", first.ptr());
    register_module("second", second.ptr());
  }
  Holder first;
  Holder second;
};

// Expects the gradients of `sharded` to be this rank's rows of `reference`:
// bit for bit, or within `tolerance` relative to the largest element.
inline void ExpectGradients(torch::nn::Module& sharded,
                            torch::nn::Module& plain, double tolerance) {
  const auto expected = plain.named_parameters();
  for (const auto& item : sharded.named_parameters()) {
    const at::Tensor& shard = item.value();
    if (shard.numel() == 0 && !IsShard(shard)) continue;
    const at::Tensor& whole = expected[item.key()].grad();
    ASSERT_TRUE(IsShard(shard)) << item.key();
    ASSERT_EQ(shard.grad().defined(), whole.defined()) << item.key();
    if (!whole.defined()) continue;
    const at::Tensor rows = LocalRows(shard, whole.to_dense());
    ASSERT_EQ(shard.grad().sizes(), rows.sizes()) << item.key();
    if (rows.numel() == 0) continue;
    if (tolerance == 0) {
      EXPECT_TRUE(torch::equal(shard.grad(), rows)) << item.key() << "\n"
                                                    << shard.grad() << "\n"
                                                    << rows;
    } else {
      const double scale = whole.to_dense().abs().max().item<double>();
      EXPECT_LE((shard.grad() - rows).abs().max().item<double>(),
                tolerance * scale + 1e-12)
          << item.key();
    }
  }
}

template <typename Make, typename Draw, typename Run>
void CheckGradients(RankContext& rank, Make make, Draw draw, Run run) {
  using Twice = TwiceImpl<decltype(make())>;
  const auto build = [&] { return std::make_shared<Twice>(make); };
  auto plain = RankContext::Seeded(1, build);
  auto sharded = RankContext::Seeded(1, build);
  auto handles = ShardEverySubmodule(sharded, rank.options());

  const auto run_both = [&](Twice& model, const std::vector<at::Tensor>& inputs,
                            const std::function<void()>& mid) {
    at::Tensor loss = run(model.first, inputs, mid);
    mid();
    return loss + run(model.second, inputs, mid);
  };
  std::vector<std::vector<at::Tensor>> inputs;
  for (int r = 0; r < rank.world_size; ++r) {
    inputs.push_back(RankContext::Seeded(100 + r, draw));
  }
  at::Tensor expected_loss;
  std::vector<at::Tensor> sums(plain->parameters().size());
  for (int r = 0; r < rank.world_size; ++r) {
    plain->zero_grad();
    at::Tensor loss = run_both(*plain, inputs[r], [] {});
    loss.backward();
    if (r == rank.rank) expected_loss = loss.detach();
    // Never in place: gradients of several parameters may share memory.
    const auto parameters = plain->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      sums[i] = sums[i].defined() ? sums[i] + gradient.to_dense()
                                  : gradient.to_dense();
    }
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    plain->parameters()[i].mutable_grad() =
        sums[i].defined() ? sums[i] / rank.world_size : at::Tensor();
  }
  const auto reshard = [&] {
    for (auto& handle : handles) handle.reshard();
  };
  at::Tensor loss = run_both(*sharded, inputs[rank.rank], reshard);
  reshard();
  EXPECT_TRUE(torch::equal(loss.detach(), expected_loss))
      << loss.item<double>() << " " << expected_loss.item<double>();
  loss.backward();
  // Two addends have one sum; more depend on the order of the ring.
  ExpectGradients(*sharded, *plain, rank.world_size <= 2 ? 0 : 1e-5);
}

}  // namespace composable
