// What becomes of a group's whole parameters between forward and backward.
//
//   composable::ReshardAfterForward automatic;   // false for the root only
//   composable::ReshardAfterForward freed = true;
//   composable::ReshardAfterForward partly = 8;  // a part stays: see below
//
// With a number k, 1 < k < S for a group sharded over S ranks, a rank keeps
// 1 / k of the whole parameters, and backward gathers them among k ranks that
// follow each other: faster, where those share a host, for memory. k must be a
// factor of S; k == S means true; k == 1 means false, and warns once.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>

namespace composable {

class ReshardAfterForward {
 public:
  ReshardAfterForward() = default;
  // NOLINTBEGIN(google-explicit-constructor): true, 8 and nullopt are options.
  ReshardAfterForward(std::nullopt_t /*automatic*/) {}
  template <typename Bool>
  requires std::same_as<Bool, bool> ReshardAfterForward(Bool free)
      : free_(free) {}
  template <typename Number>
  requires(std::integral<Number> && !std::same_as<Number, bool> &&
           !std::same_as<Number, char>) ReshardAfterForward(Number group_size)
      : free_(true), group_size_(static_cast<int64_t>(group_size)) {}
  // NOLINTEND(google-explicit-constructor)

  // Nothing: automatic. True also for a number.
  std::optional<bool> frees() const { return free_; }
  // The number, if it is one.
  std::optional<int64_t> group_size() const { return group_size_; }

 private:
  std::optional<bool> free_;
  std::optional<int64_t> group_size_;
};

}  // namespace composable
