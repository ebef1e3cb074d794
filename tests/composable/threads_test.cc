// Two threads and one tree: at once is an error that leaves the first thread's
// operator right; one after the other works.
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;

// An operator that begins, waits until the test lets it go on, and only then
// reads its argument.
class Gate {
 public:
  void Arrive() {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(20), [&] { return open_; });
  }
  void AwaitArrival() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(20), [&] { return arrived_; });
  }
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool arrived_ = false;
  bool open_ = false;
};

Gate* current_gate = nullptr;

Tensor SlowCopy(const Tensor& tensor) {
  current_gate->Arrive();
  return tensor.clone();
}

TORCH_LIBRARY(composable_threads_test, m) {
  m.def("slow_copy(Tensor tensor) -> Tensor");
  m.impl("slow_copy", c10::DispatchKey::CPU, &SlowCopy);
}

Tensor CallSlowCopy(const Tensor& tensor) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("composable_threads_test::slow_copy", "")
          .typed<Tensor(const Tensor&)>();
  const torch::NoGradGuard no_grad;
  return op.call(tensor);
}

// Three groups, of which two fit.
struct Tree {
  explicit Tree(RankContext& rank)
      : model(RankContext::Seeded(1, [] { return Mlp(); })) {
    auto options = rank.options().limit_all_gathers(1);
    for (auto& layer : {model->first, model->second, model->third}) {
      handles.push_back(fully_shard(layer, options));
    }
    handles.push_back(fully_shard(model, options));
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
  }
  Mlp model;
  std::vector<FSDPModule> handles;
  std::unique_ptr<torch::optim::SGD> optimizer;
  Tensor loss;  // of a graph that reads nothing in backward
};

// Through the boundary, which some of the tests have passed.
Tensor CalledLoss(Mlp& model, int64_t seed) {
  return composable::call(model, Input(seed, {4, 5})).pow(2).sum();
}

struct Intrusion {
  std::string name;
  bool must_throw;  // or else do no harm
  std::function<void(RankContext&, Tree&)> act;
};

std::vector<Intrusion> Intrusions() {
  return {
      {"ReadsTheSameGroup", true,
       [](RankContext&, Tree& t) { (void)t.model->first->bias.sum(); }},
      {"ReadsAnotherGroup", true,
       [](RankContext&, Tree& t) { (void)t.model->second->bias.sum(); }},
      {"RunsTheModel", true,
       [](RankContext&, Tree& t) { (void)MlpLoss(t.model, 0); }},
      {"RunsTheModelThroughItsBoundary", true,
       [](RankContext&, Tree& t) {
         (void)composable::call(t.model, Input(0, {4, 5}));
       }},
      {"OpensTheBoundaryOfAnotherBlock", true,
       [](RankContext&, Tree& t) {
         const ForwardScope scope(t.model->second);
       }},
      {"RunsABackwardThatReadsNothing", true,
       [](RankContext&, Tree& t) { t.loss.backward(); }},
      {"Reshards", true, [](RankContext&, Tree& t) { t.handles[0].reshard(); }},
      {"UnshardsAnotherGroup", true,
       [](RankContext&, Tree& t) { t.handles[1].unshard(); }},
      {"TakesAFullStateDict", true,
       [](RankContext&, Tree& t) { (void)full_state_dict(t.model); }},
      {"ShardsAParent", true,
       [](RankContext& rank, Tree& t) {
         torch::nn::Sequential parent(t.model);
         fully_shard(parent, rank.options());
       }},
      {"StepsTheOptimizer", false,
       [](RankContext&, Tree& t) {
         for (auto& parameter : t.model->parameters()) {
           parameter.mutable_grad() = torch::zeros(parameter.sizes());
         }
         t.optimizer->step();
       }},
      {"WritesAShard", false,
       [](RankContext&, Tree& t) {
         const torch::NoGradGuard no_grad;
         t.model->parameters()[0].add_(0);
       }},
      {"MarksDirty", false,
       [](RankContext&, Tree& t) { t.handles[0].mark_dirty(); }},
      {"ClipsGradients", false,
       [](RankContext&, Tree& t) {
         clip_grad_norm_(t.model->parameters(), 1.0);
       }},
      {"TakesStatistics", false,
       [](RankContext&, Tree& t) { (void)fsdp_stats(t.model); }},
  };
}

