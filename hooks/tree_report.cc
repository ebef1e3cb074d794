#include "hooks/tree_report.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>

#include "absl/strings/str_format.h"

namespace composable {
namespace {

constexpr int64_t kMinOversized = int64_t{256} << 20;  // bytes
constexpr int64_t kTimesTheMedian = 8;

std::string Count(int64_t elements) {
  if (elements >= 1000000000) return absl::StrFormat("%.1f G", elements / 1e9);
  if (elements >= 1000000) return absl::StrFormat("%.1f M", elements / 1e6);
  if (elements >= 1000) return absl::StrFormat("%.1f k", elements / 1e3);
  return absl::StrFormat("%d", elements);
}

}  // namespace

std::string TreeSummary(const FSDPStateContext& context) {
  int groups = 0;
  int64_t whole = 0;
  int64_t local = 0;
  int64_t padding = 0;
  for (const FSDPState* state : context.states) {
    if (state == nullptr || state->group() == nullptr) continue;
    ++groups;
    for (const auto& param : state->group()->params()) {
      whole += param.numel();
      local += param.local_range().end - param.local_range().begin;
    }
    for (const auto& segment : state->group()->segments()) {
      padding += segment.layout.padding();
    }
  }
  if (groups == 0) return "";
  return absl::StrFormat(
      "fully_shard: %d %s, %s parameters, %s on this rank (%.1f %% padding)",
      groups, groups == 1 ? "group" : "groups", Count(whole), Count(local),
      100.0 * static_cast<double>(padding) /
          static_cast<double>(whole + padding));
}

std::string OversizedGroup(
    const std::vector<std::pair<std::string, int64_t>>& groups) {
  if (groups.size() < 3) return "";
  std::vector<int64_t> sizes;
  sizes.reserve(groups.size());
  for (const auto& group : groups) sizes.push_back(group.second);
  std::nth_element(sizes.begin(), sizes.begin() + sizes.size() / 2,
                   sizes.end());
  const int64_t median = sizes[sizes.size() / 2];
  const auto largest = std::max_element(
      groups.begin(), groups.end(),
      [](const auto& a, const auto& b) { return a.second < b.second; });
  if (largest->second < kMinOversized ||
      largest->second <= kTimesTheMedian * median) {
    return "";
  }
  return absl::StrFormat(
      "fully_shard: the parameters of the group '%s' take %d MiB, %.0f times "
      "the median of the %d groups (%.1f MiB). While it is used it is whole in "
      "memory, and its gradients are reduced in one buffer of that size. Shard "
      "its largest modules, such as an embedding and an output layer, by "
      "calls of their own.",
      largest->first, largest->second >> 20,
      static_cast<double>(largest->second) /
          static_cast<double>(std::max<int64_t>(median, 1)),
      groups.size(), static_cast<double>(median) / (1 << 20));
}

void ReportTree(const FSDPStateContext& context) {
  std::vector<std::pair<std::string, int64_t>> groups;
  int rank = 0;
  for (const FSDPState* state : context.states) {
    if (state == nullptr || state->group() == nullptr) continue;
    rank = std::max(rank, state->group()->communicator().rank());
    groups.emplace_back(
        state->fqn.empty() ? "(root)" : state->fqn,
        static_cast<int64_t>(state->group()->unsharded_bytes()));
  }
  if (rank != 0 || groups.empty()) return;
  LOG(INFO) << TreeSummary(context);
  const std::string warning = OversizedGroup(groups);
  if (!warning.empty()) TORCH_WARN(warning);
}

}  // namespace composable
