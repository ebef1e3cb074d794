// What a tree of sharded modules did: counters for reports, and a stream of
// events for tests and tools.
//
//   composable::FSDPStats stats = composable::fsdp_stats(model);
//   std::cout << stats.num_gathers << " gathers\n";
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace composable {

// Since the tree was made. Bytes are those of this rank.
struct FSDPStats {
  int64_t sharded_param_bytes = 0;    // parameters held between iterations
  int64_t unsharded_param_bytes = 0;  // of whole parameters, now
  int64_t peak_unsharded_bytes = 0;   // of whole parameters, at most
  int64_t kept_part_bytes =
      0;                       // of parts kept by reshard_after_forward(k), now
  int64_t gathered_bytes = 0;  // written by all-gathers
  int64_t reduced_bytes = 0;   // read by reduce-scatters
  int64_t all_reduced_bytes = 0;   // of all-reduces between replicas
  int64_t num_gathers = 0;         // groups gathered
  int64_t num_reductions = 0;      // groups reduced
  int64_t num_all_reductions = 0;  // and all-reduced between replicas
  int64_t gathers_in_flight = 0;   // issued and not yet waited for
  int64_t peak_gathers_in_flight = 0;
};

enum class TraceEvent : uint8_t {
  kUnshard,        // all-gather issued
  kUnshardWait,    // all-gather waited for
  kReshard,        // whole parameters freed
  kReduce,         // reduce-scatter issued
  kReduceWait,     // reduce-scatter waited for
  kAllReduce,      // all-reduce between replicas issued
  kAllReduceWait,  // all-reduce waited for
};

inline const char* ToString(TraceEvent event) {
  switch (event) {
    case TraceEvent::kUnshard:
      return "unshard";
    case TraceEvent::kUnshardWait:
      return "unshard_wait";
    case TraceEvent::kReshard:
      return "reshard";
    case TraceEvent::kReduce:
      return "reduce";
    case TraceEvent::kReduceWait:
      return "reduce_wait";
    case TraceEvent::kAllReduce:
      return "all_reduce";
    case TraceEvent::kAllReduceWait:
      return "all_reduce_wait";
  }
  return "?";
}

// Called by the thread that caused the event, with the FQN of the group's
// module ("" for the root). Must not touch a sharded parameter.
using TraceObserver =
    std::function<void(TraceEvent event, const std::string& fqn)>;

}  // namespace composable
