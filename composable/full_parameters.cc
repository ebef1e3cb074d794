#include "composable/full_parameters.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "hooks/full_parameter_scope.h"
#include "state/fsdp_state.h"

namespace composable {
namespace {

constexpr char kApi[] = "composable::FullParameters";

struct Entry {
  std::string fqn;
  at::Tensor tensor;     // as registered
  ShardedEntry sharded;  // null: plain
};

// The parameters that the options speak of, each name once.
std::vector<Entry> Entries(const ModuleRef& module,
                           const FullParametersOptions& options) {
  const auto own = options.recurse ? nullptr : FindFSDPState(*module);
  const bool all = options.recurse || own != nullptr;
  std::vector<Entry> entries;
  for (const auto& item : module->named_parameters(/*recurse=*/all)) {
    auto sharded = FindShardedEntry(item.value());
    if (own != nullptr && sharded.state != own) continue;
    entries.push_back({item.key(), item.value(), std::move(sharded)});
  }
  return entries;
}

std::vector<std::shared_ptr<FSDPState>> StatesOf(
    const std::vector<Entry>& entries) {
  std::vector<std::shared_ptr<FSDPState>> states;
  for (const auto& entry : entries) {
    const auto& state = entry.sharded.state;
    if (state != nullptr &&
        std::find(states.begin(), states.end(), state) == states.end()) {
      states.push_back(state);
    }
  }
  return states;
}

// The member, while its group is held.
at::Tensor WholeOf(const Entry& entry) {
  if (entry.sharded.param == nullptr) return entry.tensor;
  at::Tensor member = entry.sharded.param->unsharded();
  if (member.defined()) return member;
  return entry.sharded.state->group()->GatheredValue(*entry.sharded.param);
}

}  // namespace

FullParameters::FullParameters(const ModuleRef& module,
                               const FullParametersOptions& options) {
  const auto entries = Entries(module, options);
  held_ = HoldWhole(StatesOf(entries), options.writeback, kApi);
  for (const auto& entry : entries) {
    named_parameters_.insert(entry.fqn, WholeOf(entry));
  }
}

FullParameters::~FullParameters() {
  // Group by group, so that memory is given back as it goes.
  named_parameters_.clear();
  held_.clear();
}

void ForEachFullParameter(
    const ModuleRef& module,
    const std::function<void(const std::string& fqn, at::Tensor& whole)>& fn,
    const FullParametersOptions& options) {
  const at::NoGradGuard no_grad;
  const auto entries = Entries(module, options);
  const auto visit = [&](const std::shared_ptr<FSDPState>& state) {
    std::vector<at::Tensor> seen;
    for (const auto& entry : entries) {
      if (entry.sharded.state != state) continue;
      at::Tensor whole = WholeOf(entry);
      const bool is_new = std::none_of(
          seen.begin(), seen.end(),
          [&](const at::Tensor& other) { return other.is_same(whole); });
      if (!is_new) continue;
      seen.push_back(whole);
      fn(entry.fqn, whole);
    }
  };
  for (const auto& state : StatesOf(entries)) {
    const auto held = HoldWhole({state}, options.writeback, kApi);
    visit(state);
  }
  visit(nullptr);
}

}  // namespace composable
