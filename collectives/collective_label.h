// What a collective is about: its name in errors, and what the ranks that run
// it together must have in common.
//
//   const composable::CollectiveLabelPtr label =
//       composable::MakeCollectiveLabel("blocks.0", layout.fingerprint(),
//                                       communicator.NextSerial());
//   communicator.AllGather(whole, shard, label);
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace composable {

struct CollectiveLabel {
  std::string name;  // a module's fqn, or the API that runs the collective
  uint64_t plan;     // a hash of what is sent
  int64_t serial;    // tells equal modules apart; 0: none
};

using CollectiveLabelPtr = std::shared_ptr<const CollectiveLabel>;

inline CollectiveLabelPtr MakeCollectiveLabel(std::string name,
                                              uint64_t plan = 0,
                                              int64_t serial = 0) {
  return std::make_shared<const CollectiveLabel>(
      CollectiveLabel{std::move(name), plan, serial});
}

}  // namespace composable
