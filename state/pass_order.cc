#include "state/pass_order.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace composable {

void PassOrder::Begin() {
  recorded_.clear();
  next_ = 0;
  on_order_ = true;
}

void PassOrder::Record(int group) {
  if (recorded_.size() == kMaxRecorded) return;
  if (recorded_.empty() || recorded_.back() != group) {
    recorded_.push_back(group);
  }
}

void PassOrder::Commit() {
  if (recorded_.empty()) return;
  std::swap(followed_, recorded_);
  recorded_.clear();
}

void PassOrder::SeedWithReverseOf(const PassOrder& forward) {
  if (followed_.empty()) {
    followed_.assign(forward.followed_.rbegin(), forward.followed_.rend());
  }
}

void PassOrder::Clear() {
  followed_.clear();
  Begin();
}

bool PassOrder::Advance(int group) {
  const auto begin = followed_.begin();
  const auto present = begin + static_cast<std::ptrdiff_t>(next_);
  auto it = std::find(present, followed_.end(), group);
  if (it == followed_.end()) {
    it = std::find(begin, present, group);
    if (it == present) it = followed_.end();
  }
  on_order_ = it != followed_.end();
  if (on_order_) next_ = static_cast<size_t>(it - begin) + 1;
  return on_order_;
}

size_t PassOrder::NextUse(int group) const {
  for (size_t i = next_position(); i < followed_.size(); ++i) {
    if (followed_[i] == group) return i;
  }
  return kNever;
}

}  // namespace composable
