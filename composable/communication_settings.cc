// What FSDPModule sets about gathers and reductions.
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "collectives/process_group_memory.h"
#include "collectives/subgroups.h"
#include "composable/for_each_state.h"
#include "composable/fsdp_module.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

// Calls `visit` for every state that has a group, with its tree locked.
template <typename Visit>
void ForEachGroup(const std::shared_ptr<FSDPState>& state, bool recurse,
                  Visit visit) {
  ForEachState(state, recurse, [&](FSDPState& found) {
    const auto lock = found.LockTree();
    if (found.group() != nullptr) visit(found);
  });
}

std::string NameOf(const FSDPState& state) {
  return state.fqn.empty() ? "(root)" : state.fqn;
}

bool IsOfTheGroup(const std::shared_ptr<AllGather>& comm) {
  return comm == nullptr ||
         dynamic_cast<ProcessGroupAllocAllGather*>(comm.get()) != nullptr;
}
bool IsOfTheGroup(const std::shared_ptr<ReduceScatter>& comm) {
  return comm == nullptr ||
         dynamic_cast<ProcessGroupAllocReduceScatter*>(comm.get()) != nullptr;
}

}  // namespace

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce,
                                         bool recurse) {
  ForEachGroup(
      Require("set_requires_all_reduce"), recurse, [&](FSDPState& state) {
        state.reduction()->settings().requires_all_reduce = requires_all_reduce;
      });
}

void FSDPModule::set_gradient_divide_factor(std::optional<double> factor,
                                            bool recurse) {
  TORCH_CHECK_VALUE(
      !factor || (std::isfinite(*factor) && *factor > 0),
      "set_gradient_divide_factor: expected a finite factor above 0, got ",
      factor.value_or(0), ".");
  ForEachGroup(Require("set_gradient_divide_factor"), recurse,
               [&](FSDPState& state) {
                 state.reduction()->settings().divide_factor = factor;
               });
}

void FSDPModule::set_reduce_scatter_divide_factor(double factor, bool recurse) {
  TORCH_WARN_ONCE(
      "set_reduce_scatter_divide_factor is deprecated: use "
      "set_gradient_divide_factor.");
  set_gradient_divide_factor(factor, recurse);
}

void FSDPModule::set_force_sum_reduction_for_comms(bool enable, bool recurse) {
  ForEachGroup(Require("set_force_sum_reduction_for_comms"), recurse,
               [&](FSDPState& state) {
                 state.reduction()->settings().force_sum = enable;
               });
}

void FSDPModule::set_all_reduce_hook(const AllReduceHook& hook, bool recurse,
                                     std::optional<c10::Stream> stream) {
  const auto self = Require("set_all_reduce_hook");
  if (stream) {
    TORCH_CHECK_VALUE(hook != nullptr,
                      "set_all_reduce_hook: stream is specified but hook "
                      "itself is missing.");
    ForEachGroup(self, recurse, [](FSDPState& state) {
      TORCH_CHECK_VALUE(!state.reduction()->has_replicas(),
                        "set_all_reduce_hook: stream cannot be set when using "
                        "native HSDP, as '",
                        NameOf(state), "' does.");
    });
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "set_all_reduce_hook: a stream needs parameters on CUDA; these are on "
        "the CPU, where the hook runs in the thread of the backward.");
  }
  ForEachGroup(self, recurse, [&](FSDPState& state) {
    state.reduction()->settings().all_reduce_hook = hook;
  });
}

void FSDPModule::set_custom_all_gather(const std::shared_ptr<AllGather>& comm,
                                       bool recurse) {
  ForEachGroup(
      Require("set_custom_all_gather"), recurse,
      [&](FSDPState& state) { state.group()->set_custom_all_gather(comm); });
}

void FSDPModule::set_custom_reduce_scatter(
    const std::shared_ptr<ReduceScatter>& comm, bool recurse) {
  ForEachGroup(
      Require("set_custom_reduce_scatter"), recurse,
      [&](FSDPState& state) { state.reduction()->settings().custom = comm; });
}

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool enable,
                                                                 bool recurse) {
  const auto self = Require("set_allocate_memory_from_process_group_for_comm");
  ForEachGroup(self, recurse, [](FSDPState& state) {
    TORCH_CHECK_VALUE(
        IsOfTheGroup(state.group()->custom_all_gather()),
        "cannot call set_allocate_memory_from_process_group_for_comm() when "
        "all gather comm is custom, as that of '",
        NameOf(state), "' is: it allocates its memory itself.");
    TORCH_CHECK_VALUE(
        IsOfTheGroup(state.reduction()->settings().custom),
        "cannot call set_allocate_memory_from_process_group_for_comm() when "
        "reduce scatter comm is custom, as that of '",
        NameOf(state), "' is: it allocates its memory itself.");
  });
  ForEachGroup(self, recurse, [&](FSDPState& state) {
    const ProcessGroupPtr group = state.group()->communicator().group();
    const bool use = enable && SupportsAllocation(group, c10::kCPU);
    state.group()->set_custom_all_gather(
        use ? std::make_shared<ProcessGroupAllocAllGather>(group) : nullptr);
    state.reduction()->settings().custom =
        use ? std::make_shared<ProcessGroupAllocReduceScatter>(group) : nullptr;
  });
}

void FSDPModule::set_separate_reduce_scatter_group(bool enable, bool recurse) {
  ForEachGroup(Require("set_separate_reduce_scatter_group"), recurse,
               [&](FSDPState& state) {
                 auto& separate = state.reduction()->settings().separate;
                 if (!enable || state.group()->communicator().size() == 1) {
                   separate.reset();
                   return;
                 }
                 if (separate) return;
                 const ProcessGroupPtr group =
                     state.group()->communicator().group();
                 std::vector<int64_t> ranks(group->getSize());
                 std::iota(ranks.begin(), ranks.end(), 0);
                 separate = Communicator(
                     SubgroupOf(group, ranks, "reduce_scatter"), c10::kCPU);
               });
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int64_t count,
                                                      bool recurse) {
  TORCH_CHECK_VALUE(count >= 1,
                    "set_reduce_scatter_max_input_buffers: expected at least 1 "
                    "buffer, got ",
                    count, ".");
  ForEachState(Require("set_reduce_scatter_max_input_buffers"), recurse,
               [&](FSDPState& state) {
                 const auto lock = state.LockTree();
                 state.max_reduction_payloads = count;
                 if (const auto context = state.tree()) {
                   context->UpdateMaxReductionPayloads();
                 }
               });
}

}  // namespace composable
