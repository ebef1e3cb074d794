// fully_shard is a transaction, and what it makes lives exactly as long as what
// it was made of.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "state/contract_registry.h"
#include "state/fsdp_state.h"
#include "state/storage_registry.h"
#include "tests/composable/semantics.h"
#include "tests/support/memory_counter.h"

namespace {
bool ThisAllocationFails();
}  // namespace

// Of the whole program, LibTorch's libraries included.
void* operator new(size_t bytes) {
  void* memory = ThisAllocationFails() ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// (As one family: a sanitizer's own would not match the others.)
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return ThisAllocationFails() ? nullptr : std::malloc(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}

namespace {
// Allocations of this thread until one fails; negative: none does.
thread_local int64_t allocations_until_failure = -1;

bool ThisAllocationFails() {
  if (allocations_until_failure < 0) return false;
  return allocations_until_failure-- == 0;
}
}  // namespace

namespace composable {
namespace {

using torch::Tensor;

// --- A call that throws ------------------------------------------------------

// Lets the allocations fail from the first tensor of this thread on: before it
// fully_shard only looks, with containers of Abseil, which do not survive a
// failed allocation.
class Trigger final : public c10::Allocator {
 public:
  static Trigger& Get() {
    static auto* trigger = [] {
      auto* made = new Trigger(c10::GetCPUAllocator());
      c10::SetCPUAllocator(made, /*priority=*/200);
      return made;
    }();
    return *trigger;
  }
  void FailAt(int64_t allocation) { armed_ = allocation; }

  c10::DataPtr allocate(size_t bytes) override {
    if (armed_ >= 0) {
      allocations_until_failure = armed_;
      armed_ = -1;
      if (ThisAllocationFails()) throw std::bad_alloc();
    }
    return next_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return next_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  explicit Trigger(c10::Allocator* next) : next_(next) {}
  c10::Allocator* next_;
  inline static thread_local int64_t armed_ = -1;
};

// The registries are Abseil's too: with room, they allocate nothing.
void MakeRoomInRegistries() {
  std::vector<torch::nn::Linear> modules;
  for (int i = 0; i < 200; ++i) modules.emplace_back(1, 1);
  for (auto& module : modules) {
    ContractRegistry::Get().Add({module.ptr()}, "room",
                                std::make_shared<ComposableState>());
    const auto* storage = module->weight.storage().unsafeGetStorageImpl();
    RegisterGuardedStorage(storage, {});
  }
  for (auto& module : modules) {
    UnregisterGuardedStorage(module->weight.storage().unsafeGetStorageImpl());
  }
}

// What a user can see of a module.
struct Seen {
  explicit Seen(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      names.push_back(item.key());
      tensors.push_back(item.value());
      values.push_back(item.value().detach().clone());
      pointers.push_back(item.value().data_ptr());
      gradients.push_back(item.value().grad());
      trained.push_back(item.value().requires_grad());
    }
  }
  void ExpectSame(const torch::nn::Module& module) const {
    const auto now = module.named_parameters();
    ASSERT_EQ(now.size(), names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const Tensor& tensor = now[names[i]];
      EXPECT_TRUE(tensor.is_same(tensors[i])) << names[i];
      EXPECT_TRUE(torch::equal(tensor, values[i])) << names[i];
      EXPECT_EQ(tensor.data_ptr(), pointers[i]) << names[i];
      EXPECT_EQ(tensor.requires_grad(), trained[i]) << names[i];
      EXPECT_TRUE(tensor.is_leaf()) << names[i];
      EXPECT_TRUE(tensor.grad().is_same(gradients[i])) << names[i];
    }
  }
  std::vector<std::string> names;
  std::vector<Tensor> tensors, values, gradients;
  std::vector<void*> pointers;
  std::vector<bool> trained;
};

TEST(TransactionTest, AnAllocationThatFailsLeavesTheModuleAsItWas) {
  MakeRoomInRegistries();
  Trigger::Get();  // before other threads allocate
  ExactRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    for (auto* m : {&plain, &model}) {
      (*m)->third->bias.requires_grad_(false);
      (*m)->first->weight.register_hook([](const Tensor& g) { return 2 * g; });
      (*m)->second->weight.mutable_grad() = torch::ones({7, 7});
    }
    fully_shard(model->second, rank.options());
    const Seen before(*model);
    auto& trigger = Trigger::Get();
    int failures = 0;
    for (bool done = false; !done; ++failures) {
      try {
        trigger.FailAt(failures);
        fully_shard(model, rank.options());
        done = true;
        allocations_until_failure = -1;
      } catch (const std::bad_alloc&) {
        before.ExpectSame(*model);
        EXPECT_EQ(fully_shard.state(model), nullptr);
        EXPECT_TRUE(model->first->weight.is_same(model->parameters()[0]));
      }
    }
    EXPECT_GT(failures, 40);
    ExpectSameBackward(rank, plain, model, MlpLoss);
  });
}

// An entry of the model, too, for a weight that is sharded already.
TEST(TransactionTest, ATiedEntryIsTheWholeAgain) {
  MakeRoomInRegistries();
  RunRanks(1, [](RankContext& rank) {
    Mlp model;
    model->register_parameter("tied", model->second->weight);
    fully_shard(model->second, rank.options());
    const auto tied = [&] { return model->named_parameters(false)["tied"]; };
    int failures = 0;
    for (bool done = false; !done; ++failures) {
      ASSERT_TRUE(tied().is_same(model->second->weight)) << failures;
      try {
        Trigger::Get().FailAt(failures);
        fully_shard(model, rank.options());
        done = true;
        allocations_until_failure = -1;
      } catch (const std::bad_alloc&) {
      }
    }
    EXPECT_GT(failures, 20);
    EXPECT_TRUE(tied().is_same(model->second->parameters()[0]));
  });
}

// Applies fully_shard, and then fails.
TEST(TransactionTest, WhatFailsAfterTheBodyIsUndone) {
  RunRanks(1, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    model->first->weight.register_hook([](const Tensor& g) { return 2 * g; });
    plain->first->weight.register_hook([](const Tensor& g) { return 2 * g; });
    model->second->bias.mutable_grad() = torch::ones({7});
    const Seen before(*model);
    {
      const ModuleRef ref(model);
      const Modules modules{ref.ptr()};
      auto owned = std::vector<OwnedParam>{};
      for (const auto& item : model->named_modules()) {
        for (const auto& entry : item.value()->named_parameters(false)) {
          owned.push_back(
              {entry.value(), entry.key(), {{item.value(), entry.key()}}});
        }
      }
      auto state = std::make_shared<FSDPState>(
          modules, rank.options(),
          std::make_unique<FSDPParamGroup>(
              owned, Communicator(rank.group, c10::kCPU)));
      owned.clear();
      state->group()->Attach(
          state, [] { return MakeNode<torch::autograd::Error>("never run"); });
      EXPECT_TRUE(IsShard(model->parameters()[0]));
      state->Rollback();
      const std::weak_ptr<FSDPState> weak = state;
      state.reset();
      EXPECT_TRUE(weak.expired());
    }
    before.ExpectSame(*model);
    fully_shard(model, rank.options());
    model->zero_grad();
    ExpectSameBackward(rank, plain, model, MlpLoss);
  });
}

