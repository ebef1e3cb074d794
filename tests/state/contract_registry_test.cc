// The registry, and contract<>, which is how composable APIs use it. The cases
// of contract<> follow upstream's test/distributed/_composable/test_contract.py
// as far as they make sense without attributes on modules.
#include "state/contract_registry.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "composable/contract.h"
#include "tests/support/errors.h"

namespace composable {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Leaf : torch::nn::Module {
  Leaf() : Module("Leaf") {
    weight = register_parameter("weight", at::ones({2}));
    count = register_buffer("count", at::ones({1}));
  }
  at::Tensor weight;
  at::Tensor count;
};

struct Tree : torch::nn::Module {
  Tree() : Module("Tree") {
    left = register_module("left", std::make_shared<Leaf>());
    right = register_module("right", std::make_shared<Leaf>());
  }
  using Module::unregister_module;
  std::shared_ptr<Leaf> left;
  std::shared_ptr<Leaf> right;
};

struct TestState : ComposableState {
  explicit TestState(int value = 0, bool owned = false)
      : value(value), owned(owned) {
    ++alive;
  }
  ~TestState() override { --alive; }
  bool owned_by_modules() const override { return owned; }
  int value;
  bool owned;
  static int alive;
};
int TestState::alive = 0;

// --- ContractRegistry --------------------------------------------------------

TEST(ContractRegistryTest, NothingOnAFreshModule) {
  const auto module = std::make_shared<Leaf>();
  auto& registry = ContractRegistry::Get();
  EXPECT_EQ(registry.Find(*module, "api"), nullptr);
  EXPECT_FALSE(registry.Applied(*module, "api"));
  EXPECT_THAT(registry.Apis(*module), ElementsAre());
}

TEST(ContractRegistryTest, KeepsApisInOrderAndApart) {
  const auto module = std::make_shared<Leaf>();
  auto& registry = ContractRegistry::Get();
  const auto b = std::make_shared<TestState>(1);
  const auto a = std::make_shared<TestState>(2);
  registry.Add({module}, "b", b);
  registry.Add({module}, "a", a);
  EXPECT_EQ(registry.Find(*module, "a"), a);
  EXPECT_EQ(registry.Find(*module, "b"), b);
  EXPECT_EQ(registry.Find(*module, "c"), nullptr);
  EXPECT_TRUE(registry.Applied(*module, "a"));
  EXPECT_FALSE(registry.Applied(*module, "c"));
  EXPECT_THAT(registry.Apis(*module), ElementsAre("b", "a"));
}

TEST(ContractRegistryTest, ListsShareAState) {
  const auto one = std::make_shared<Leaf>();
  const auto two = std::make_shared<Leaf>();
  const auto other = std::make_shared<Leaf>();
  auto& registry = ContractRegistry::Get();
  const auto state = std::make_shared<TestState>();
  registry.Add({one, two}, "api", state);
  EXPECT_EQ(registry.Find(*one, "api"), state);
  EXPECT_EQ(registry.Find(*two, "api"), state);
  EXPECT_FALSE(registry.Applied(*other, "api"));
}

TEST(ContractRegistryTest, KeepsStatesThatNobodyElseOwns) {
  const auto module = std::make_shared<Leaf>();
  auto& registry = ContractRegistry::Get();
  registry.Add({module}, "api", std::make_shared<TestState>(5));
  ASSERT_NE(registry.Find(*module, "api"), nullptr);
}

TEST(ContractRegistryTest, HoldsStatesThatModulesOwnWeakly) {
  const auto module = std::make_shared<Leaf>();
  auto& registry = ContractRegistry::Get();
  auto state = std::make_shared<TestState>(5, /*owned=*/true);
  registry.Add({module}, "api", state);
  EXPECT_EQ(registry.Find(*module, "api"), state);
  state.reset();
  EXPECT_EQ(registry.Find(*module, "api"), nullptr);
  EXPECT_TRUE(registry.Applied(*module, "api"));  // it was, all the same
}

TEST(ContractRegistryTest, StateOfADeadModuleGoesWithTheNextAdd) {
  auto& registry = ContractRegistry::Get();
  // Sweeps what other tests have left.
  const auto first = std::make_shared<Leaf>();
  registry.Add({first}, "api", std::make_shared<TestState>());
  const int before = TestState::alive;
  {
    const auto module = std::make_shared<Leaf>();
    registry.Add({module}, "api", std::make_shared<TestState>());
    EXPECT_EQ(TestState::alive, before + 1);
  }
  const auto other = std::make_shared<Leaf>();
  registry.Add({other}, "api", std::make_shared<TestState>());
  EXPECT_EQ(TestState::alive, before + 1);
}

// The registry is keyed by address: another module at the same one must not
// inherit.
TEST(ContractRegistryTest, AddressOfADeadModuleIsUsedAgain) {
  auto& registry = ContractRegistry::Get();
  alignas(Leaf) static unsigned char memory[sizeof(Leaf)];
  const auto make = [] {
    return std::shared_ptr<Leaf>(new (memory) Leaf,
                                 [](Leaf* leaf) { leaf->~Leaf(); });
  };
  auto first = make();
  registry.Add({first}, "api", std::make_shared<TestState>(1));
  EXPECT_TRUE(registry.Applied(*first, "api"));
  first.reset();
  const auto second = make();
  ASSERT_EQ(static_cast<void*>(second.get()), static_cast<void*>(memory));
  EXPECT_FALSE(registry.Applied(*second, "api"));
  EXPECT_EQ(registry.Find(*second, "api"), nullptr);
  EXPECT_THAT(registry.Apis(*second), ElementsAre());
  const auto state = std::make_shared<TestState>(2);
  registry.Add({second}, "api", state);
  EXPECT_EQ(registry.Find(*second, "api"), state);
  EXPECT_THAT(registry.Apis(*second), ElementsAre("api"));
}

TEST(ContractRegistryTest, StatesMayAskTheRegistryWhileTheyDie) {
  struct Asking : ComposableState {
    ~Asking() override {
      ContractRegistry::Get().Apis(*std::make_shared<Leaf>());
    }
  };
  auto& registry = ContractRegistry::Get();
  {
    const auto module = std::make_shared<Leaf>();
    registry.Add({module}, "api", std::make_shared<Asking>());
  }
  const auto other = std::make_shared<Leaf>();
  registry.Add({other}, "api", std::make_shared<TestState>());  // no deadlock
}

// --- contract<> --------------------------------------------------------------

constexpr auto kNoop =
    contract<TestState>("noop_api", [](const Modules& /*modules*/, int value) {
      return std::make_shared<TestState>(value);
    });
constexpr auto kOther = contract<TestState>(
    "other_api",
    [](const Modules& /*modules*/) { return std::make_shared<TestState>(-1); });

TEST(ContractTest, ReturnsAndRemembersTheState) {
  const auto module = std::make_shared<Tree>();
  EXPECT_EQ(kNoop.state(module), nullptr);
  const std::shared_ptr<TestState> state = kNoop(module, 7);
  EXPECT_EQ(state->value, 7);
  EXPECT_EQ(kNoop.state(module), state);
  EXPECT_EQ(kNoop.state(*module), state);
  EXPECT_EQ(kNoop.state(module->left), nullptr);  // not inherited
  EXPECT_STREQ(kNoop.name(), "noop_api");
}

TEST(ContractTest, ApisCompose) {
  const auto module = std::make_shared<Tree>();
  kNoop(module, 1);
  kOther(module);
  kNoop(module->left, 2);
  EXPECT_EQ(kNoop.state(module)->value, 1);
  EXPECT_EQ(kOther.state(module)->value, -1);
  EXPECT_EQ(kNoop.state(module->left)->value, 2);
  EXPECT_THAT(ContractRegistry::Get().Apis(*module),
              ElementsAre("noop_api", "other_api"));
}

TEST(ContractTest, AppliedTwice) {
  const auto module = std::make_shared<Tree>();
  const auto state = kNoop(module, 1);
  EXPECT_EQ(ErrorOf<c10::ValueError>([&] { kNoop(module, 2); }),
            "noop_api was already applied to this module of type Tree. Each "
            "composable API can be applied to a module once.");
  EXPECT_EQ(kNoop.state(module), state);
  EXPECT_THAT(ContractRegistry::Get().Apis(*module), ElementsAre("noop_api"));
}

TEST(ContractTest, AppliedTwiceAsPartOfAList) {
  const auto one = std::make_shared<Leaf>();
  const auto two = std::make_shared<Leaf>();
  kNoop(two, 1);
  EXPECT_THAT(ErrorOf<c10::ValueError>([&] {
                kNoop(Modules{one, two}, 2);
              }),
              HasSubstr("was already applied to this module of type Leaf"));
  EXPECT_EQ(kNoop.state(one), nullptr);  // all or nothing
}

TEST(ContractTest, ListOfModulesSharesAState) {
  const auto one = std::make_shared<Leaf>();
  const auto two = std::make_shared<Leaf>();
  const auto state = kNoop(Modules{one, two}, 3);
  EXPECT_EQ(kNoop.state(one), state);
  EXPECT_EQ(kNoop.state(two), state);
}

TEST(ContractTest, EmptyList) {
  EXPECT_EQ(ErrorOf<c10::ValueError>([] { kNoop(Modules{}, 1); }),
            "noop_api: expected at least one module, got an empty list.");
}

TEST(ContractTest, StateOfAnotherTypeIsNotHandedOut) {
  struct OtherState : ComposableState {};
  constexpr auto same_name =
      contract<OtherState>("noop_api", [](const Modules& /*modules*/) {
        return std::make_shared<OtherState>();
      });
  const auto module = std::make_shared<Leaf>();
  kNoop(module, 1);
  EXPECT_EQ(same_name.state(module), nullptr);
}

TEST(ContractTest, BodyThatThrowsCanBeRetried) {
  const auto module = std::make_shared<Tree>();
  int calls = 0;
  const auto api =
      contract<TestState>("failing_api", [&calls](const Modules& /*modules*/) {
        if (++calls == 1) throw std::runtime_error("no memory today");
        return std::make_shared<TestState>(calls);
      });
  EXPECT_THROW(api(module), std::runtime_error);
  EXPECT_EQ(api.state(module), nullptr);
  EXPECT_FALSE(ContractRegistry::Get().Applied(*module, "failing_api"));
  EXPECT_EQ(api(module)->value, 2);
  EXPECT_THROW(api(module), c10::ValueError);
  EXPECT_EQ(calls, 2);
}

template <typename Change>
std::string ErrorOfChange(Change change) {
  const auto module = std::make_shared<Tree>();
  const auto api =
      contract<TestState>("bad_api", [&change](const Modules& modules) {
        change(static_cast<Tree&>(*modules[0]));
        return std::make_shared<TestState>();
      });
  const std::string error = ErrorOf<c10::ValueError>([&] { api(module); });
  EXPECT_FALSE(ContractRegistry::Get().Applied(*module, "bad_api"));
  return error;
}

TEST(ContractTest, BodyMayNotChangeNames) {
  EXPECT_EQ(ErrorOfChange([](Tree& tree) {
              tree.register_parameter("extra", at::ones({1}));
            }),
            "bad_api must not change the names of parameters of Tree, but [] "
            "went and [extra] came.");
  EXPECT_EQ(ErrorOfChange([](Tree& tree) {
              tree.left->register_buffer("mean", at::ones({1}));
            }),
            "bad_api must not change the names of buffers of Tree, but [] went "
            "and [left.mean] came.");
  struct Empty : torch::nn::Module {};
  EXPECT_EQ(ErrorOfChange([](Tree& tree) {
              tree.right->register_module("inner", std::make_shared<Empty>());
            }),
            "bad_api must not change the names of submodules of Tree, but [] "
            "went and [right.inner] came.");
  // A wrapper, as Python's FSDP1 was one.
  EXPECT_EQ(ErrorOfChange([](Tree& tree) {
              const auto left = tree.left;
              tree.unregister_module("left");
              tree.register_module("wrapped", left);
            }),
            "bad_api must not change the names of parameters of Tree, but "
            "[left.weight] went and [wrapped.weight] came.");
}

TEST(ContractTest, BodyMayNotChangeTheOrderOfNames) {
  EXPECT_EQ(ErrorOfChange([](Tree& tree) {
              const auto left = tree.left;
              tree.unregister_module("left");
              tree.register_module("left", left);
            }),
            "bad_api must not change the names of parameters of Tree, but "
            "their order changed.");
}

TEST(ContractTest, BodyMayChangeValuesAndTensors) {
  const auto module = std::make_shared<Tree>();
  const auto api =
      contract<TestState>("replacing_api", [](const Modules& modules) {
        modules[0]->to(c10::kDouble);
        return std::make_shared<TestState>();
      });
  EXPECT_NE(api(module), nullptr);
  EXPECT_EQ(module->left->weight.scalar_type(), c10::kDouble);
}

TEST(ContractTest, ArgumentsAreForwarded) {
  const auto module = std::make_shared<Leaf>();
  const auto api = contract<TestState>(
      "moving_api", [](const Modules& /*modules*/, std::unique_ptr<int> value) {
        return std::make_shared<TestState>(*value);
      });
  EXPECT_EQ(api(module, std::make_unique<int>(9))->value, 9);
}

}  // namespace
}  // namespace composable