class IntrusionTest : public testing::TestWithParam<Intrusion> {};

INSTANTIATE_TEST_SUITE_P(All, IntrusionTest, testing::ValuesIn(Intrusions()),
                         [](const auto& info) { return info.param.name; });

// While an operator of one thread reads first.weight, another thread acts.
TEST_P(IntrusionTest, LeavesTheOperatorInFlightRight) {
  ExactRanks(1, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Tree tree(rank);
    tree.loss = tree.model->first->bias.sum();
    Gate gate;
    current_gate = &gate;
    Tensor copy;
    std::exception_ptr error;
    std::thread reader([&] {
      try {
        copy = CallSlowCopy(tree.model->first->weight);
      } catch (...) {
        error = std::current_exception();
      }
    });
    gate.AwaitArrival();
    if (GetParam().must_throw) {
      ExpectThrows<c10::ValueError>(
          [&] { GetParam().act(rank, tree); },
          {"Two threads use one tree of sharded modules at once"});
    } else {
      GetParam().act(rank, tree);
    }
    gate.Open();
    reader.join();
    if (error) {
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& what) {
        ADD_FAILURE() << "the operator in flight threw: " << what.what();
      }
    } else {
      EXPECT_TRUE(torch::equal(copy, plain->first->weight));
    }
    // The tree works on, in either thread.
    tree.loss.reset();
    tree.model->zero_grad();
    ExpectSameBackward(rank, plain, tree.model, CalledLoss);
    tree.model->zero_grad();
    plain->zero_grad();
    std::thread([&] {
      ExpectSameBackward(rank, plain, tree.model, CalledLoss);
    }).join();
  });
}

TEST(ThreadsTest, TheErrorNamesTheOperatorAndTheParameter) {
  ExactRanks(1, [](RankContext& rank) {
    Tree tree(rank);
    (void)tree.model(Input(0, {4, 5}));
    Gate gate;
    current_gate = &gate;
    std::thread reader([&] { (void)CallSlowCopy(tree.model->first->weight); });
    gate.AwaitArrival();
    ExpectThrows<c10::ValueError>(
        [&] { (void)tree.model->second->bias.sum(); },
        {"aten::sum reads 'second.bias' while an operator of another thread",
         "Use a tree from one thread at a time, or shard one copy of the "
         "module "
         "for each thread"});
    gate.Open();
    reader.join();
  });
}

// The exception of the one leaves the boundary of the model, which frees a tree
// that nobody else uses.
TEST(ThreadsTest, AnErrorThatLeavesABoundaryFreesNothingThatIsRead) {
  ExactRanks(1, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Tree tree(rank);
    Gate gate;
    current_gate = &gate;
    Tensor copy;
    std::thread reader;
    ExpectThrows<c10::ValueError>(
        [&] {
          const ForwardScope scope(tree.model);
          reader = std::thread([&] {
            EXPECT_NO_THROW(copy = CallSlowCopy(tree.model->first->weight));
          });
          gate.AwaitArrival();
          (void)tree.model->second->bias.sum();
        },
        {"Two threads use one tree of sharded modules at once"});
    gate.Open();
    reader.join();
    ASSERT_TRUE(copy.defined());
    EXPECT_TRUE(torch::equal(copy, plain->first->weight));
    ExpectSameBackward(rank, plain, tree.model, CalledLoss);
  });
}

// Other trees are nobody's business.
TEST(ThreadsTest, AnotherTreeIsFree) {
  ExactRanks(1, [](RankContext& rank) {
    Tree tree(rank);
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Tree other(rank);
    Gate gate;
    current_gate = &gate;
    std::thread reader([&] { (void)CallSlowCopy(tree.model->first->weight); });
    gate.AwaitArrival();
    ExpectSameBackward(rank, plain, other.model, MlpLoss);
    gate.Open();
    reader.join();
  });
}