TEST(TransactionTest, MissingProcessGroupAndARefusedParameter) {
  RunRanks(1, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    model->third->register_parameter("wave",
                                     torch::ones({2}, torch::kComplexFloat));
    const Seen before(*model);
    destroy_process_group();
    ExpectThrows<c10::ValueError>([&] { fully_shard(model->first); },
                                  {"no default process group"});
    ExpectThrows<c10::NotImplementedError>(
        [&] { fully_shard(model, rank.options()); }, {"'third.wave'"});
    before.ExpectSame(*model);
    fully_shard(model->first, rank.options());
    EXPECT_TRUE(IsShard(model->first->parameters()[0]));
  });
}

// --- Life time ---------------------------------------------------------------

TEST(LifeTimeTest, ModelAndOptimizerHoldTheShardsAndNothingElseDoes) {
  RunRanks(2, [](RankContext& rank) {
    MemoryCounter counter;
    const int64_t before = counter.live();
    {
      Mlp model = RankContext::Seeded(1, [] { return Mlp(); });
      fully_shard(model->second, rank.options());
      fully_shard(model, rank.options());
      torch::optim::AdamW optimizer(model->parameters());
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        MlpLoss(model, rank.rank).backward();
        optimizer.step();
      }
      EXPECT_GT(counter.live(), before);
      model = nullptr;
      // Shards, gradients and state, held by the optimizer alone.
      EXPECT_GT(counter.live(), before);
    }
    EXPECT_EQ(counter.live(), before);
  });
}

TEST(LifeTimeTest, TwoModelsOnTwoGroupsInTwoThreads) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunRanks(2, [&](RankContext& rank) {
    const auto train = [&](int which) {
      at::set_num_threads(1);
      const auto group = init_process_group(
          store, rank.rank, 2,
          ProcessGroupOptions().prefix("model" + std::to_string(which)));
      auto [plain, model] = MakePair([] { return Mlp(); });
      const auto options = FullyShardOptions().mesh(group);
      fully_shard(model->second, options);
      fully_shard(model, options);
      torch::optim::SGD expected(plain->parameters(), 0.01);
      torch::optim::SGD optimizer(model->parameters(), 0.01);
      for (int step = 0; step < 20; ++step) {
        expected.zero_grad();
        optimizer.zero_grad();
        BackwardOfAllRanks(*plain, 2, [&, p = plain](int r) mutable {
          MlpLoss(p, 100 * which + 10 * step + r).backward();
        });
        MlpLoss(model, 100 * which + 10 * step + rank.rank).backward();
        expected.step();
        optimizer.step();
      }
      ExpectParameters(*model, *plain);
    };
    std::thread other(train, 1);
    train(0);
    other.join();
  });
}

// In a process of its own: modules of static life time, and no shut-down.
void TrainAndExit(bool destroy_group_first) {
  static Mlp model = nullptr;
  static std::unique_ptr<torch::optim::AdamW> optimizer;
  static Tensor kept_loss;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = init_process_group(store, 0, 1);
  model = Mlp();
  fully_shard(model->second, FullyShardOptions().mesh(group));
  fully_shard(model, FullyShardOptions().mesh(group));
  optimizer = std::make_unique<torch::optim::AdamW>(model->parameters());
  MlpLoss(model, 0).backward();
  optimizer->step();
  kept_loss = MlpLoss(model, 1);  // gathered, and a graph
  if (destroy_group_first) group.reset();
  std::exit(0);
}

TEST(LifeTimeDeathTest, StaticModulesAndExitWithoutShutDown) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(TrainAndExit(false), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(TrainAndExit(true), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace composable
