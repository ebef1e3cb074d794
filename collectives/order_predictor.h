// Foretells the next collective from those that ran before: where the last few
// were the same as once before, the next is expected to be the same as well.
//
//   composable::OrderPredictor predictor;
//   predictor.Advance(gather);
//   predictor.Advance(reduction);
//   const composable::Collective* next = predictor.Predict();   // the gather
//
// A function of the history alone, so ranks with equal histories expect the
// same. The longest known context decides; without one, the first collective of
// all is expected, since a loop starts over. O(1) per collective, and nothing
// is allocated once all contexts of a loop are known.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "collectives/collective.h"

namespace composable {

class OrderPredictor {
 public:
  // Null before the first collective. Valid until the next Advance().
  const Collective* Predict() const { return predicted_; }
  // The last one that ran; null before the first.
  const Collective* Last() const { return last_; }
  // `next` has run, foretold or not.
  void Advance(const Collective& next);

  // What is remembered is forgotten above this many contexts.
  static constexpr size_t kMaxContexts = size_t{1} << 16;
  size_t contexts() const { return followers_.size(); }

 private:
  // How many collectives a context has.
  static constexpr std::array<size_t, 4> kLengths = {64, 16, 4, 1};

  uint64_t Key(size_t k) const;
  void Push(uint64_t fingerprint);

  std::optional<Collective> first_;
  absl::node_hash_map<uint64_t, Collective> known_;  // by fingerprint
  absl::flat_hash_map<uint64_t, const Collective*> followers_;
  std::array<uint64_t, kLengths[0]> history_{};       // a ring
  size_t position_ = 0;                               // of the oldest in it
  std::array<uint64_t, kLengths.size()> contexts_{};  // rolling hashes
  const Collective* predicted_ = nullptr;
  const Collective* last_ = nullptr;
};

}  // namespace composable
