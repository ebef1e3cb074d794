// The tables that train_gpt ends with.
//
//   std::cout << FormatTable({"rank", "held"}, {{"0", FormatBytes(2097152)}});
//
// writes
//
//   rank     held
//      0  2.0 MiB
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace examples {

// Right-aligned columns, two blanks apart, one line per row, the header first.
// Every row must have as many cells as the header.
std::string FormatTable(const std::vector<std::string>& header,
                        const std::vector<std::vector<std::string>>& rows);

// `512 B`, `1.5 KiB`, `20.8 MiB`, ...
std::string FormatBytes(int64_t bytes);

// One row per rank. `ranks[r]` holds, for rank r: parameters held, then peak
// bytes unsharded, bytes gathered and bytes reduced.
std::string FormatRankTable(const std::vector<std::vector<int64_t>>& ranks);

}  // namespace examples