// An operator that fails in one thread does not keep others out for ever.
TEST(ThreadsTest, AfterAnOperatorThatThrewAnotherThreadGoesOn) {
  ExactRanks(1, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    Tree tree(rank);
    std::thread([&] {
      EXPECT_ANY_THROW(torch::mm(tree.model->first->weight,
                                 tree.model->second->weight.sum()));
    }).join();
    ExpectSameBackward(rank, plain, tree.model, MlpLoss);
  });
}

// --- One after the other -----------------------------------------------------

// Each part of each step in a thread of its own.
TEST(ThreadsTest, APassMayMoveFromThreadToThread) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(model, rank.options());
    torch::optim::AdamW expected(plain->parameters());
    torch::optim::AdamW optimizer(model->parameters());
    const auto in_a_thread = [](const std::function<void()>& work) {
      std::exception_ptr error;
      std::thread([&] {
        try {
          at::set_num_threads(1);
          work();
        } catch (...) {
          error = std::current_exception();
        }
      }).join();
      if (error) std::rethrow_exception(error);
    };
    for (int step = 0; step < 4; ++step) {
      expected.zero_grad();
      BackwardOfAllRanks(*plain, 2, [&, p = plain](int r) mutable {
        MlpLoss(p, 10 * step + r).backward();
      });
      expected.step();
      Tensor loss;
      in_a_thread([&] { optimizer.zero_grad(); });
      in_a_thread([&] { loss = MlpLoss(model, 10 * step + rank.rank); });
      in_a_thread([&] { loss.backward(); });
      in_a_thread([&] { clip_grad_norm_(model->parameters(), 1e9); });
      in_a_thread([&] { optimizer.step(); });
      in_a_thread([&] {
        const torch::NoGradGuard no_grad;
        (void)MlpLoss(model, step);
      });
    }
    ExpectParameters(*model, *plain);
  });
}

// Two threads that take turns by iteration.
TEST(ThreadsTest, TwoThreadsMayTakeTurns) {
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    ShardEverySubmodule(model, rank.options());
    torch::optim::SGD expected(plain->parameters(), 0.01);
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    std::mutex mutex;
    std::condition_variable changed;
    int next = 0;
    constexpr int kSteps = 8;
    const auto train = [&](int parity) {
      at::set_num_threads(1);
      for (int step = parity; step < kSteps; step += 2) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return next == step; });
        optimizer.zero_grad();
        MlpLoss(model, 10 * step + rank.rank).backward();
        optimizer.step();
        ++next;
        changed.notify_all();
      }
    };
    std::thread other(train, 1);
    train(0);
    other.join();
    for (int step = 0; step < kSteps; ++step) {
      expected.zero_grad();
      BackwardOfAllRanks(*plain, 2, [&, p = plain](int r) mutable {
        MlpLoss(p, 10 * step + r).backward();
      });
      expected.step();
    }
    ExpectParameters(*model, *plain);
  });
}

// Nobody says which operators meet: each thread gets the right values or the
// error, from the first use of the tree on.
TEST(ThreadsTest, AtOnceEachIsRightOrThrows) {
  ExactRanks(1, [](RankContext& rank) {
    Mlp plain = RankContext::Seeded(1, [] { return Mlp(); });
    const torch::NoGradGuard outer;
    const Tensor expected = MlpLoss(plain, 0);
    for (int round = 0; round < 50; ++round) {
      Tree tree(rank);
      const auto evaluate = [&] {
        const torch::NoGradGuard no_grad;
        for (int i = 0; i < 5; ++i) {
          try {
            EXPECT_TRUE(torch::equal(MlpLoss(tree.model, 0), expected));
          } catch (const c10::ValueError& error) {
            EXPECT_NE(
                std::string(error.what()).find("Two threads use one tree"),
                std::string::npos)
                << error.what();
          }
        }
      };
      std::thread other(evaluate);
      evaluate();
      other.join();
      // And then it is as before.
      EXPECT_TRUE(torch::equal(MlpLoss(tree.model, 0), expected));
    }
  });
}

}  // namespace
}  // namespace composable
