#include "collectives/order_predictor.h"

#include "collectives/hash.h"

namespace composable {
namespace {

constexpr uint64_t kBase = 0x9e3779b97f4a7c15ULL;

constexpr uint64_t Power(size_t exponent) {
  uint64_t power = 1;
  for (size_t i = 0; i < exponent; ++i) power *= kBase;
  return power;
}

}  // namespace

uint64_t OrderPredictor::Key(size_t k) const {
  return HashMix(kLengths[k], contexts_[k]);
}

void OrderPredictor::Push(uint64_t fingerprint) {
  static constexpr std::array<uint64_t, kLengths.size()> kPowers = {
      Power(kLengths[0]), Power(kLengths[1]), Power(kLengths[2]),
      Power(kLengths[3])};
  const size_t size = history_.size();
  for (size_t k = 0; k < kLengths.size(); ++k) {
    const uint64_t oldest = history_[(position_ + size - kLengths[k]) % size];
    contexts_[k] = contexts_[k] * kBase + fingerprint - oldest * kPowers[k];
  }
  history_[position_] = fingerprint;
  position_ = (position_ + 1) % size;
}

void OrderPredictor::Advance(const Collective& next) {
  if (!first_.has_value()) first_ = next;
  const Collective copy = next;  // `next` may be *predicted_
  if (followers_.size() > kMaxContexts) {
    followers_.clear();
    known_.clear();
  }
  const Collective* known =
      &known_.try_emplace(copy.fingerprint, copy).first->second;
  last_ = known;
  for (size_t k = 0; k < kLengths.size(); ++k) followers_[Key(k)] = known;
  Push(copy.fingerprint);
  predicted_ = &*first_;
  for (size_t k = 0; k < kLengths.size(); ++k) {
    const auto it = followers_.find(Key(k));
    if (it == followers_.end()) continue;
    predicted_ = it->second;
    break;
  }
}

}  // namespace composable
