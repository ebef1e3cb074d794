#include "tests/random/program.h"

#include <algorithm>
#include <random>
#include <sstream>
#include <utility>

namespace composable {
namespace {

// Draws a program. Uses the engine's numbers directly, because those of
// std::uniform_int_distribution differ between libraries.
class Drawing {
 public:
  explicit Drawing(uint64_t seed) : engine_(seed) { program_.seed = seed; }

  Program Finish() {
    Program& p = program_;
    p.world_size = 2;
    if (Chance(50)) p.world_size = Use(Feature::kThreeRanks, 3);
    p.dim = Between(2, 6);
    Style();
    if (Chance(35)) {
      Use(Feature::kJoin);
      Use(Feature::kBoundary);
      p.options.rank_dependent(true);
    }
    p.root = Node(/*depth=*/0);
    p.root.sharded = true;
    if (Chance(35)) p.microbatches = Use(Feature::kAccumulate, Between(2, 3));
    for (const Feature feature :
         {Feature::kTwoForwards, Feature::kEval, Feature::kBoundary,
          Feature::kClip, Feature::kAdamW, Feature::kUserUnshard,
          Feature::kPlacements, Feature::kHeld, Feature::kManual}) {
      if (Chance(45)) Use(feature);
    }
    if (Chance(40)) p.options.limit_all_gathers(Use(Feature::kOneSlot, 1));
    if (Chance(40)) {
      Use(Feature::kOtherPrefetch);
      p.options.backward_prefetch(Chance(50) ? BackwardPrefetch::kBackwardPost
                                             : BackwardPrefetch::kNone);
      p.options.forward_prefetch(Chance(50));
    }
    if (Chance(35)) {
      Use(Feature::kMixed);
      p.options.mp_policy(MixedPrecisionPolicy()
                              .param_dtype(c10::kFloat)
                              .cast_forward_inputs(false));
    }
    if (!p.has(Feature::kJoin) && Chance(40)) {
      Use(Feature::kReplicas);
      if (p.world_size == 2 && Chance(50)) p.world_size = 4;
    }
    FindNesting(p.root, /*below_root=*/false);
    return p;
  }

 private:
  uint64_t Between(uint64_t low, uint64_t high) {
    return low + engine_() % (high - low + 1);
  }
  bool Chance(uint64_t percent) { return engine_() % 100 < percent; }

  void Use(Feature feature) {
    program_.features.set(static_cast<size_t>(feature));
  }
  template <typename T>
  T Use(Feature feature, T value) {
    Use(feature);
    return value;
  }

  // A program has a feature in many places or nowhere, so that one failure
  // points at few of them.
  void Style() {
    for (bool* wanted : {&reuse_, &skip_, &frozen_, &freezing_, &in_place_,
                         &two_dtypes_, &transposed_, &lists_, &keep_, &reads_,
                         &escapes_, &branches_, &ties_, &nests_, &ignores_}) {
      *wanted = Chance(50);
    }
  }

  NodePlan Node(int depth) {
    NodePlan node;
    node.hidden = static_cast<int64_t>(Between(1, 7));
    node.sharded = Chance(70);
    // Ranks that join run equally many backwards: the root is always trained.
    const bool trained = depth == 0 && program_.has(Feature::kJoin);
    node.has_own = depth > 0 || trained || Chance(60);
    if (node.has_own) {
      if (two_dtypes_ && Chance(60)) node.bias_is_float = true;
      if (transposed_ && Chance(60)) node.transposed = true;
      if (frozen_ && !trained && Chance(50))
        (Chance(50) ? node.frozen : node.frozen_bias) = true;
      if (freezing_ && !trained && Chance(50)) node.toggled = true;
      if (ignores_ && Chance(40)) node.ignored_bias = true;
      Note(node);
      const bool in_place = in_place_ && Chance(70);
      node.steps.push_back(
          {in_place ? Use(Feature::kInPlace, NodePlan::Op::kOwnInPlace)
                    : NodePlan::Op::kOwn});
    }
    if (branches_ && Chance(50)) {
      node.has_branches = Use(Feature::kRankDependent, true);
      node.steps.push_back({NodePlan::Op::kBranch});
    }
    if (keep_ && Chance(60)) node.keep = true;
    const uint64_t most = depth == 0 ? 4 : nests_ && depth == 1 ? 2 : 0;
    const uint64_t count = depth == 0 ? Between(2, most) : Between(0, most);
    for (uint64_t i = 0; i < count; ++i)
      node.children.push_back(Node(depth + 1));
    for (size_t i = 0; i < node.children.size(); ++i) AddChild(node, i);
    if (escapes_ && Chance(50)) {
      node.steps.insert(node.steps.begin() +
                            static_cast<int64_t>(Between(0, node.steps.size())),
                        {Use(Feature::kEscape, NodePlan::Op::kEscape)});
    }
    return node;
  }

