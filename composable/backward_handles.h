// What asynchronous calls of a handle return.
//
//   composable::UnshardHandle gather = handle.unshard(/*async_op=*/true);
//   // ... other work ...
//   gather.wait();
//
// Handles do not keep modules alive. Waiting again, or for what is done or gone,
// does nothing.
#pragma once

#include <memory>
#include <utility>

namespace composable {

class FSDPState;
class FSDPStateContext;
struct BackwardFinalization;

class UnshardHandle {
 public:
  UnshardHandle() = default;  // done
  explicit UnshardHandle(std::weak_ptr<FSDPState> state)
      : state_(std::move(state)) {}

  // On return the whole parameters may be read, unless they were resharded since.
  // Throws what the gather threw.
  void wait();

 private:
  std::weak_ptr<FSDPState> state_;
};

class GradientReductionHandle {
 public:
  GradientReductionHandle() = default;  // done
  GradientReductionHandle(std::weak_ptr<FSDPStateContext> context,
                          std::shared_ptr<BackwardFinalization> finalization)
      : context_(std::move(context)), finalization_(std::move(finalization)) {}

  // On return the gradients of the iteration are complete. Throws
  // c10::ValueError if an exception, or reset_iter_state(), dropped them.
  void wait();

 private:
  std::weak_ptr<FSDPStateContext> context_;
  std::shared_ptr<BackwardFinalization> finalization_;
};

}  // namespace composable
