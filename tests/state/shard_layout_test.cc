#include "state/shard_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace composable {
namespace {

using Params = std::vector<ParamExtent>;

int64_t RowNumel(const ParamExtent& p) {
  return p.numel == 0 ? 1 : p.numel / p.rows;
}

int64_t Total(const Params& params) {
  return std::accumulate(
      params.begin(), params.end(), int64_t{0},
      [](int64_t sum, const ParamExtent& p) { return sum + p.numel; });
}

int64_t Unit(const ShardLayoutOptions& options) {
  return 16 / std::gcd(int64_t{16}, options.itemsize);
}

// The documented bound on world_size * S.
int64_t Bound(const Params& params, const ShardLayoutOptions& options) {
  const int64_t total = Total(params);
  return total + total / 20 + options.world_size * Unit(options);
}

size_t NumFallbacks(const ShardLayout& layout, const Params& params) {
  size_t count = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    if (layout.placement(i).granularity != RowNumel(params[i])) ++count;
  }
  return count;
}

double PaddingPercent(const ShardLayout& layout) {
  return 100.0 * static_cast<double>(layout.padding()) /
         static_cast<double>(layout.unsharded_numel() - layout.padding());
}

// {offset, granularity} of each parameter.
std::vector<std::pair<int64_t, int64_t>> Placements(const ShardLayout& layout) {
  std::vector<std::pair<int64_t, int64_t>> result;
  for (size_t i = 0; i < layout.num_params(); ++i) {
    result.emplace_back(layout.placement(i).offset,
                        layout.placement(i).granularity);
  }
  return result;
}

// {begin, end} of parameter i on each rank.
std::vector<std::pair<int64_t, int64_t>> Ranges(const ShardLayout& layout,
                                                size_t i) {
  std::vector<std::pair<int64_t, int64_t>> result;
  for (int64_t rank = 0; rank < layout.world_size(); ++rank) {
    const ShardRange range = layout.range(i, rank);
    result.emplace_back(range.begin, range.end);
  }
  return result;
}

// Everything the header guarantees for any input.
void ExpectInvariants(const ShardLayout& layout, const Params& params,
                      const ShardLayoutOptions& options) {
  const int64_t shard = layout.shard_numel();
  ASSERT_EQ(layout.num_params(), params.size());
  ASSERT_EQ(layout.world_size(), options.world_size);
  ASSERT_EQ(layout.unsharded_numel(), options.world_size * shard);
  EXPECT_EQ(shard * options.itemsize % 16, 0);
  EXPECT_LE(layout.unsharded_numel(), Bound(params, options));
  EXPECT_EQ(layout.padding(), layout.unsharded_numel() - Total(params));
  if (Total(params) == 0) {
    EXPECT_EQ(shard, 0);
  }

  int64_t cursor = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto [offset, granularity] = layout.placement(i);
    ASSERT_GE(offset, cursor) << "parameter " << i << " overlaps or is moved";
    cursor = offset + params[i].numel;
    ASSERT_TRUE(granularity == 1 || granularity == RowNumel(params[i]));
    int64_t tiled = 0;
    for (int64_t rank = 0; rank < options.world_size; ++rank) {
      const auto [begin, end] = layout.range(i, rank);
      ASSERT_EQ(begin, tiled) << "parameter " << i << " rank " << rank;
      ASSERT_GE(end, begin);
      ASSERT_EQ(begin % granularity, 0);
      ASSERT_EQ(end % granularity, 0);
      if (end > begin) {
        ASSERT_GE(offset + begin, rank * shard);
        ASSERT_LE(offset + end, (rank + 1) * shard);
      }
      tiled = end;
    }
    ASSERT_EQ(tiled, params[i].numel);
  }
  ASSERT_LE(cursor, layout.unsharded_numel());
}

ShardLayout PlanChecked(const Params& params,
                        const ShardLayoutOptions& options) {
  ShardLayout layout = ShardLayout::Plan(params, options);
  ExpectInvariants(layout, params, options);
  return layout;
}

TEST(ShardLayoutTest, HeaderExample) {
  const Params params = {{.numel = 128 * 64, .rows = 128},
                         {.numel = 128, .rows = 128}};
  const auto layout = PlanChecked(params, {.world_size = 2, .itemsize = 4});
  const ShardRange mine = layout.range(0, /*rank=*/1);
  EXPECT_EQ(layout.placement(0).granularity, 64);
  EXPECT_EQ(mine.begin / 64, 65);
  EXPECT_EQ(mine.end / 64, 128);
}

