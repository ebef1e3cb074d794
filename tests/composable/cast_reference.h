// Mixed precision written by hand with plain LibTorch: a master model, and a
// copy of it in another dtype that computes. What sharded training with a
// MixedPrecisionPolicy is compared with, bit for bit on two ranks.
//
//   composable::CastReference<composable::Mlp> reference(
//       plain, make, {torch::kBFloat16, torch::kFloat});
//   reference.Backward(rank, loss);   // plain's gradients are set
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "tests/composable/semantics.h"

namespace composable {

struct CastDtypes {
  c10::ScalarType compute = torch::kFloat;
  c10::ScalarType reduce = torch::kFloat;
};

template <typename Holder>
class CastReference {
 public:
  template <typename Make>
  CastReference(const Holder& master, Make make, CastDtypes dtypes)
      : master_(master),
        compute_(RankContext::Seeded(1, make)),
        dtypes_(dtypes) {
    for (auto& p : compute_->parameters()) {
      if (p.is_floating_point()) p.set_data(p.to(dtypes.compute));
    }
  }

  // One microbatch of rank r: adds what `loss(compute model, r)` gives to this
  // rank's sum. Returns the loss.
  template <typename Loss>
  at::Tensor Microbatch(int r, Loss loss) {
    const auto masters = master_->parameters();
    const auto computes = compute_->parameters();
    if (static_cast<int>(sums_.size()) <= r) sums_.resize(r + 1);
    auto& sums = sums_[r];
    sums.resize(masters.size());
    for (size_t i = 0; i < masters.size(); ++i) {
      const at::NoGradGuard no_grad;
      computes[i].detach().copy_(masters[i]);
      computes[i].mutable_grad().reset();
    }
    const at::Tensor value = loss(compute_, r);
    value.backward();
    for (size_t i = 0; i < masters.size(); ++i) {
      const at::Tensor& gradient = computes[i].grad();
      if (!gradient.defined()) continue;
      const at::Tensor cast = gradient.to(dtypes_.reduce);
      sums[i] = sums[i].defined() ? sums[i] + cast : cast.clone();
    }
    return value.detach();
  }

  // The mean over ranks, in the reduce dtype, is added to the master's
  // gradients.
  void Reduce(int world_size) {
    const auto masters = master_->parameters();
    for (size_t i = 0; i < masters.size(); ++i) {
      at::Tensor sum;
      for (const auto& of_rank : sums_) {
        if (!of_rank[i].defined()) continue;
        sum = sum.defined() ? sum + of_rank[i] : of_rank[i];
      }
      if (!sum.defined()) continue;
      const at::Tensor mean = (sum / world_size).to(masters[i].scalar_type());
      at::Tensor& gradient = masters[i].mutable_grad();
      gradient = gradient.defined() ? gradient + mean : mean;
    }
    sums_.clear();
  }

  // One backward of all ranks; returns the loss of `rank`.
  template <typename Loss>
  at::Tensor Backward(const RankContext& rank, Loss loss) {
    at::Tensor mine;
    for (int r = 0; r < rank.world_size; ++r) {
      const at::Tensor value = Microbatch(r, loss);
      if (r == rank.rank) mine = value;
    }
    Reduce(rank.world_size);
    return mine;
  }

 private:
  Holder master_;
  Holder compute_;
  CastDtypes dtypes_;
  std::vector<std::vector<at::Tensor>> sums_;  // by rank and parameter
};

inline FullyShardOptions WithPolicy(const RankContext& rank,
                                    const MixedPrecisionPolicy& policy) {
  return rank.options().mp_policy(policy);
}

inline MixedPrecisionPolicy Policy(
    std::optional<c10::ScalarType> param,
    std::optional<c10::ScalarType> reduce = std::nullopt,
    std::optional<c10::ScalarType> output = std::nullopt) {
  return MixedPrecisionPolicy()
      .param_dtype(param)
      .reduce_dtype(reduce)
      .output_dtype(output);
}

}  // namespace composable