  void Note(const NodePlan& node) {
    if (node.bias_is_float) Use(Feature::kTwoDtypes);
    if (node.transposed) Use(Feature::kTransposed);
    if (node.frozen || node.frozen_bias) Use(Feature::kFrozen);
    if (node.toggled) Use(Feature::kFreezing);
    if (node.ignored_bias) Use(Feature::kIgnored);
    if (node.hidden % program_.world_size != 0) Use(Feature::kUneven);
  }

  void AddChild(NodePlan& node, size_t i) {
    using Op = NodePlan::Op;
    NodePlan& child = node.children[i];
    Op op = Op::kChild;
    if (reuse_ && Chance(40)) {
      op = Use(Feature::kReuse, Op::kChildTwice);
    } else if (skip_ && Chance(50)) {
      op = Use(Feature::kSkip, Op::kChildSometimes);
    } else if (program_.has(Feature::kJoin) && Chance(70)) {
      op = Op::kChildByRank;
    }
    node.steps.push_back({op, i});
    if (reads_ && child.has_own && Chance(50)) {
      node.steps.push_back({Use(Feature::kParentReads, Op::kReadChild), i});
    }
    if (i == 0) return;
    NodePlan& before = node.children[i - 1];
    if (ties_ && child.has_own && before.has_own && !before.tied &&
        Chance(60)) {
      child.tied = Use(Feature::kTied, true);
      child.hidden = before.hidden;
      child.transposed = before.transposed;
      // One parameter can't be frozen in one place only.
      child.frozen = before.frozen;
      child.toggled = before.toggled;
    }
    if (lists_ && before.sharded && !before.joined && child.sharded &&
        Chance(70)) {
      before.joined = Use(Feature::kListGroup, true);
      child.sharded = false;  // by the list
      child.keep = before.keep;
    }
  }

  void FindNesting(const NodePlan& node, bool below_root) {
    for (const NodePlan& child : node.children) {
      if (child.sharded && below_root && node.sharded) Use(Feature::kNesting);
      FindNesting(child, true);
    }
    if (node.keep && node.sharded) Use(Feature::kKeepUnsharded);
  }

  std::mt19937_64 engine_;
  Program program_;
  bool reuse_ = false, skip_ = false, frozen_ = false, freezing_ = false,
       in_place_ = false, two_dtypes_ = false, transposed_ = false,
       lists_ = false, keep_ = false, reads_ = false, escapes_ = false,
       branches_ = false, ties_ = false, nests_ = false, ignores_ = false;
};

void Write(std::ostream& out, const NodePlan& node, const std::string& indent) {
  static constexpr const char* kOps[] = {
      "own",         "own in place",    "branch",        "escape",    "child",
      "child twice", "child sometimes", "child by rank", "read child"};
  out << indent << "node: hidden " << node.hidden;
  for (const auto& [set, name] :
       std::initializer_list<std::pair<bool, const char*>>{
           {node.sharded, "sharded"},
           {node.joined, "with the next"},
           {node.keep, "kept"},
           {!node.has_own, "without parameters of its own"},
           {node.has_branches, "branches"},
           {node.bias_is_float, "float bias"},
           {node.transposed, "transposed"},
           {node.frozen, "frozen"},
           {node.frozen_bias, "frozen bias"},
           {node.ignored_bias, "ignored bias"},
           {node.toggled, "toggled"},
           {node.tied, "tied to the one before"}}) {
    if (set) out << ", " << name;
  }
  out << "; forward:";
  for (const auto& step : node.steps) {
    out << " " << kOps[static_cast<int>(step.op)];
    if (step.op >= NodePlan::Op::kChild) out << " " << step.index;
    out << ";";
  }
  out << "\n";
  for (const auto& child : node.children) Write(out, child, indent + "  ");
}

}  // namespace

const char* ToString(Feature feature) {
  static constexpr const char* kNames[] = {"three ranks",
                                           "nesting",
                                           "tied",
                                           "reuse",
                                           "skip",
                                           "frozen",
                                           "freezing",
                                           "in-place",
                                           "two dtypes",
                                           "uneven",
                                           "transposed",
                                           "list group",
                                           "kept unsharded",
                                           "accumulate",
                                           "two forwards",
                                           "eval",
                                           "boundary",
                                           "one slot",
                                           "other prefetch",
                                           "parent reads",
                                           "escape",
                                           "rank-dependent",
                                           "clip",
                                           "AdamW",
                                           "user unshard",
                                           "placements",
                                           "held",
                                           "manual",
                                           "join",
                                           "replicas",
                                           "mixed precision",
                                           "ignored"};
  static_assert(std::size(kNames) == kFeatures);
  return kNames[static_cast<size_t>(feature)];
}

Program Program::Draw(uint64_t seed) { return Drawing(seed).Finish(); }

std::string Program::text() const {
  std::ostringstream out;
  out << "seed " << seed << ", " << world_size << " ranks, dim " << dim << ", "
      << microbatches << " microbatches:";
  for (size_t i = 0; i < kFeatures; ++i) {
    if (features.test(i))
      out << " [" << ToString(static_cast<Feature>(i)) << "]";
  }
  out << "\n";
  Write(out, root, "  ");
  return out.str();
}

}  // namespace composable
