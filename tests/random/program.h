// Random programs: small models with the features that make sharding hard, and
// the loop that trains them, drawn from a seed.
//
//   const composable::Program program = composable::Program::Draw(17);
//   auto expected = composable::TrainUnsharded(program);
//   auto weights = composable::TrainSharded(program, rank);   // the same
//
// A program says what it contains (`features`), so that tests can tell which
// combinations were covered. Equal seeds give equal programs everywhere.
#pragma once

#include <ATen/core/Tensor.h>

#include <bitset>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "state/fully_shard_options.h"
#include "tests/support/ranks.h"

namespace composable {

enum class Feature : uint8_t {
  kThreeRanks,
  kNesting,        // a sharded module inside of a sharded one below the root
  kTied,           // one parameter in two modules
  kReuse,          // a module run twice in a forward
  kSkip,           // a module that some steps don't run
  kFrozen,         // parameters frozen from the start
  kFreezing,       // parameters frozen and unfrozen between steps
  kInPlace,        // in-place operators on activations and views
  kTwoDtypes,      // float and double in one group
  kUneven,         // rows that the ranks can't share equally
  kTransposed,     // parameters that are not contiguous
  kListGroup,      // siblings that form one group
  kKeepUnsharded,  // reshard_after_forward(false)
  kAccumulate,     // microbatches without gradient sync
  kTwoForwards,    // and one backward
  kEval,           // a forward without gradients in between
  kBoundary,       // modules are called through their boundary
  kOneSlot,        // limit_all_gathers(1)
  kOtherPrefetch,  // not BACKWARD_PRE
  kParentReads,    // a parent reads a child's parameter
  kEscape,         // a loss on an intermediate tensor
  kRankDependent,  // ranks use different parameters of one group
  kClip,           // gradient clipping
  kAdamW,          // SGD with momentum otherwise
  kUserUnshard,    // unshard() by the user before a forward
  kPlacements,     // Shard(dim) and Owned()
  kHeld,           // set_reshard_after_backward(false)
  kManual,         // finalize_backward()
  kJoin,           // ranks use different groups, and join
  kReplicas,       // a 2-D mesh, where no ranks join
  kMixed,          // gathered in float, though double
  kIgnored,        // parameters left to the program, which averages gradients
  kCount,
};
inline constexpr size_t kFeatures = static_cast<size_t>(Feature::kCount);
const char* ToString(Feature feature);

using Features = std::bitset<kFeatures>;

// A module of the model.
struct NodePlan {
  enum class Op : uint8_t {
    kOwn,             // x + down(tanh(up(x)))
    kOwnInPlace,      // the same, with in-place operators on views
    kBranch,          // left on even ranks, right on odd ones
    kEscape,          // x is part of the loss, too
    kChild,           // children[index]
    kChildTwice,      // children[index], twice
    kChildSometimes,  // children[index], in every second step
    kChildByRank,     // children[index], on every second rank
    kReadChild,       // a parameter of children[index]
  };
  struct Step {
    Op op;
    size_t index = 0;
  };

  int64_t hidden = 1;
  bool has_own = true;        // up, down and bias
  bool has_branches = false;  // left and right
  bool bias_is_float = false;
  bool transposed = false;
  bool frozen_bias = false;
  bool ignored_bias = false;
  bool frozen = false;
  bool toggled = false;  // frozen in the second step only
  bool sharded = false;  // a group of its own
  bool joined = false;   // and the next sibling is in that group
  bool tied = false;     // up is that of the sibling before
  bool keep = false;
  std::vector<NodePlan> children;
  std::vector<Step> steps;
};

struct Program {
  static Program Draw(uint64_t seed);

  std::string text() const;
  bool has(Feature feature) const {
    return features.test(static_cast<size_t>(feature));
  }

  uint64_t seed = 0;
  int world_size = 2;
  int64_t dim = 4;
  int microbatches = 1;
  NodePlan root;
  FullyShardOptions options;  // of all groups
  Features features;
};

inline constexpr int kProgramSteps = 3;

// Parameters by name, after kProgramSteps steps.
using Weights = std::map<std::string, at::Tensor>;

// With one process that sees the batches of all ranks.
Weights TrainUnsharded(const Program& program);
// (collective)
Weights TrainSharded(const Program& program, RankContext& rank);

}  // namespace composable
