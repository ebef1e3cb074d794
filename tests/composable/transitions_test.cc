// The tables of states: every illegal cell throws and names itself, and every
// legal one is taken by a run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "state/training_state.h"
#include "tests/composable/semantics.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"

namespace composable {
namespace {

using torch::Tensor;

constexpr auto kTraining = {TrainingState::kIdle, TrainingState::kForward,
                            TrainingState::kPreBackward,
                            TrainingState::kPostBackward};
constexpr auto kSharding = {ShardedState::kSharded, ShardedState::kUnsharding,
                            ShardedState::kUnsharded,
                            ShardedState::kShardedPostForward};
constexpr auto kTree = {TreeEvent::kBeginForward,  TreeEvent::kEndForward,
                        TreeEvent::kBeginBackward, TreeEvent::kBeginReduce,
                        TreeEvent::kEndReduce,     TreeEvent::kEndPass,
                        TreeEvent::kAbort};
constexpr auto kGroup = {GroupEvent::kIssueUnshard, GroupEvent::kFinishUnshard,
                         GroupEvent::kFailUnshard, GroupEvent::kReshard,
                         GroupEvent::kReshardPostForward};

template <typename Enum>
size_t Index(Enum value) {
  return static_cast<size_t>(value);
}

TEST(TransitionTest, EveryCellOfATreeMovesOrNamesItself) {
  int legal = 0;
  for (const auto from : kTraining) {
    for (const auto event : kTree) {
      TrainingState state = from;
      if (const TrainingState* next = Next(from, event)) {
        ++legal;
        const TrainingState to = *next;
        Transition(&state, event);
        EXPECT_EQ(state, to);
        continue;
      }
      ExpectThrows<c10::Error>(
          [&] { Transition(&state, event); },
          {std::string("illegal transition of a tree: ") + ToString(event) +
           " in state " + ToString(from)});
      EXPECT_EQ(state, from);
    }
  }
  EXPECT_EQ(legal, 11);
}

TEST(TransitionTest, EveryCellOfAGroupIsCheckedOrNamesItself) {
  int legal = 0;
  for (const auto tree : kTraining) {
    for (const auto state : kSharding) {
      for (const auto event : kGroup) {
        if (Next(tree, state, event) != nullptr) {
          ++legal;
          CheckGroupTransition(tree, state, event);
          continue;
        }
        ExpectThrows<c10::Error>(
            [&] { CheckGroupTransition(tree, state, event); },
            {std::string("illegal transition of a group: ") + ToString(event) +
             " in state " + ToString(state) + " of a tree in state " +
             ToString(tree)});
      }
    }
  }
  EXPECT_EQ(legal, 4 * 7 + 1);
}

// --- Runs that take every legal cell -----------------------------------------

using Cells = std::map<std::string, uint64_t>;

Cells Taken() {
  Cells cells;
  const auto& counts = transition_counts();
  for (const auto tree : kTraining) {
    for (const auto event : kTree) {
      if (Next(tree, event) == nullptr) continue;
      cells[std::string(ToString(event)) + " of a tree in " + ToString(tree)] =
          counts.tree[Index(tree)][Index(event)];
    }
    for (const auto state : kSharding) {
      for (const auto event : kGroup) {
        if (Next(tree, state, event) == nullptr) continue;
        cells[std::string(ToString(event)) + " of a group in " +
              ToString(state) + " of a tree in " + ToString(tree)] =
            counts.group[Index(tree)][Index(state)][Index(event)];
      }
    }
  }
  return cells;
}

// One rank of two, whose collectives end when they are waited for.
class Runs {
 public:
  Runs() : backend_(MakeManualBackend(2, [](const std::string&) {})) {
    backend_->set_finish_on_wait(true);
    rank_.group = GroupOf(backend_);
    rank_.world_size = 2;
  }

  struct Model {
    Mlp mlp = RankContext::Seeded(1, [] { return Mlp(); });
    std::vector<FSDPModule> handles;
  };
  Model Make(const FullyShardOptions& of_root = {}) {
    Model model;
    for (auto* layer :
         {&model.mlp->first, &model.mlp->second, &model.mlp->third}) {
      model.handles.push_back(fully_shard(*layer, rank_.options()));
    }
    auto options = of_root;
    model.handles.push_back(fully_shard(model.mlp, options.mesh(rank_.group)));
    return model;
  }
  static void Step(Model& model) {
    // Of the input too, so that backward reads all layers.
    const Tensor x = Input(0, {4, 5}).requires_grad_(true);
    model.mlp(x).pow(2).sum().backward();
    model.mlp->zero_grad();
  }
  static bool Throws(const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::DistError&) {
      return true;
    }
    return false;
  }

  void Train() {
    for (const auto prefetch :
         {BackwardPrefetch::kBackwardPre, BackwardPrefetch::kBackwardPost}) {
      Model model = Make(FullyShardOptions().backward_prefetch(prefetch));
      for (int step = 0; step < 3; ++step) Step(model);
    }
  }
  void HandleWhileIdle() {
    Model model = Make();
    model.handles[0].unshard();
    model.handles[0].reshard();
  }
  void SecondBackwardOfOneGraph() {
    Model model = Make();
    const Tensor loss = MlpLoss(model.mlp, 0);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  }
  void EvaluationThroughABoundary() {
    Model model = Make();
    const Tensor x = Input(0, {4, 5});
    // The first layer is used again after the forward.
    const Tensor loss = model.mlp(x).sum();
    (loss + model.mlp->first(x).sum()).backward();
    const torch::NoGradGuard no_grad;
    call(model.mlp, x);
    // It was gathered ahead for that, in vain.
    for (auto& handle : model.handles) handle.reshard();
  }
  void ShardingAParentOfAUsedChild() {
    Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
    fully_shard(model->first, rank_.options());
    model->first(Input(0, {4, 5})).sum().backward();
    fully_shard(model, rank_.options());
    MlpLoss(model, 0).backward();
  }

