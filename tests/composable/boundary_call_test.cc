// What a module with a boundary can be: any signature of forward, and all that
// LibTorch does with a holder.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

// [header example]
struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return fc(x).relu(); }
  at::Tensor extra_method(const at::Tensor& x) { return fc(x); }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 4))};
};
COMPOSABLE_MODULE(Block);
// [header example]

struct Pinned {  // neither copied nor moved
  explicit Pinned(int v) : value(v) {}
  Pinned(const Pinned&) = delete;
  int value;
};

// Its group is gathered in each of these calls.
struct ManyImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, double scale = 2, int shift = 1) {
    return fc(x) * scale + shift;
  }
  int forward(int x) { return x + 1; }
  double forward(double x) { return x / 2; }
  template <typename T>
  std::vector<T> forward(T head, T second, std::integral_constant<int, 2>) {
    return {std::move(head), std::move(second)};
  }
  std::unique_ptr<int> forward(std::unique_ptr<int> x) {
    ++*x;
    return x;
  }
  std::string& forward(std::string& x) { return x += "!"; }
  std::string&& forward(std::string&& x) { return std::move(x); }
  const int& forward() const { return constant; }
  void forward(std::vector<int>* out) { out->push_back(7); }
  Pinned forward(char x) { return Pinned(x); }
  std::tuple<Tensor, int, std::unique_ptr<int>> forward(const Tensor& x,
                                                        const char* text) {
    return {fc(x), static_cast<int>(std::string(text).size()),
            std::make_unique<int>(3)};
  }
  int constant = 5;
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 4))};
};
COMPOSABLE_MODULE(Many);
COMPOSABLE_MODULE_IMPL(ManyByAnotherName, ManyImpl);

// As with TORCH_MODULE, but an illegal call can be asked for.
static_assert(std::is_invocable_v<Many&, int>);
static_assert(!std::is_invocable_v<Many&, std::vector<float>>);
static_assert(std::is_same_v<Many::Impl, ManyImpl>);
static_assert(std::is_same_v<ManyByAnotherName::ContainedType, ManyImpl>);
static_assert(std::is_default_constructible_v<Many> &&
              std::is_copy_constructible_v<Many> &&
              std::is_convertible_v<std::nullptr_t, Many> &&
              std::is_convertible_v<std::shared_ptr<ManyImpl>, Many>);

template <typename Callable>
void CallAll(Callable&& call_it) {
  const Tensor x = torch::ones({2, 4});
  const Tensor y = call_it(x);
  EXPECT_TRUE(torch::allclose(call_it(x, 4.0), (y - 1) * 2 + 1));
  EXPECT_TRUE(torch::allclose(call_it(x, 2.0, 3), y + 2));
  EXPECT_EQ(call_it(1), 2);
  EXPECT_EQ(call_it(1.0), 0.5);
  EXPECT_EQ(call_it(1L, 2L, std::integral_constant<int, 2>()),
            (std::vector<long>{1, 2}));
  EXPECT_EQ(*call_it(std::make_unique<int>(1)), 2);
  std::string text = "a";
  static_assert(std::is_same_v<decltype(call_it(text)), std::string&>);
  EXPECT_EQ(&call_it(text), &text);
  EXPECT_EQ(text, "a!");
  static_assert(
      std::is_same_v<decltype(call_it(std::move(text))), std::string&&>);
  const std::string moved = call_it(std::move(text));
  EXPECT_EQ(moved, "a!");
  static_assert(std::is_same_v<decltype(call_it()), const int&>);
  EXPECT_EQ(call_it(), 5);
  std::vector<int> out;
  static_assert(std::is_void_v<decltype(call_it(&out))>);
  call_it(&out);
  EXPECT_EQ(out, std::vector<int>{7});
  EXPECT_EQ(call_it('c').value, 'c');
  auto [tensor, size, pointer] = call_it(x, "four");
  EXPECT_TRUE(torch::allclose(tensor, (y - 1) / 2));
  EXPECT_EQ(size, 4);
  EXPECT_EQ(*pointer, 3);
}

