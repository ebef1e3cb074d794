// The planning problem (place tensors with indivisible blocks in equal shards,
// padding between tensors only, smallest shard) and the left-to-right placement
// are described in veScale-FSDP, arXiv 2602.22437. The search over S, the
// fall-back to elements and the alignment rules are this file's own.
#include "state/shard_layout.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace composable {
namespace {

constexpr int64_t kMaxTotal = int64_t{1} << 56;
constexpr int64_t kMaxWorldSize = int64_t{1} << 31;
constexpr int64_t kWorkPerSearch = 100'000;  // Tensor placements, about.
constexpr int kMaxAdmissions = 20;           // Searches to choose granularity.

struct Item {
  int64_t granularity;  // Divides numel.
  int64_t numel;        // Above 0.
  // NOLINTNEXTLINE(modernize-use-nullptr): sees the 0 of its comparison.
  auto operator<=>(const Item&) const = default;
};

int64_t RoundUp(int64_t x, int64_t m) { return (x + m - 1) / m * m; }

// The fewest elements that fill a multiple of 16 bytes.
int64_t Unit(const ShardLayoutOptions& options) {
  return 16 / std::gcd(int64_t{16}, options.itemsize);
}

// The least common multiple, or cap + 1 where it is above cap.
int64_t CappedLcm(int64_t a, int64_t b, int64_t cap) {
  const int64_t factor = b / std::gcd(a, b);
  return a > cap / factor ? cap + 1 : a * factor;
}

// The first start at or after `cursor`, a multiple of `align`, at which no
// boundary (multiple of `shard`) cuts a granule of `item`; -1 where there is
// none. `align` is a power of two that divides `shard`. The conditions repeat
// with period `shard`, so the present shard and the next one show all cases.
int64_t EarliestStart(const Item& item, int64_t cursor, int64_t shard,
                      int64_t align) {
  const int64_t start = (cursor + align - 1) & -align;
  const int64_t boundary = start - start % shard + shard;
  const auto [granularity, numel] = item;
  if (granularity == 1 || start + numel <= boundary) return start;

  // Distance between aligned starts that put a boundary on a granule's edge.
  const int64_t low_bit = std::min(granularity & -granularity, align);
  const int64_t step = granularity * (align / low_bit);
  // Only then may a second boundary lie inside the tensor.
  const bool many_cuts = shard % granularity == 0;

  const int64_t before = (boundary - start) / step * step;
  if (before > 0 && (many_cuts || numel - before <= shard)) {
    return boundary - before;
  }
  if (many_cuts || numel <= shard) return boundary;
  const int64_t most = shard / step * step;
  if (most > 0 && numel - most <= shard) return boundary + shard - most;
  return -1;
}

class Planner {
 public:
  Planner(std::vector<Item> rows, int64_t total,
          const ShardLayoutOptions& options)
      : items_(rows),
        rows_(std::move(rows)),
        total_(total),
        world_size_(options.world_size),
        unit_(Unit(options)),
        wide_unit_(128 / std::gcd(int64_t{128}, options.itemsize)),
        // The bound of the header. At granularity 1 the least S always fits,
        // and it never exceeds max_.
        min_(RoundUp((total - 1) / world_size_ + 1, unit_)),
        max_(((total + total / 20) / world_size_ + unit_) / unit_ * unit_) {}

  // Chooses granularities, then S.
  int64_t ChooseShard() {
    ChooseGranularities();
    const int64_t near = std::min(max_, shard_ + shard_ / 100);
    const int64_t unit_near =
        std::min(max_, shard_ + std::max(shard_ / 100, unit_));
    if (int64_t s = Search(unit_, wide_unit_, shard_, near)) return s;
    if (int64_t s = Search(unit_, unit_, shard_, unit_near)) return s;
    if (int64_t s = Search(1, wide_unit_, shard_, near)) return s;
    return shard_;
  }

  // Offsets for an S that fits: each tensor at its earliest aligned start, or
  // where that would leave too little room for the rest, at its earliest start.
  std::vector<int64_t> Place(int64_t shard) const {
    // The latest end of each tensor such that those after it still fit. A
    // granularity divides its numel, so the problem read from the buffer's end
    // is the same problem.
    std::vector<int64_t> latest_end(items_.size());
    int64_t cursor = 0;
    for (size_t i = items_.size(); i-- > 0;) {
      const int64_t start = EarliestStart(items_[i], cursor, shard, 1);
      latest_end[i] = world_size_ * shard - start;
      cursor = start + items_[i].numel;
    }
    std::vector<int64_t> offsets(items_.size());
    cursor = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      int64_t start = EarliestStart(items_[i], cursor, shard, unit_);
      if (start < 0 || start + items_[i].numel > latest_end[i]) {
        start = EarliestStart(items_[i], cursor, shard, 1);
      }
      offsets[i] = start;
      cursor = start + items_[i].numel;
    }
    return offsets;
  }

  const std::vector<Item>& items() const { return items_; }