TEST(ShardLayoutTest, EvenMlpOnTwoRanksNeedsNoPadding) {
  const Params params = {{128 * 64, 128}, {128, 128}, {64 * 128, 64}, {64, 64}};
  const auto layout = PlanChecked(params, {.world_size = 2, .itemsize = 4});
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(layout.shard_numel(), 8288);
  EXPECT_EQ(layout.padding(), 0);
  EXPECT_EQ(Placements(layout),
            (Pairs{{0, 64}, {8192, 1}, {8320, 128}, {16512, 1}}));
  EXPECT_EQ(Ranges(layout, 0), (Pairs{{0, 8192}, {8192, 8192}}));
  EXPECT_EQ(Ranges(layout, 1), (Pairs{{0, 96}, {96, 128}}));
  EXPECT_EQ(Ranges(layout, 2), (Pairs{{0, 0}, {0, 8192}}));
  EXPECT_EQ(Ranges(layout, 3), (Pairs{{0, 0}, {0, 64}}));
}

TEST(ShardLayoutTest, OddRowsOnThreeRanks) {
  const Params params = {{7 * 8, 7}, {5 * 8, 5}, {3, 3}};
  const auto layout = PlanChecked(params, {.world_size = 3, .itemsize = 4});
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(layout.shard_numel(), 36);
  EXPECT_EQ(Placements(layout), (Pairs{{4, 8}, {64, 8}, {104, 1}}));
  EXPECT_EQ(Ranges(layout, 0), (Pairs{{0, 32}, {32, 56}, {56, 56}}));
  EXPECT_EQ(Ranges(layout, 1), (Pairs{{0, 0}, {0, 8}, {8, 40}}));
  EXPECT_EQ(Ranges(layout, 2), (Pairs{{0, 0}, {0, 0}, {0, 3}}));
}

TEST(ShardLayoutTest, OneRowAndSevenRows) {
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  const Params params = {{5, 1}, {7 * 3, 7}};
  // An unaligned start where an aligned one has no room.
  const auto two = PlanChecked(params, {.world_size = 2, .itemsize = 4});
  EXPECT_EQ(two.shard_numel(), 16);
  EXPECT_EQ(Placements(two), (Pairs{{0, 5}, {7, 3}}));
  EXPECT_EQ(Ranges(two, 1), (Pairs{{0, 9}, {9, 21}}));
  const auto three = PlanChecked(params, {.world_size = 3, .itemsize = 4});
  EXPECT_EQ(three.shard_numel(), 12);
  EXPECT_EQ(Placements(three), (Pairs{{0, 5}, {12, 3}}));
  EXPECT_EQ(Ranges(three, 1), (Pairs{{0, 0}, {0, 12}, {12, 21}}));
  // Seven rows of 3 would need shards of 12: 48 elements for 26.
  const auto four = PlanChecked(params, {.world_size = 4, .itemsize = 4});
  EXPECT_EQ(four.shard_numel(), 8);
  EXPECT_EQ(Placements(four), (Pairs{{0, 5}, {8, 1}}));
  EXPECT_EQ(Ranges(four, 1), (Pairs{{0, 0}, {0, 8}, {8, 16}, {16, 21}}));
}

TEST(ShardLayoutTest, LoneFewRowsFallBackOnFourRanks) {
  for (const int64_t rows : {1, 7}) {
    const Params params = {{rows * 1000, rows}};
    const auto layout = PlanChecked(params, {.world_size = 4, .itemsize = 4});
    EXPECT_EQ(layout.placement(0).granularity, 1) << rows;
    EXPECT_LE(PaddingPercent(layout), 2.5) << rows;
  }
}

TEST(ShardLayoutTest, BiasOnly) {
  const Params params = {{5, 5}};
  const auto layout = PlanChecked(params, {.world_size = 4, .itemsize = 4});
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(layout.shard_numel(), 4);
  EXPECT_EQ(Placements(layout), (Pairs{{0, 1}}));
  EXPECT_EQ(Ranges(layout, 0), (Pairs{{0, 4}, {4, 5}, {5, 5}, {5, 5}}));
}

