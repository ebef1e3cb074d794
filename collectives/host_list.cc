#include "collectives/host_list.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace composable {
namespace {

constexpr int64_t kMostHosts = 1 << 24;

std::optional<int64_t> Digits(absl::string_view text) {
  int64_t value = 0;
  for (const char c : text) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(c))) return {};
  }
  if (!absl::SimpleAtoi(text, &value)) return {};
  return value;
}

// What stands between two brackets: "003-005,7".
std::optional<HostList> ParseNumbers(absl::string_view text) {
  HostList numbers;
  for (const absl::string_view range : absl::StrSplit(text, ',')) {
    const std::pair<std::string, std::string> ends =
        absl::StrSplit(range, absl::MaxSplits('-', 1));
    const bool single = ends.first.size() == range.size();
    const auto low = Digits(ends.first);
    const auto high = single ? low : Digits(ends.second);
    if (!low || !high || *high < *low || *high - *low >= kMostHosts) return {};
    if (numbers.count == 0) numbers.first = ends.first;
    numbers.count += *high - *low + 1;
  }
  return numbers;
}

// One entry of the list: "rack[0-1]n[00-15]-ib".
std::optional<HostList> ParseEntry(absl::string_view text) {
  HostList hosts{.first = "", .count = 1};
  while (!text.empty()) {
    const size_t open = text.find_first_of("[]");
    hosts.first.append(text.data(), std::min(open, text.size()));
    if (open == absl::string_view::npos) break;
    const size_t close = text.find_first_of("[]", open + 1);
    if (text[open] != '[' || close == absl::string_view::npos ||
        text[close] != ']') {
      return {};
    }
    const auto numbers = ParseNumbers(text.substr(open + 1, close - open - 1));
    if (!numbers) return {};
    hosts.first += numbers->first;
    hosts.count *= numbers->count;
    if (hosts.count > kMostHosts) return {};
    text.remove_prefix(close + 1);
  }
  if (hosts.first.empty()) return {};
  return hosts;
}

// At the commas that are not within brackets.
std::vector<absl::string_view> SplitEntries(absl::string_view text) {
  std::vector<absl::string_view> entries;
  size_t start = 0;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '[') ++depth;
    if (text[i] == ']') --depth;
    if (text[i] == ',' && depth == 0) {
      entries.push_back(text.substr(start, i - start));
      start = i + 1;
    }
  }
  entries.push_back(text.substr(start));
  return entries;
}

}  // namespace

std::optional<HostList> ParseHostList(absl::string_view text) {
  HostList all;
  for (const absl::string_view entry : SplitEntries(text)) {
    const auto hosts = ParseEntry(entry);
    if (!hosts) return {};
    if (all.count == 0) all.first = hosts->first;
    all.count += hosts->count;
  }
  return all;
}

}  // namespace composable