 private:
  // Whether all tensors fit at this S. Earliest starts leave the most room for
  // what follows, so for a fixed order this test is exact.
  bool Fits(int64_t shard, int64_t align) const {
    int64_t slack = world_size_ * shard - total_;
    int64_t cursor = 0;
    for (const Item& item : items_) {
      const int64_t start = EarliestStart(item, cursor, shard, align);
      if (start < 0) return false;
      slack -= start - cursor;
      if (slack < 0) return false;
      cursor = start + item.numel;
    }
    return true;
  }

  // The smallest S found in [min, max] that is a multiple of `unit` and fits; 0
  // where none is found. Fitting is not monotone in S, so this walks up from
  // `min` along grids of several steps, coarse to fine, some points on each.
  int64_t Search(int64_t align, int64_t unit, int64_t min, int64_t max) const {
    // A tensor longer than two shards has two boundaries inside, so S must be a
    // multiple of its granularity.
    int64_t step = unit;
    for (const Item& item : items_) {
      min = std::max(min, item.granularity);
      if (item.numel > 2 * max) step = CappedLcm(step, item.granularity, max);
      if (min > max || step > max) return 0;
    }
    // Coarser grids: multiples of the granularities of the largest tensors, and
    // doublings in between.
    std::vector<int64_t> steps = {step};
    const auto double_up_to = [&](int64_t end) {
      for (int64_t s = step * 2; s < end; s *= 2) steps.push_back(s);
    };
    std::vector<Item> by_size = items_;
    std::ranges::stable_sort(by_size, std::greater{}, &Item::numel);
    for (const Item& item : by_size) {
      const int64_t next = CappedLcm(step, item.granularity, max);
      if (next == step || next > max) continue;
      double_up_to(std::min(next, max - min));
      steps.push_back(step = next);
    }
    double_up_to(max - min);

    const auto num_items = static_cast<int64_t>(items_.size());
    const auto num_steps = static_cast<int64_t>(steps.size());
    const int64_t tries =
        std::max<int64_t>(2, kWorkPerSearch / num_items / num_steps);
    int64_t best = 0;
    for (auto grid = steps.rbegin(); grid != steps.rend(); ++grid) {
      int64_t s = RoundUp(min, *grid);
      for (int64_t k = 0; k < tries && s <= max; ++k, s += *grid) {
        if (!Fits(s, align)) continue;
        best = s;
        max = s - 1;
      }
    }
    return best;
  }

  // Admits the shapes to row granularity, by ascending row size, as long as the
  // bound holds: all at once if possible, else half by half. Sets shard_.
  void ChooseGranularities() {
    std::vector<Item> shapes;
    for (Item& item : items_) {
      if (item.granularity > 1) shapes.push_back(item);
      item.granularity = 1;
    }
    std::ranges::sort(shapes);
    shapes.erase(std::unique(shapes.begin(), shapes.end()), shapes.end());

    shard_ = min_;
    std::vector<std::pair<size_t, size_t>> pending = {{0, shapes.size()}};
    for (int n = 0; n < kMaxAdmissions && !pending.empty(); ++n) {
      const auto [begin, end] = pending.back();
      pending.pop_back();
      if (begin == end) continue;
      const std::vector<Item> saved = items_;
      for (size_t i = 0; i < items_.size(); ++i) {
        const bool admit =
            shapes[begin] <= rows_[i] && rows_[i] <= shapes[end - 1];
        if (admit) items_[i] = rows_[i];
      }
      if (const int64_t s = Search(1, unit_, min_, max_)) {
        shard_ = s;
        continue;
      }
      items_ = saved;
      if (end - begin == 1) continue;
      const size_t middle = begin + (end - begin) / 2;
      pending.emplace_back(middle, end);
      pending.emplace_back(begin, middle);
    }
  }

  std::vector<Item> items_;  // With the granularities chosen so far.
  const std::vector<Item> rows_;
  const int64_t total_;
  const int64_t world_size_;
  const int64_t unit_;
  const int64_t wide_unit_;
  const int64_t min_;
  const int64_t max_;
  int64_t shard_ = 0;
};

template <typename Exception>
[[noreturn]] void Throw(const std::string& what, const std::string& expected,
                        int64_t got) {
  throw Exception("ShardLayout: " + what + ": expected " + expected + ", got " +
                  std::to_string(got));
}

// Checks the input; returns the sum of all numel.
int64_t Validate(absl::Span<const ParamExtent> params,
                 const ShardLayoutOptions& options) {
  const auto invalid = Throw<std::invalid_argument>;
  const auto& [world_size, itemsize] = options;
  if (world_size < 1 || world_size > kMaxWorldSize) {
    invalid("world_size", "1 to 2^31", world_size);
  }
  if (itemsize < 1) invalid("itemsize", "at least 1", itemsize);
  int64_t total = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& [numel, rows] = params[i];
    const std::string of = " of parameter " + std::to_string(i);
    if (numel < 0) invalid("numel" + of, "at least 0", numel);
    if (numel > 0 && (rows < 1 || numel % rows != 0)) {
      invalid("rows" + of, "a divisor of numel " + std::to_string(numel), rows);
    }
    if (numel > kMaxTotal - total) {
      invalid("numel" + of, "at most 2^56 elements in all", numel);
    }
    total += numel;
  }
  return total;
}

}  // namespace