TEST(ShardLayoutTest, NoElements) {
  const auto none = PlanChecked({}, {.world_size = 3, .itemsize = 4});
  EXPECT_EQ(none.num_params(), 0u);
  EXPECT_EQ(none.shard_numel(), 0);
  const auto empty =
      PlanChecked({{0, 0}, {0, 5}}, {.world_size = 3, .itemsize = 4});
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(empty.unsharded_numel(), 0);
  EXPECT_EQ(Placements(empty), (Pairs{{0, 1}, {0, 1}}));
  EXPECT_EQ(Ranges(empty, 1), (Pairs{{0, 0}, {0, 0}, {0, 0}}));
}

TEST(ShardLayoutTest, EmptyParameterBetweenOthers) {
  const auto layout = PlanChecked({{6, 6}, {0, 0}, {6, 6}, {0, 3}},
                                  {.world_size = 2, .itemsize = 4});
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(layout.shard_numel(), 8);
  EXPECT_EQ(Placements(layout), (Pairs{{0, 1}, {6, 1}, {8, 1}, {14, 1}}));
  EXPECT_EQ(Ranges(layout, 1), (Pairs{{0, 0}, {0, 0}}));
}

TEST(ShardLayoutTest, OneRankHoldsEverything) {
  const Params params = {{257 * 65, 257}, {1, 1}, {7, 1}};
  const auto layout = PlanChecked(params, {.world_size = 1, .itemsize = 2});
  EXPECT_EQ(NumFallbacks(layout, params), 0u);
  EXPECT_EQ(layout.range(0, 0).end, 257 * 65);
  EXPECT_EQ(layout.shard_numel() * 2 % 128, 0);
}

TEST(ShardLayoutTest, ShardIsAlignedTo128BytesWhereCheap) {
  // 4100 bytes a rank: 4112 at 16 bytes, 4224 (2.7 % more) at 128.
  const auto small = PlanChecked({{4100, 4100}}, {1, 1});
  EXPECT_EQ(small.shard_numel(), 4112);
  // 41000 bytes a rank: 41088 (0.2 % more) at 128.
  const auto large = PlanChecked({{41000, 41000}}, {1, 1});
  EXPECT_EQ(large.shard_numel(), 41088);
}

TEST(ShardLayoutTest, StartsAreAlignedWhereCheap) {
  Params params;
  for (int i = 0; i < 12; ++i) {
    params.push_back({257 * 65, 257});
    params.push_back({257, 257});
  }
  for (const int64_t world_size : {1, 2, 3, 8}) {
    const auto layout = PlanChecked(params, {world_size, 4});
    EXPECT_EQ(NumFallbacks(layout, params), 0u);
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_EQ(layout.placement(i).offset % 4, 0) << i;
    }
  }
}

TEST(ShardLayoutTest, ManyScalarsArePackedUnaligned) {
  // Aligned starts would quadruple S; a multiple of 128 bytes costs 0.1 %.
  const Params params(3001, {1, 1});
  const auto layout = PlanChecked(params, {1, 4});
  EXPECT_EQ(layout.shard_numel(), 3008);
}

TEST(ShardLayoutTest, ItemsizeThatDoesNotDivideSixteen) {
  const auto layout = PlanChecked({{100, 10}, {33, 3}}, {2, 3});
  EXPECT_EQ(layout.shard_numel(), 80);  // 240 bytes.
}

// A transformer layer with the sizes of GPT-OSS-120B, bfloat16.
// `rows_per_expert` is true where expert weights may be cut between rows of the
// last dimension, false where only between experts.
Params MoeLayer(bool rows_per_expert) {
  constexpr int64_t kHidden = 2880;
  constexpr int64_t kExperts = 128;
  constexpr int64_t kQuery = 4096;
  constexpr int64_t kKey = 512;
  const int64_t inner = rows_per_expert ? kHidden : 1;
  return {{64, 64},
          {kQuery * kHidden, kQuery},
          {kQuery, kQuery},
          {kKey * kHidden, kKey},
          {kKey, kKey},
          {kKey * kHidden, kKey},
          {kKey, kKey},
          {kHidden * kQuery, kHidden},
          {kHidden, kHidden},
          {kExperts * kHidden, kExperts},
          {kExperts, kExperts},
          {kExperts * 2 * kHidden * kHidden, kExperts * 2 * inner},
          {kExperts * 2 * kHidden, kExperts},
          {kExperts * kHidden * kHidden, kExperts * inner},
          {kExperts * kHidden, kExperts},
          {kHidden, kHidden},
          {kHidden, kHidden}};
}

