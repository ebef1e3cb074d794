#include "hooks/alone.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <thread>
#include <utility>

namespace composable {

bool IsAlone(const FSDPStateContext& context) {
  if (context.operators_running == 0 ||
      context.operator_thread == std::this_thread::get_id()) {
    return true;
  }
  const int task = torch::autograd::get_current_graph_task_id();
  return task != -1 && task == context.operator_task;
}

void ThrowNotAlone(const std::string& what) {
  C10_THROW_ERROR(
      ValueError,
      "Two threads use one tree of sharded modules at once: " + what +
          " while an operator of another thread reads its parameters. Use a "
          "tree from one thread at a time, or shard one copy of the module for "
          "each thread.");
}

RunningOperator::RunningOperator(std::shared_ptr<FSDPStateContext> context)
    : context_(std::move(context)) {
  ++context_->operators_running;
  context_->operator_thread = std::this_thread::get_id();
  context_->operator_task = torch::autograd::get_current_graph_task_id();
}

RunningOperator::~RunningOperator() {
  if (context_ != nullptr) --context_->operators_running;
}

}  // namespace composable