ShardLayout ShardLayout::Plan(absl::Span<const ParamExtent> params,
                              const ShardLayoutOptions& options) {
  const int64_t total = Validate(params, options);
  ShardLayout layout;
  layout.world_size_ = options.world_size;
  layout.placements_.assign(params.size(), {.offset = 0, .granularity = 1});
  std::vector<Item> items;
  for (const auto& [numel, rows] : params) {
    layout.numels_.push_back(numel);
    if (numel > 0) items.push_back({numel / rows, numel});
  }
  if (items.empty()) return layout;

  Planner planner(std::move(items), total, options);
  layout.shard_numel_ = planner.ChooseShard();
  const std::vector<int64_t> offsets = planner.Place(layout.shard_numel_);

  size_t next = 0;
  int64_t cursor = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    layout.placements_[i].offset = cursor;  // An empty parameter's place.
    if (params[i].numel == 0) continue;
    layout.placements_[i] = {offsets[next], planner.items()[next].granularity};
    cursor = offsets[next++] + params[i].numel;
  }
  return layout;
}

ShardLayout ShardLayout::PlanOwned(absl::Span<const ParamExtent> params,
                                   absl::Span<const int> owners,
                                   const ShardLayoutOptions& options) {
  Validate(params, options);
  const int64_t unit = Unit(options);
  if (owners.size() != params.size()) {
    Throw<std::invalid_argument>("number of owners",
                                 std::to_string(params.size()),
                                 static_cast<int64_t>(owners.size()));
  }
  ShardLayout layout;
  layout.world_size_ = options.world_size;
  std::vector<int64_t> starts(params.size());
  int64_t cursor = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const int least = i == 0 ? 0 : owners[i - 1];
    if (owners[i] < least || owners[i] >= options.world_size) {
      Throw<std::invalid_argument>("owner of parameter " + std::to_string(i),
                                   std::to_string(least) + " to " +
                                       std::to_string(options.world_size - 1),
                                   owners[i]);
    }
    if (owners[i] > least || i == 0) cursor = 0;
    starts[i] = RoundUp(cursor, unit);
    cursor = starts[i] + params[i].numel;
    layout.shard_numel_ = std::max(layout.shard_numel_, RoundUp(cursor, unit));
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& [numel, rows] = params[i];
    layout.numels_.push_back(numel);
    layout.placements_.push_back(
        {.offset = owners[i] * layout.shard_numel_ + starts[i],
         .granularity = numel == 0 ? 1 : numel / rows});
  }
  return layout;
}

ShardLayout ShardLayout::Interleave(absl::Span<const int64_t> chunk_numels,
                                    const ShardLayoutOptions& options) {
  std::vector<ParamExtent> chunks;
  for (const int64_t numel : chunk_numels) {
    chunks.push_back({.numel = numel, .rows = 1});
  }
  Validate(chunks, options);
  const int64_t unit = chunks.size() == 1 ? 1 : Unit(options);
  ShardLayout layout;
  layout.world_size_ = options.world_size;
  layout.interleaved_ = true;
  for (const int64_t numel : chunk_numels) {
    layout.placements_.push_back(
        {.offset = layout.shard_numel_, .granularity = 1});
    layout.numels_.push_back(options.world_size * numel);
    layout.shard_numel_ += RoundUp(numel, unit);
  }
  return layout;
}

const ParamPlacement& ShardLayout::placement(size_t i) const {
  if (i >= num_params()) {
    Throw<std::out_of_range>("parameter index",
                             "below " + std::to_string(num_params()),
                             static_cast<int64_t>(i));
  }
  return placements_[i];
}

ShardRange ShardLayout::range(size_t i, int64_t rank) const {
  const int64_t offset = placement(i).offset;
  if (rank < 0 || rank >= world_size_) {
    Throw<std::out_of_range>("rank", "0 to " + std::to_string(world_size_ - 1),
                             rank);
  }
  if (interleaved_) {
    const int64_t chunk = numels_[i] / world_size_;
    return {rank * chunk, (rank + 1) * chunk};
  }
  const int64_t begin = rank * shard_numel_ - offset;
  return {std::clamp(begin, int64_t{0}, numels_[i]),
          std::clamp(begin + shard_numel_, int64_t{0}, numels_[i])};
}

int64_t ShardLayout::padding() const {
  return unsharded_numel() -
         std::accumulate(numels_.begin(), numels_.end(), int64_t{0});
}

uint64_t ShardLayout::fingerprint() const {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a over words, then mixed.
  const auto add = [&](int64_t word) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3u;
    hash ^= hash >> 29;
  };
  add(world_size_);
  add(shard_numel_);
  add(interleaved_ ? 1 : 0);
  for (size_t i = 0; i < num_params(); ++i) {
    add(numels_[i]);
    add(placements_[i].offset);
    add(placements_[i].granularity);
  }
  return hash;
}

}  // namespace composable