TEST(ShardLayoutTest, MixtureOfExpertsLayerPadsFarBelowOnePercent) {
  const Params params = MoeLayer(/*rows_per_expert=*/true);
  for (const auto& [world_size, percent] :
       {std::pair{64, 0.01}, {256, 0.03}, {512, 0.15}}) {
    const auto layout = PlanChecked(params, {world_size, 2});
    EXPECT_EQ(NumFallbacks(layout, params), 0u) << world_size;
    EXPECT_LT(PaddingPercent(layout), percent) << world_size;
    EXPECT_EQ(layout.shard_numel() * 2 % 128, 0) << world_size;
  }
}

TEST(ShardLayoutTest, WholeExpertsFallBackWhereRanksOutnumberThem) {
  const Params params = MoeLayer(/*rows_per_expert=*/false);
  const auto layout = PlanChecked(params, {256, 2});
  EXPECT_EQ(NumFallbacks(layout, params), 2u);
  EXPECT_EQ(layout.placement(11).granularity, 1);
  EXPECT_EQ(layout.placement(13).granularity, 1);
  EXPECT_LT(PaddingPercent(layout), 0.03);
}

TEST(ShardLayoutTest, DenseLayer) {
  // A Llama-8B block, bfloat16.
  constexpr int64_t kHidden = 4096;
  constexpr int64_t kInner = 14336;
  const Params params = {{kHidden * kHidden, kHidden},
                         {1024 * kHidden, 1024},
                         {1024 * kHidden, 1024},
                         {kHidden * kHidden, kHidden},
                         {kInner * kHidden, kInner},
                         {kInner * kHidden, kInner},
                         {kHidden * kInner, kHidden},
                         {kHidden, kHidden},
                         {kHidden, kHidden}};
  for (const int64_t world_size : {2, 3, 6, 7, 8, 64, 256}) {
    const auto layout = PlanChecked(params, {world_size, 2});
    EXPECT_EQ(NumFallbacks(layout, params), 0u) << world_size;
    EXPECT_LT(PaddingPercent(layout), 1.0) << world_size;
  }
}

TEST(ShardLayoutTest, OddMlpFallsBackInsteadOfDoubling) {
  // Linear(65, 257), Linear(257, 65), float32. Rows of both weights on 8 ranks
  // would need S to be a multiple of 65 * 257: 109 % of padding or more.
  const Params params = {{257 * 65, 257}, {257, 257}, {65 * 257, 65}, {65, 65}};
  const auto two = PlanChecked(params, {.world_size = 2, .itemsize = 4});
  EXPECT_EQ(NumFallbacks(two, params), 0u);
  EXPECT_LT(PaddingPercent(two), 0.2);
  const auto four = PlanChecked(params, {.world_size = 4, .itemsize = 4});
  EXPECT_EQ(NumFallbacks(four, params), 0u);
  EXPECT_LT(PaddingPercent(four), 2.0);
  const auto eight = PlanChecked(params, {.world_size = 8, .itemsize = 4});
  EXPECT_EQ(NumFallbacks(eight, params), 1u);
  EXPECT_EQ(eight.placement(0).granularity, 65);
  EXPECT_EQ(eight.placement(2).granularity, 1);
  EXPECT_LT(PaddingPercent(eight), 5.0);
}

TEST(ShardLayoutTest, MoreRanksThanElements) {
  const auto layout = PlanChecked({{2 * 3, 2}, {3, 3}}, {1024, 4});
  EXPECT_EQ(layout.shard_numel(), 4);
}

Params RandomParams(std::mt19937_64& random, int max_params, int64_t max_rows,
                    int64_t max_columns) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Params params(static_cast<size_t>(below(max_params + 1)));
  for (ParamExtent& p : params) {
    switch (below(8)) {
      case 0:
        p = {0, below(3)};
        break;
      case 1:
        p.rows = p.numel = 1 + below(max_columns);
        break;
      case 2:
        p = {1 + below(max_columns * 4), 1};
        break;
      case 3:
        if (&p != params.data()) {
          p = *(&p - 1);
          break;
        }
        [[fallthrough]];
      default:
        p.rows = 1 + below(max_rows);
        p.numel = p.rows * (1 + below(max_columns));
    }
  }
  return params;
}

