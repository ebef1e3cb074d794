#include "state/fsdp_param.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "state/tensor_access.h"

namespace composable {
namespace {

using Sizes = std::vector<int64_t>;

at::Tensor Counting(const Sizes& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return at::arange(numel, c10::kFloat).view(sizes);
}

// A dense tensor of `sizes` whose dimensions lie in memory in the order
// `outer_to_inner`.
at::Tensor InOrder(const Sizes& sizes, const Sizes& outer_to_inner) {
  Sizes in_memory;
  Sizes back(sizes.size());
  for (size_t i = 0; i < outer_to_inner.size(); ++i) {
    in_memory.push_back(sizes[outer_to_inner[i]]);
    back[outer_to_inner[i]] = static_cast<int64_t>(i);
  }
  return Counting(in_memory).permute(back);
}

FSDPParam Param(const at::Tensor& tensor) {
  return FSDPParam({.parameter = tensor, .name = "weight", .slots = {}});
}

ShardLayout Plan(const std::vector<FSDPParam>& params, int64_t world_size) {
  std::vector<ParamExtent> extents;
  for (const auto& param : params) extents.push_back(param.extent());
  return ShardLayout::Plan(extents, {.world_size = world_size, .itemsize = 4});
}

Sizes SizesOf(const at::Tensor& tensor) { return tensor.sizes().vec(); }

struct Shard {
  FSDPParam param;
  at::Tensor flat;
  at::Tensor rows;
};

// One tensor alone in a group of `world_size` ranks, seen by `rank`.
Shard ShardOf(const at::Tensor& tensor, int64_t world_size, int rank) {
  FSDPParam param = Param(tensor);
  const ShardLayout layout = Plan({param}, world_size);
  param.Place(0, 0, layout, rank);
  const at::Tensor flat = at::full({layout.shard_numel()}, -1, c10::kFloat);
  param.CopyRowsFrom(tensor, flat);
  at::Tensor rows = param.RowsIn(flat);
  return {std::move(param), flat, rows};
}

TEST(FSDPParamTest, Describes) {
  const at::Tensor tensor = Counting({4, 3});
  const FSDPParam param = Param(tensor);
  EXPECT_EQ(param.fqn, "weight");
  EXPECT_EQ(param.numel(), 12);
  EXPECT_EQ(param.dtypes().original, c10::kFloat);
  EXPECT_EQ(param.sizes(), at::IntArrayRef({4, 3}));
  EXPECT_FALSE(param.has_edge);
  EXPECT_TRUE(param.unsharded().is_same(tensor));
}

TEST(FSDPParamTest, HoldsTheParameterWeakly) {
  at::Tensor tensor = Counting({2});
  const FSDPParam param = Param(tensor);
  EXPECT_EQ(tensor.use_count(), 1u);
  tensor.reset();
  EXPECT_FALSE(param.unsharded().defined());
}

TEST(FSDPParamTest, RowsAreOfTheOutermostDimensionInMemory) {
  const auto rows = [](const at::Tensor& tensor) {
    return Param(tensor).extent().rows;
  };
  EXPECT_EQ(rows(Counting({4, 3})), 4);
  EXPECT_EQ(rows(Counting({4, 3}).t()), 4);  // [3, 4], columns in a row
  EXPECT_EQ(rows(Counting({7})), 7);
  EXPECT_EQ(rows(Counting({1, 5})), 5);
  EXPECT_EQ(rows(Counting({5, 1})), 5);
  EXPECT_EQ(rows(Counting({1, 1, 6, 1})), 6);
  EXPECT_EQ(rows(Counting({1})), 1);
  EXPECT_EQ(rows(Counting({1, 1})), 1);
  // A convolution in channels-last memory: O, H, W, I.
  EXPECT_EQ(rows(InOrder({6, 2, 3, 5}, {0, 2, 3, 1})), 6);
  EXPECT_EQ(rows(InOrder({6, 2, 3, 5}, {3, 1, 0, 2})), 5);
}

TEST(FSDPParamTest, RanksHoldRowsInOrder) {
  const at::Tensor tensor = Counting({8, 3});
  for (int rank = 0; rank < 2; ++rank) {
    const Shard shard = ShardOf(tensor, 2, rank);
    EXPECT_TRUE(at::equal(shard.rows, tensor.narrow(0, 4 * rank, 4)));
    EXPECT_EQ(shard.rows.dim(), 2);
    EXPECT_TRUE(shard.rows.is_contiguous());
    EXPECT_EQ(shard.rows.storage().data(), shard.flat.storage().data());
  }
}

TEST(FSDPParamTest, TransposedKeepsItsStridesAndIsCutAlongColumns) {
  const at::Tensor tensor = Counting({8, 3}).t();  // [3, 8], strides (1, 3)
  for (int rank = 0; rank < 2; ++rank) {
    const Shard shard = ShardOf(tensor, 2, rank);
    EXPECT_EQ(SizesOf(shard.rows), Sizes({3, 4}));
    EXPECT_EQ(shard.rows.strides(), at::IntArrayRef({1, 3}));
    EXPECT_TRUE(at::equal(shard.rows, tensor.narrow(1, 4 * rank, 4)));
  }
}

TEST(FSDPParamTest, ASingleRowIsCutAlongItsLength) {
  const at::Tensor tensor = Counting({1, 8});
  for (int rank = 0; rank < 2; ++rank) {
    const Shard shard = ShardOf(tensor, 2, rank);
    EXPECT_EQ(SizesOf(shard.rows), Sizes({1, 4}));
    EXPECT_TRUE(at::equal(shard.rows, tensor.narrow(1, 4 * rank, 4)));
  }
}

TEST(FSDPParamTest, RowsThatAreTooLargeAreCutBetweenElements) {
  // 3 rows of 1000 elements over 2 ranks: whole rows would pad by a third.
  const at::Tensor tensor = Counting({3, 1000});
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < 2; ++rank) {
    const Shard shard = ShardOf(tensor, 2, rank);
    const auto range = shard.param.local_range();
    // A column of elements: two dimensions, as the parameter has.
    EXPECT_EQ(SizesOf(shard.rows), Sizes({range.end - range.begin, 1}));
    EXPECT_NE(range.end % 1000, rank == 0 ? 0 : 1) << "a row edge";
    EXPECT_TRUE(at::equal(
        shard.rows.flatten(),
        tensor.flatten().narrow(0, range.begin, range.end - range.begin)));
    parts.push_back(shard.rows.flatten());
  }
  EXPECT_TRUE(at::equal(at::cat(parts), tensor.flatten()));
}

TEST(FSDPParamTest, ARankWithoutRowsKeepsTheDimensions) {
  const at::Tensor tensor = Counting({1, 2, 3}).permute({2, 0, 1});
  bool found = false;
  for (int rank = 0; rank < 4; ++rank) {
    const Shard shard = ShardOf(tensor, 4, rank);
    EXPECT_EQ(shard.rows.dim(), 3);
    const auto range = shard.param.local_range();
    EXPECT_EQ(shard.rows.numel(), range.end - range.begin);
    found = found || shard.rows.numel() == 0;
  }
  EXPECT_TRUE(found);
}

TEST(FSDPParamTest, CopyElements) {
  const at::Tensor tensor = Counting({3, 4}).t();  // in memory: 3 rows of 4
  const FSDPParam param = Param(tensor);
  const auto copy = [&](int64_t begin, int64_t end) {
    const at::Tensor out = at::full({end - begin}, -1, c10::kFloat);
    param.CopyElements(tensor, begin, end, out);
    return out;
  };
  const at::Tensor in_memory = at::arange(12, c10::kFloat);
  EXPECT_TRUE(at::equal(copy(0, 12), in_memory));
  EXPECT_TRUE(at::equal(copy(4, 8), in_memory.narrow(0, 4, 4)));  // a row
  EXPECT_TRUE(at::equal(copy(3, 9), in_memory.narrow(0, 3, 6)));  // parts
  EXPECT_EQ(copy(5, 5).numel(), 0);
  // The source may have other strides, and another dtype, than the parameter.
  const at::Tensor out = at::full({12}, -1, c10::kFloat);
  param.CopyElements(tensor.contiguous().to(c10::kDouble), 0, 12, out);
  EXPECT_TRUE(at::equal(out, in_memory));
}

// The rule that makes both collectives free of copies: the ranks' flat shards,
// one after the other, are the unsharded buffer.
TEST(FSDPParamTest, ConcatenatedShardsAreTheWholeParameters) {
  const std::vector<std::vector<at::Tensor>> groups = {
      {Counting({8, 4}), Counting({8})},
      {Counting({5, 3}), Counting({3, 5}).t(), Counting({1, 7}),
       Counting({7, 1}), Counting({1})},
      {InOrder({6, 2, 3, 5}, {0, 2, 3, 1}), InOrder({2, 3, 4}, {2, 0, 1}),
       InOrder({4, 1, 6}, {2, 1, 0})},
      {Counting({2, 999})},
      {Counting({3, 333}), Counting({1, 1, 1}), Counting({17})},
  };
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const int64_t world_size : {1, 2, 3, 4, 7}) {
      SCOPED_TRACE("group " + std::to_string(g) + ", " +
                   std::to_string(world_size) + " ranks");
      std::vector<FSDPParam> params;
      for (const auto& tensor : groups[g]) params.push_back(Param(tensor));
      const ShardLayout layout = Plan(params, world_size);
      std::vector<at::Tensor> flats;
      for (int rank = 0; rank < world_size; ++rank) {
        const at::Tensor flat =
            at::full({layout.shard_numel()}, -1, c10::kFloat);
        for (size_t i = 0; i < params.size(); ++i) {
          params[i].Place(0, i, layout, rank);
          params[i].CopyRowsFrom(groups[g][i], flat);
          const at::Tensor rows = params[i].RowsIn(flat);
          EXPECT_EQ(rows.dim(), groups[g][i].dim());
          EXPECT_EQ(rows.numel(), params[i].local_range().end -
                                      params[i].local_range().begin);
        }
        flats.push_back(flat);
      }
      const at::Tensor buffer = at::cat(flats);
      for (size_t i = 0; i < params.size(); ++i) {
        const at::Tensor whole = params[i].WholeIn(internal::StorageOf(buffer));
        EXPECT_EQ(whole.sizes(), groups[g][i].sizes());
        EXPECT_TRUE(whole.is_non_overlapping_and_dense());
        EXPECT_TRUE(at::equal(whole, groups[g][i])) << "parameter " << i;
        for (int64_t d = 0; d < whole.dim(); ++d) {
          if (whole.size(d) > 1) {
            EXPECT_EQ(whole.stride(d), groups[g][i].stride(d)) << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace composable
