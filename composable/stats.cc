#include "composable/stats.h"

#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "hooks/root_pre_forward.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

std::vector<std::shared_ptr<FSDPStateContext>> Trees(
    const torch::nn::Module& root) {
  std::vector<std::shared_ptr<FSDPStateContext>> trees;
  absl::flat_hash_set<const FSDPStateContext*> seen;
  for (const auto& module : root.modules()) {
    const auto state = FindFSDPState(*module);
    if (state == nullptr) continue;
    auto context = LazyInit(*state);
    if (seen.insert(context.get()).second) trees.push_back(std::move(context));
  }
  return trees;
}

}  // namespace

FSDPStats fsdp_stats(const ModuleRef& module) {
  FSDPStats sum;
  for (const auto& context : Trees(*module)) {
    const std::lock_guard<std::recursive_mutex> lock(context->mutex);
    const FSDPStats& s = context->stats;
    sum.sharded_param_bytes += s.sharded_param_bytes;
    sum.unsharded_param_bytes += s.unsharded_param_bytes;
    sum.peak_unsharded_bytes += s.peak_unsharded_bytes;
    sum.gathered_bytes += s.gathered_bytes;
    sum.reduced_bytes += s.reduced_bytes;
    sum.all_reduced_bytes += s.all_reduced_bytes;
    sum.num_all_reductions += s.num_all_reductions;
    sum.kept_part_bytes += s.kept_part_bytes;
    sum.num_gathers += s.num_gathers;
    sum.num_reductions += s.num_reductions;
    sum.gathers_in_flight += s.gathers_in_flight;
    sum.peak_gathers_in_flight += s.peak_gathers_in_flight;
  }
  return sum;
}

void set_trace_observer(const ModuleRef& module,
                        const TraceObserver& observer) {
  for (const auto& context : Trees(*module)) {
    const std::lock_guard<std::recursive_mutex> lock(context->mutex);
    context->observer = observer;
  }
}

}  // namespace composable