TEST(ShardLayoutTest, InvariantsHoldForRandomGroups) {
  std::mt19937_64 random(20250301);
  constexpr int64_t kItemsizes[] = {1, 2, 4, 8, 16, 3, 12, 32};
  constexpr int64_t kSizes[] = {4, 30, 300, 5000};
  for (int trial = 0; trial < 6000; ++trial) {
    const int64_t max_rows = kSizes[random() % 4];
    const int64_t max_columns = kSizes[random() % 4];
    const int max_params = trial % 100 == 0 ? 300 : 12;
    const Params params =
        RandomParams(random, max_params, max_rows, max_columns);
    const auto max_ranks = trial % 50 == 0 ? 1024u : 17u;
    const ShardLayoutOptions options = {
        .world_size = static_cast<int64_t>(1 + random() % max_ranks),
        .itemsize = kItemsizes[random() % 8]};
    SCOPED_TRACE("trial " + std::to_string(trial));
    const auto layout = ShardLayout::Plan(params, options);
    ExpectInvariants(layout, params, options);
    const auto again = ShardLayout::Plan(params, options);
    EXPECT_EQ(Placements(layout), Placements(again));
    EXPECT_EQ(layout.shard_numel(), again.shard_numel());
    EXPECT_EQ(layout.fingerprint(), again.fingerprint());
    if (HasFailure()) return;
  }
}

// Whether parameters of these granularities fit in order at this S, by trying
// every start of every parameter after every reachable end of the one before.
bool FitsByBruteForce(const Params& params,
                      const std::vector<int64_t>& granularities, int64_t shard,
                      int64_t world_size) {
  const int64_t length = shard * world_size;
  const auto start_is_valid = [&](size_t i, int64_t start) {
    for (int64_t k = 1; k < params[i].numel; ++k) {
      if ((start + k) % shard == 0 && k % granularities[i] != 0) return false;
    }
    return true;
  };
  std::vector<bool> ends(static_cast<size_t>(length + 1), false);
  ends[0] = true;
  for (size_t i = 0; i < params.size(); ++i) {
    std::vector<bool> next(ends.size(), false);
    bool reachable = false;
    for (int64_t start = 0; start + params[i].numel <= length; ++start) {
      reachable = reachable || ends[static_cast<size_t>(start)];
      if (reachable && start_is_valid(i, start)) {
        next[static_cast<size_t>(start + params[i].numel)] = true;
      }
    }
    ends = std::move(next);
  }
  return std::find(ends.begin(), ends.end(), true) != ends.end();
}

TEST(ShardLayoutTest, TinyGroupsAreOptimalForTheirOrder) {
  std::mt19937_64 random(7);
  int fallbacks = 0;
  int beyond_lower_bound = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    SCOPED_TRACE("trial " + std::to_string(trial));
    const Params params = RandomParams(random, 5, 12, 14);
    const ShardLayoutOptions options = {
        .world_size = static_cast<int64_t>(1 + random() % 5),
        .itemsize = int64_t{1} << random() % 5};
    const int64_t unit = Unit(options);
    const int64_t ranks = options.world_size;
    const auto layout = ShardLayout::Plan(params, options);
    if (Total(params) == 0) continue;
    const auto optimum = [&](const std::vector<int64_t>& granularities) {
      int64_t shard = 0;
      do {
        shard += unit;
      } while (shard * ranks < Total(params) ||
               !FitsByBruteForce(params, granularities, shard, ranks));
      return shard;
    };

    std::vector<int64_t> rows;
    std::vector<int64_t> chosen;
    for (size_t i = 0; i < params.size(); ++i) {
      rows.push_back(RowNumel(params[i]));
      chosen.push_back(layout.placement(i).granularity);
    }
    const int64_t best = optimum(chosen);
    ASSERT_GE(layout.shard_numel(), best);
    ASSERT_LE(layout.shard_numel(), best + std::max(unit, best / 100));
    // Rows are given up exactly where they break the bound.
    const bool rows_within_bound =
        optimum(rows) * ranks <= Bound(params, options);
    ASSERT_EQ(NumFallbacks(layout, params) == 0, rows_within_bound);
    fallbacks += rows_within_bound ? 0 : 1;
    beyond_lower_bound += (best - unit) * ranks >= Total(params) ? 1 : 0;
  }
  // The cases exercise both.
  EXPECT_GT(fallbacks, 300);
  EXPECT_GT(beyond_lower_bound, 100);
}

