// The trigger of a module boundary: the exact points before and after a
// module's forward.
//
//   {
//     const composable::internal::ForwardScope scope(*block);  // gathered
//     y = block->forward(x);
//   }                                                          // left
//
// See Note [Module boundary] in composable/boundary.h, which is what a user
// includes.
//
// Note [Forward scopes]
// Opening a scope of a module with a state does what an operator that reads the
// module's group would do (PreForward; PreBackward where a backward runs, as in
// a recompute); closing it leaves the group, as Note [Leave rule] would once
// another group is read. Not left are: the group of the root; a group with
// another open scope, as in a recursion; and, where a backward runs, anything.
//
// A scope of a module without a state is a registry look-up. It counts as a
// forward of any tree.
//
// Where the scope of a root closes for the last time:
//   by an exception   the tree is idle and sharded, and nothing is in flight.
//                     unshard() is undone too. An exception that is caught
//                     further in closes the scopes that it leaves, no more.
//   without gradients the tree is idle, so that the next forward starts with
//                     its checks. What is gathered stays for that: the root
//                     and up to limit_all_gathers groups.
//   else              nothing changes until the backward.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>

#include "state/fsdp_state.h"

namespace composable {

namespace internal {

// Must be closed by the thread that opened it, in the reverse order.
class ForwardScope {
 public:
  // Throws what PreForward throws; the scope is not open then, and the tree is
  // left as by an exception in the forward.
  explicit ForwardScope(const torch::nn::Module& module);
  // Throws c10::DistError if ranks with rank-dependent graphs do not end the
  // same pass; while an exception is in flight, that is a warning.
  ~ForwardScope() noexcept(false);
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  // What the policy of the module wants floating inputs and outputs to be cast
  // to, in a recompute too; nothing: leave them.
  std::optional<c10::ScalarType> input_dtype() const { return input_dtype_; }
  std::optional<c10::ScalarType> output_dtype() const { return output_dtype_; }

 private:
  void ReadPolicy();
  void Open();
  void Close(bool failed);

  std::shared_ptr<FSDPState> state_;           // null: nothing to close
  std::shared_ptr<FSDPStateContext> context_;  // the tree of state_, then
  int exceptions_;                             // in flight at the start
  bool starts_evaluation_ = false;             // of an idle tree
  std::optional<c10::ScalarType> input_dtype_;
  std::optional<c10::ScalarType> output_dtype_;
};

}  // namespace internal

// For the guard, before operator `op` reads parameter `param` of `state` where
// no backward runs. False: gather what is needed. True: the operator is outside
// any forward, and may read what unshard() has gathered. Otherwise throws
// c10::ValueError, without a collective, if the tree has a boundary. The
// context's mutex must be held.
bool ReadsOutsideForward(const FSDPStateContext& context,
                         const FSDPState& state, int param,
                         const std::string& op);

}  // namespace composable