TEST(BoundaryCallTest, AnySignature) {
  RunRanks(1, [](RankContext& rank) {
    Many plain;
    CallAll(plain);
    Many model;
    fully_shard(model, rank.options());
    // As itself, not as a copy; not through std::forward's conversions.
    const auto through = [](auto& block) {
      return [&block](auto&&... args) -> decltype(auto) {
        return composable::call(block, std::forward<decltype(args)>(args)...);
      };
    };
    CallAll(model);
    CallAll(through(model));
    const Many& constant = model;
    CallAll(through(constant));
    const auto pointer = model.ptr();
    CallAll(through(pointer));
    CallAll(through(*model));
    ManyByAnotherName other(model.ptr());
    CallAll(other);
    ManyImpl on_the_stack;
    CallAll(through(on_the_stack));
    EXPECT_TRUE(fully_shard.state(model)->context->has_boundary);
    EXPECT_EQ(fully_shard.state(model)->context->open_scopes, 0);
  });
}

// On the stack, over a sharded module.
TEST(BoundaryCallTest, AParentOnTheStackRuns) {
  RunRanks(1, [](RankContext& rank) {
    BlockImpl plain;
    BlockImpl model;
    {
      const torch::NoGradGuard no_grad;
      plain.fc->weight.copy_(model.fc->weight);
      plain.fc->bias.copy_(model.fc->bias);
    }
    fully_shard(model.fc, rank.options());
    const Tensor x = torch::ones({2, 4});
    EXPECT_TRUE(torch::equal(call(model, x), call(plain, x)));
  });
}

TEST(BoundaryCallTest, HeaderExample) {
  RunRanks(1, [](RankContext& rank) {
    Block block;
    composable::fully_shard(block, rank.options());
    const Tensor x = torch::ones({2, 4});
    at::Tensor y = block(x);
    EXPECT_TRUE(torch::equal(y, composable::call(block, x)));
    ExpectThrows<c10::ValueError>([&] { block->extra_method(x); },
                                  {"'fc.weight'"});
    composable::ForwardScope scope(block);
    EXPECT_TRUE(torch::equal(block->extra_method(x).relu(), y));
  });
}

TEST(BoundaryHolderTest, DoesWhatLibTorchsHolderDoes) {
  Block block;
  Block empty = nullptr;
  EXPECT_TRUE(empty.is_empty());
  EXPECT_FALSE(static_cast<bool>(empty));
  const Tensor x = torch::ones({2, 4});
  ExpectThrows<c10::ValueError>([&] { empty(x); },
                                {"empty holder", "Construct the module first"});
  ExpectThrows<c10::ValueError>([&] { call(std::shared_ptr<BlockImpl>(), x); },
                                {"empty pointer"});
  empty = block;
  Block copy = block;
  const Tensor y = block(x);
  EXPECT_EQ(empty.get(), block.get());
  EXPECT_EQ(&*copy, block.operator->());
  EXPECT_TRUE(torch::equal(copy(x), y));
  Block from_pointer = block.ptr();
  EXPECT_EQ(from_pointer.ptr(), block.ptr());

  struct Parent : torch::nn::Module {
    explicit Parent(Block b) : block(register_module("block", std::move(b))) {}
    Block block;
  };
  const auto parent = std::make_shared<Parent>(block);
  EXPECT_EQ(parent->named_parameters()[0].key(), "block.fc.weight");
  EXPECT_NE(parent->children()[0]->as<Block>(), nullptr);
  const Block replaced = parent->replace_module("block", Block());
  EXPECT_NE(replaced.get(), block.get());

  Sequential sequence(block, Linear(4, 4));
  sequence->push_back(Block());
  sequence->push_back("last", block);
  EXPECT_EQ(sequence->size(), 4);
  EXPECT_EQ(sequence->forward(x).size(1), 4);
  EXPECT_TRUE(torch::equal(AnyModule(block).forward(x), y));
  ModuleList list(block, Block());
  list->push_back(block);
  EXPECT_EQ(&list->at<BlockImpl>(2), block.get());
  ModuleDict dict;
  dict->update({{"block", block.ptr()}});
  EXPECT_EQ(dict["block"], block.ptr());

  std::stringstream stream;
  torch::save(block, stream);
  Block loaded;
  torch::load(loaded, stream);
  EXPECT_TRUE(torch::equal(loaded(x), y));
  std::ostringstream printed;
  printed << block;
  EXPECT_NE(printed.str().find("Linear"), std::string::npos) << printed.str();
}

}  // namespace
}  // namespace composable