TEST(ShardLayoutTest, FingerprintTellsPlansApart) {
  const Params params = {{128 * 64, 128}, {128, 128}};
  const auto base = ShardLayout::Plan(params, {2, 4});
  EXPECT_EQ(base.fingerprint(),
            ShardLayout::Plan(params, {2, 4}).fingerprint());
  EXPECT_NE(base.fingerprint(),
            ShardLayout::Plan(params, {4, 4}).fingerprint());
  const Params swapped = {params[1], params[0]};
  EXPECT_NE(base.fingerprint(),
            ShardLayout::Plan(swapped, {2, 4}).fingerprint());
  const Params transposed = {{128 * 64, 64}, {128, 128}};
  EXPECT_NE(base.fingerprint(),
            ShardLayout::Plan(transposed, {2, 4}).fingerprint());
  const Params more = {params[0], params[1], {0, 0}};
  EXPECT_NE(base.fingerprint(), ShardLayout::Plan(more, {2, 4}).fingerprint());
}

TEST(ShardLayoutTest, LargeGroupsPlanQuickly) {
  // A few milliseconds each; the limit leaves room for sanitizers and load.
  constexpr std::chrono::milliseconds kLimit(1000);
  std::mt19937_64 random(11);
  for (const int64_t columns : {64, 300, 5000}) {
    Params params;
    for (int i = 0; i < 2000; ++i) {
      const auto rows = static_cast<int64_t>(1 + random() % 3000);
      const auto width =
          static_cast<int64_t>(random() % static_cast<uint64_t>(columns));
      params.push_back({rows * width, rows});
    }
    const ShardLayoutOptions options = {.world_size = 1024, .itemsize = 2};
    const auto begin = std::chrono::steady_clock::now();
    const auto layout = ShardLayout::Plan(params, options);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kLimit);
    ExpectInvariants(layout, params, options);
  }
}

TEST(ShardLayoutTest, LargestSizesDoNotOverflow) {
  const int64_t huge = int64_t{1} << 55;
  PlanChecked({{huge, 1}, {huge, int64_t{1} << 30}}, {7, 1});
  const auto one_element = ShardLayout::Plan({{1, 1}}, {int64_t{1} << 31, 1});
  EXPECT_EQ(one_element.shard_numel(), 16);
  EXPECT_EQ(one_element.range(0, (int64_t{1} << 31) - 1).begin, 1);
}

template <typename Exception, typename Function>
std::string MessageOf(Function function) {
  try {
    function();
  } catch (const Exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(ShardLayoutTest, RejectsInvalidInput) {
  const auto message = [](const Params& params,
                          const ShardLayoutOptions& options) {
    return MessageOf<std::invalid_argument>(
        [&] { ShardLayout::Plan(params, options); });
  };
  EXPECT_EQ(message({}, {0, 4}),
            "ShardLayout: world_size: expected 1 to 2^31, got 0");
  EXPECT_EQ(message({}, {int64_t{1} << 32, 4}),
            "ShardLayout: world_size: expected 1 to 2^31, got 4294967296");
  EXPECT_EQ(message({}, {2, 0}),
            "ShardLayout: itemsize: expected at least 1, got 0");
  EXPECT_EQ(message({{4, 2}, {-1, 1}}, {2, 4}),
            "ShardLayout: numel of parameter 1: expected at least 0, got -1");
  EXPECT_EQ(message({{10, 3}}, {2, 4}),
            "ShardLayout: rows of parameter 0: expected a divisor of numel 10, "
            "got 3");
  EXPECT_EQ(message({{10, 0}}, {2, 4}),
            "ShardLayout: rows of parameter 0: expected a divisor of numel 10, "
            "got 0");
  EXPECT_EQ(message({{10, -5}}, {2, 4}),
            "ShardLayout: rows of parameter 0: expected a divisor of numel 10, "
            "got -5");
  EXPECT_EQ(message({{4, 4}, {int64_t{1} << 56, 1}}, {2, 4}),
            "ShardLayout: numel of parameter 1: expected at most 2^56 elements "
            "in all, got 72057594037927936");
}

TEST(ShardLayoutTest, RejectsIndicesOutOfRange) {
  const auto layout = ShardLayout::Plan({{8, 2}}, {2, 4});
  EXPECT_EQ(MessageOf<std::out_of_range>([&] { layout.placement(1); }),
            "ShardLayout: parameter index: expected below 1, got 1");
  EXPECT_EQ(MessageOf<std::out_of_range>([&] { layout.range(0, 2); }),
            "ShardLayout: rank: expected 0 to 1, got 2");
  EXPECT_EQ(MessageOf<std::out_of_range>([&] { layout.range(0, -1); }),
            "ShardLayout: rank: expected 0 to 1, got -1");
}

}  // namespace
}  // namespace composable
