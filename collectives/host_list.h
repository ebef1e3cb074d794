// Slurm's compressed lists of hosts, as in "node[003-005,7],gpu1".
//
// Use it to find the host of rank 0, which is the first of the list:
//
//   const auto hosts = composable::ParseHostList("node[003-005,7],gpu1");
//   // hosts->first is "node003", hosts->count is 5
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace composable {

struct HostList {
  std::string first;
  int64_t count = 0;  // of entries: a host named twice counts twice
};

// Nothing if `text` is not such a list: empty, an unpaired or nested bracket,
// an empty entry, or a range that is not two numbers in ascending order. A name
// may have several brackets and go on after one: "rack[0-1]n[00-15]-ib".
std::optional<HostList> ParseHostList(absl::string_view text);

}  // namespace composable