  // What a hook does in each state, beside what the pass does by itself:
  // gathers another group, frees what is in flight, or fails.
  void InHooks() {
    // Reads a member in a hook of a shard, while a group is reduced.
    Model reads = Make();
    reads.mlp->named_parameters()["third.bias"].register_hook(
        [&](const Tensor& gradient) {
          const torch::NoGradGuard no_grad;
          (void)reads.mlp->first->weight.norm();
          return gradient;
        });
    for (int step = 0; step < 2; ++step) Step(reads);

    // Frees gathers that are in flight.
    Model frees = Make();
    for (int step = 0; step < 2; ++step) Step(frees);
    const auto free_all = [&](const Tensor& gradient) {
      for (auto& handle : frees.handles) handle.reshard();
      return gradient;
    };
    Tensor x = frees.mlp->first(Input(0, {4, 5}).requires_grad_(true));
    for (auto& handle : frees.handles) handle.reshard();
    x = torch::tanh(x);
    x.register_hook(free_all);
    x = torch::tanh(frees.mlp->second(x));
    x.register_hook(free_all);
    frees.mlp->third(x).pow(2).sum().backward();
    Model frees_late = Make(
        FullyShardOptions().backward_prefetch(BackwardPrefetch::kBackwardPre));
    for (int step = 0; step < 2; ++step) Step(frees_late);
    frees_late.mlp->named_parameters()["third.bias"].register_hook(
        [&](const Tensor& gradient) {
          for (auto& handle : frees_late.handles) handle.reshard();
          return gradient;
        });
    Step(frees_late);
  }

  // What can become of a part that was kept after forward, in each state.
  static void PartsAfterForward() {
    RunRanks(4, [](RankContext& rank) {
      const auto make = [&] {
        Model model;
        model.mlp = RankContext::Seeded(1, [] { return Mlp(); });
        const auto options =
            rank.options().reshard_after_forward(2).limit_all_gathers(1);
        for (auto* layer :
             {&model.mlp->first, &model.mlp->second, &model.mlp->third}) {
          model.handles.push_back(fully_shard(*layer, options));
        }
        model.handles.push_back(fully_shard(model.mlp, options));
        return model;
      };
      const Tensor x = Input(0, {4, 5});
      Model idle = make();
      for (const bool gather : {true, false}) {
        {
          const torch::NoGradGuard no_grad;
          call(idle.mlp, x);
        }
        if (gather) idle.handles[0].unshard();
        for (auto& handle : idle.handles) handle.reshard();
      }
      Model again = make();
      again.mlp(x);
      again.mlp(x);
      again.handles[0].reshard();
      again.mlp(x).sum().backward();
      // A backward that needs the last layer only.
      Model partial = make();
      const Tensor middle =
          partial.mlp->second(torch::tanh(partial.mlp->first(x))).detach();
      partial.mlp->third(torch::tanh(middle)).sum().backward();
      // In a hook of a shard, while a group is reduced.
      for (const bool gather : {true, false}) {
        Model model = make();
        model.mlp->named_parameters()["third.bias"].register_hook(
            [&](const Tensor& gradient) {
              const torch::NoGradGuard no_grad;
              if (gather) (void)model.mlp->first->weight.norm();
              if (!gather) model.handles[0].reshard();
              return gradient;
            });
        Step(model);
      }
    });
  }

  // Every collective of an iteration fails once, and those of a hook.
  void Failures(bool with_hook) {
    size_t failures = 0;
    for (bool failed = true; failed; ++failures) {
      Model model = Make();
      if (with_hook) {
        model.mlp->named_parameters()["third.bias"].register_hook(
            [&](const Tensor& gradient) {
              const torch::NoGradGuard no_grad;
              (void)model.mlp->first->weight.norm();
              return gradient;
            });
      }
      Step(model);
      const size_t which = backend_->issued() + failures;
      backend_->Fail(which, "a fault of the test");
      failed = Throws([&] { Step(model); });
      // The fault must not be left for others.
      while (backend_->issued() <= which) Throws([&] { Step(model); });
    }
    EXPECT_GT(failures, 7u);
    Model model = Make();
    Step(model);
    backend_->Fail(backend_->issued(), "a fault of the test");
    EXPECT_TRUE(Throws([&] { model.handles[0].unshard(); }));
  }

 private:
  c10::intrusive_ptr<ManualBackend> backend_;
  RankContext rank_;
};

TEST(TransitionTest, EveryLegalCellIsTaken) {
  const Cells before = Taken();
  Runs runs;
  runs.Train();
  runs.HandleWhileIdle();
  runs.SecondBackwardOfOneGraph();
  runs.EvaluationThroughABoundary();
  runs.ShardingAParentOfAUsedChild();
  runs.InHooks();
  Runs::PartsAfterForward();
  runs.Failures(/*with_hook=*/false);
  runs.Failures(/*with_hook=*/true);
  const Cells after = Taken();
  EXPECT_EQ(after.size(), 40u);
  for (const auto& [cell, count] : after) {
    EXPECT_GT(count, before.at(cell)) << "never taken: " << cell;
  }
}

}  // namespace
}  // namespace composable
