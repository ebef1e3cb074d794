#include "examples/support/table.h"

#include <absl/strings/str_format.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace examples {

std::string FormatTable(const std::vector<std::string>& header,
                        const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const std::string& title : header) widths.push_back(title.size());
  for (const auto& row : rows) {
    TORCH_CHECK_VALUE(row.size() == header.size(), "expected ", header.size(),
                      " cells in each row, but got ", row.size());
    for (size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], row[i].size());
  }
  std::string table;
  const auto append = [&](const std::vector<std::string>& row) {
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppendFormat(&table, "%s%*s", i > 0 ? "  " : "",
                            static_cast<int>(widths[i]), row[i]);
    }
    table += '\n';
  };
  append(header);
  for (const auto& row : rows) append(row);
  return table;
}

std::string FormatBytes(int64_t bytes) {
  constexpr std::array<std::string_view, 4> kUnits = {"KiB", "MiB", "GiB",
                                                      "TiB"};
  if (bytes < 1024) return absl::StrFormat("%d B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatRankTable(const std::vector<std::vector<int64_t>>& ranks) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& rank : ranks) {
    TORCH_CHECK_VALUE(rank.size() == 4,
                      "expected 4 numbers for each rank, but got ",
                      rank.size());
    rows.push_back({std::to_string(rows.size()), std::to_string(rank[0]),
                    FormatBytes(rank[1]), FormatBytes(rank[2]),
                    FormatBytes(rank[3])});
  }
  return FormatTable(
      {"rank", "parameters held", "peak unsharded", "gathered", "reduced"},
      rows);
}

}  // namespace examples
