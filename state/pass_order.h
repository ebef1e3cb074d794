// The order in which groups are used in a forward or a backward: recorded in
// one iteration, followed by the prefetch of the next.
//
//   composable::PassOrder order;
//   order.Begin();
//   order.Record(0); order.Record(1); order.Record(0);
//   order.Commit();
//   order.Begin();
//   order.Advance(0);      // where we are: at the first use of group 0
//   order.NextUse(0);      // 2, the position of its next use
//
// Uses are kept with their repeats: a group that siblings share is used again,
// and must not make room for one that is needed later.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

namespace composable {

class PassOrder {
 public:
  static constexpr size_t kMaxRecorded = 1 << 16;
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  // A new pass: recording and position start anew.
  void Begin();
  // Appends a use, unless it repeats the last one. At most kMaxRecorded: a
  // program that runs forwards with gradients and never a backward does not
  // start a new pass.
  void Record(int group);
  // What was recorded becomes the order to follow. Nothing recorded (a pass
  // without gradients) leaves the order as it was.
  void Commit();
  // Follows the reverse of what `forward` follows, where there is no order of
  // its own yet.
  void SeedWithReverseOf(const PassOrder& forward);
  void Clear();

  // Moves to the next use of `group`, which may be one of an earlier round of
  // the same pass. False if the order does not hold it: the pass has left the
  // order, and nothing is known about what comes next.
  bool Advance(int group);
  // Position of the first use of `group` after the present one.
  size_t NextUse(int group) const;
  // Groups used after the present position, in order, with repeats. Empty
  // while the pass has left the order.
  size_t size() const { return followed_.size(); }
  int at(size_t position) const { return followed_[position]; }
  size_t next_position() const { return on_order_ ? next_ : followed_.size(); }
  bool empty() const { return followed_.empty(); }

 private:
  std::vector<int> followed_;
  std::vector<int> recorded_;
  size_t next_ = 0;  // one after the present position
  bool on_order_ = true;
};

}  // namespace composable
