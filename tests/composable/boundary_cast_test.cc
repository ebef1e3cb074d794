// Inputs and outputs that a module boundary casts, in whatever holds them.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tests/composable/cast_reference.h"

namespace user {  // types of a user, in a namespace of their own

// example-begin composable/tensor_members.h
struct Batch {
  at::Tensor features;
  std::vector<at::Tensor> masks;
  int64_t step = 0;
};
// In the namespace of Batch: the members that hold tensors.
auto tensor_members(Batch& b) { return std::tie(b.features, b.masks); }
// example-end

struct Foreign {
  std::optional<at::Tensor> value;
};

struct Unknown {
  std::string text;
  at::Tensor value;
};

struct MoveOnly {
  explicit MoveOnly(at::Tensor v) : value(std::move(v)) {}
  MoveOnly(MoveOnly&&) = default;
  MoveOnly& operator=(MoveOnly&&) = default;
  MoveOnly(const MoveOnly&) = delete;
  at::Tensor value;
};
inline auto tensor_members(MoveOnly& m) { return std::tie(m.value); }

struct Tree {  // of itself
  at::Tensor value;
  std::vector<Tree> below;
};
inline auto tensor_members(Tree& t) { return std::tie(t.value, t.below); }

}  // namespace user

using user::Foreign;
// example-begin composable/tensor_members.h
template <>
struct composable::TensorMembers<Foreign> {
  static auto Tie(Foreign& f) { return std::tie(f.value); }
};
// example-end

namespace composable {
namespace {

using torch::kBFloat16;
using torch::kFloat;
using torch::kHalf;
using user::Batch;
using user::MoveOnly;
using user::Tree;
using user::Unknown;

// Whatever it gets goes to `look`, and comes back.
struct ProbeImpl : torch::nn::Module {
  template <typename T>
  std::decay_t<T> forward(T&& value) {
    return std::forward<T>(value);
  }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(2, 2))};
};
COMPOSABLE_MODULE(Probe);

at::Tensor F32() { return torch::tensor({1.5F, 2.001F}); }
at::Tensor Bf16() { return F32().to(kBFloat16); }

class BoundaryCastTest : public testing::Test {
 protected:
  // Runs `body` with a module whose policy is given.
  template <typename Holder = Probe, typename Body>
  static void With(const MixedPrecisionPolicy& policy, const Body& body) {
    RunRanks(1, [&](RankContext& rank) {
      Holder model;
      fully_shard(model, WithPolicy(rank, policy));
      body(model);
    });
  }
};

TEST_F(BoundaryCastTest, EveryKindOfContainer) {
  With(Policy(kBFloat16), [](Probe& probe) {
    EXPECT_EQ(probe(F32()).scalar_type(), kBFloat16);
    EXPECT_EQ(probe(std::vector{F32()})[0].scalar_type(), kBFloat16);
    EXPECT_EQ((probe(std::array<at::Tensor, 2>{F32(), F32()})[1].scalar_type()),
              kBFloat16);
    EXPECT_EQ(probe(std::deque{F32()})[0].scalar_type(), kBFloat16);
    EXPECT_EQ(probe(std::list{F32()}).front().scalar_type(), kBFloat16);
    EXPECT_EQ((probe(std::map<std::string, at::Tensor>{{"a", F32()}})["a"]
                   .scalar_type()),
              kBFloat16);
    EXPECT_EQ((probe(std::unordered_map<int, at::Tensor>{{1, F32()}})[1]
                   .scalar_type()),
              kBFloat16);
    EXPECT_EQ(probe(std::optional(F32()))->scalar_type(), kBFloat16);
    EXPECT_FALSE(probe(std::optional<at::Tensor>()).has_value());
    const auto [number, tensor] = probe(std::make_pair(1.25, F32()));
    EXPECT_EQ(number, 1.25);
    EXPECT_EQ(tensor.scalar_type(), kBFloat16);
    EXPECT_EQ(
        std::get<1>(probe(std::make_tuple(1, F32(), "text"))).scalar_type(),
        kBFloat16);
    using Variant = std::variant<std::monostate, int, at::Tensor>;
    EXPECT_EQ(std::get<at::Tensor>(probe(Variant(F32()))).scalar_type(),
              kBFloat16);
    EXPECT_EQ(std::get<int>(probe(Variant(3))), 3);
    torch::OrderedDict<std::string, at::Tensor> dict;
    dict.insert("a", F32());
    EXPECT_EQ(probe(dict)["a"].scalar_type(), kBFloat16);
    EXPECT_EQ(dict["a"].scalar_type(), kFloat);
    // Nested.
    const std::map<std::string, std::vector<std::optional<at::Tensor>>> nested{
        {"a", {std::nullopt, F32()}}};
    EXPECT_EQ(probe(nested).at("a")[1]->scalar_type(), kBFloat16);
    // Values are those of to().
    EXPECT_TRUE(torch::equal(probe(F32()), Bf16()));
  });
}

TEST_F(BoundaryCastTest, StructsByFunctionAndByTrait) {
  With(Policy(kBFloat16), [](Probe& probe) {
    const Batch batch{F32(), {F32(), torch::arange(2)}, 7};
    const Batch got = probe(batch);
    EXPECT_EQ(got.features.scalar_type(), kBFloat16);
    EXPECT_EQ(got.masks[0].scalar_type(), kBFloat16);
    EXPECT_TRUE(got.masks[1].is_same(batch.masks[1]));
    EXPECT_EQ(got.step, 7);
    EXPECT_EQ(batch.features.scalar_type(), kFloat);
    EXPECT_EQ(batch.masks[0].scalar_type(), kFloat);
    EXPECT_EQ(probe(Foreign{F32()}).value->scalar_type(), kBFloat16);
    EXPECT_EQ(probe(std::vector{Foreign{F32()}})[0].value->scalar_type(),
              kBFloat16);
    const Tree tree{F32(), {Tree{F32(), {}}}};
    EXPECT_EQ(probe(tree).below[0].value.scalar_type(), kBFloat16);
  });
}

TEST_F(BoundaryCastTest, HeaderExamples) {
  // example-begin composable/tensor_members.h
  Batch batch{torch::ones({2}), {torch::ones({3})}};
  int64_t elements = 0;
  composable::VisitTensors(batch,
                           [&](const at::Tensor& t) { elements += t.numel(); });
  // example-end
  EXPECT_EQ(elements, 5);
  // example-begin composable/cast_tensors.h
  const std::vector<at::Tensor> args = {torch::ones({2}), torch::arange(2)};
  if (composable::internal::NeedsCast(args, torch::kBFloat16)) {
    auto copy = args;
    composable::internal::CastTensors(copy, torch::kBFloat16);
  }
  // example-end
  EXPECT_FALSE(internal::NeedsCast(args[1], kBFloat16));
}

TEST_F(BoundaryCastTest, WhatHoldsNoFloatsIsHandedOnAsItIs) {
  With(Policy(kBFloat16), [](Probe& probe) {
    EXPECT_EQ(probe(3), 3);
    EXPECT_EQ(probe(2.5), 2.5);
    probe(torch::kSum);
    EXPECT_EQ(probe(at::kByte), at::kByte);
    EXPECT_EQ(probe(std::string("a")), "a");
    EXPECT_EQ(std::string(probe("text")), "text");
    EXPECT_EQ(probe(nullptr), nullptr);
    EXPECT_EQ(probe(std::shared_ptr<Unknown>()), nullptr);
    EXPECT_EQ(*probe(std::make_unique<int>(4)), 4);
    EXPECT_EQ(probe(std::vector<bool>{true})[0], true);
    EXPECT_EQ(probe(std::set<std::string>{"b"}).count("b"), 1U);
    EXPECT_EQ(probe(at::Device("cpu")), at::Device("cpu"));
    EXPECT_EQ(probe(std::function<int()>([] { return 5; }))(), 5);
    EXPECT_FALSE(probe(at::Tensor()).defined());
    torch::nn::Linear other(1, 1);
    EXPECT_EQ(probe(other).ptr(), other.ptr());
    for (const auto& integers :
         {torch::arange(3), torch::ones({2}, at::kBool)}) {
      EXPECT_TRUE(probe(integers).is_same(integers));
    }
    const at::Tensor complex = torch::ones({2}, at::kComplexFloat);
    EXPECT_TRUE(probe(complex).is_same(complex));
  });
}

// Of a container that needs no cast, forward gets the caller's own.
struct AddressImpl : torch::nn::Module {
  const void* forward(const std::vector<at::Tensor>& x) { return &x; }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(2, 2))};
};
COMPOSABLE_MODULE(Address);

TEST_F(BoundaryCastTest, NoCopyWhereTheDtypeIsRight) {
  With<Address>(Policy(kBFloat16), [](Address& address) {
    std::vector<at::Tensor> right{Bf16(), torch::arange(2)};
    EXPECT_EQ(address(right), &right);
    std::vector<at::Tensor> wrong{F32()};
    EXPECT_NE(address(wrong), &wrong);
    EXPECT_EQ(wrong[0].scalar_type(), kFloat);
  });
  With(Policy(kBFloat16), [](Probe& probe) {
    const at::Tensor x = Bf16();
    EXPECT_TRUE(probe(x).is_same(x));
  });
}

TEST_F(BoundaryCastTest, UnknownClassesThrowOnlyWhereACastIsAskedFor) {
  const std::vector<std::string> texts = {
      "user::Unknown", "tensor_members(user::Unknown& v)",
      "composable::TensorMembers<user::Unknown>", "cast_forward_inputs(false)"};
  With(Policy(kBFloat16), [&](Probe& probe) {
    ExpectThrows<c10::TypeError>([&] { probe(Unknown{"a", F32()}); }, texts);
    ExpectThrows<c10::TypeError>([&] { probe(std::vector<Unknown>(1)); },
                                 texts);
    ExpectThrows<c10::TypeError>(
        [&] {
          probe(std::make_shared<Unknown>(Unknown{"a", F32()}));
        },
        texts);
    // The tree is as before.
    EXPECT_EQ(probe(F32()).scalar_type(), kBFloat16);
  });
  With(Policy(std::nullopt, std::nullopt, kFloat), [&](Probe& probe) {
    ExpectThrows<c10::TypeError>([&] { probe(Unknown{"a", F32()}); }, texts);
  });
  for (const auto& policy : {Policy(kBFloat16).cast_forward_inputs(false),
                             Policy(std::nullopt, kFloat)}) {
    With(policy, [](Probe& probe) {
      EXPECT_EQ(probe(Unknown{"a", F32()}).value.scalar_type(), kFloat);
    });
  }
}

TEST_F(BoundaryCastTest, WhatCanNotBeReplacedThrows) {
  With(Policy(kBFloat16), [](Probe& probe) {
    at::Tensor x = F32();
    std::vector<at::Tensor> many{x};
    ExpectThrows<c10::TypeError>([&] { probe(&x); }, {"refers to it"});
    ExpectThrows<c10::TypeError>(
        [&] { probe(std::make_shared<at::Tensor>(x)); },
        {"refers to it", "at::Tensor"});
    ExpectThrows<c10::TypeError>([&] { probe(at::TensorList(many)); },
                                 {"refers to it"});
    ExpectThrows<c10::TypeError>([&] { probe(std::span(many)); },
                                 {"refers to it"});
    ExpectThrows<c10::TypeError>([&] { probe(std::tie(x)); }, {"refers to it"});
    ExpectThrows<c10::TypeError>([&] { probe(std::ref(x)); }, {"refers to it"});
    EXPECT_EQ(x.scalar_type(), kFloat);
    EXPECT_EQ(many[0].scalar_type(), kFloat);
  });
}

struct TakesImpl : torch::nn::Module {
  at::Tensor forward(MoveOnly x) { return x.value; }
  at::Tensor forward(const MoveOnly* x) { return x->value; }
  c10::ScalarType forward(const MoveOnly& x, int) {
    return x.value.scalar_type();
  }
  // Returns through references.
  void forward(at::Tensor& x, std::vector<at::Tensor>& all, int& calls) {
    ++calls;
    x = x + 1;
    all.push_back(x);
  }
  const at::Tensor& forward(const at::Tensor& x) { return x; }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(2, 2))};
};
COMPOSABLE_MODULE(Takes);

TEST_F(BoundaryCastTest, ArgumentsThatCanNotBeCopied) {
  With<Takes>(Policy(kBFloat16), [](Takes& takes) {
    EXPECT_EQ(takes(MoveOnly(F32())).scalar_type(), kBFloat16);  // an rvalue
    const MoveOnly right(Bf16());
    EXPECT_EQ(takes(right, 1), kBFloat16);
    const MoveOnly wrong(F32());
    ExpectThrows<c10::TypeError>([&] { takes(wrong, 1); },
                                 {"user::MoveOnly", "can't be copied"});
  });
}

TEST_F(BoundaryCastTest, WhatForwardDoesToReferencesIsSeen) {
  With<Takes>(Policy(kBFloat16), [](Takes& takes) {
    at::Tensor x = F32();
    const at::Tensor kept = F32();
    std::vector<at::Tensor> all{kept};
    int calls = 0;
    takes(x, all, calls);
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(torch::equal(x, Bf16() + 1));
    ASSERT_EQ(all.size(), 2U);
    EXPECT_TRUE(all[0].is_same(kept));  // not its cast
    EXPECT_TRUE(all[1].is_same(x));
  });
}

TEST_F(BoundaryCastTest, ReferencesToACopyAreNotReturned) {
  With<Takes>(Policy(kBFloat16), [](Takes& takes) {
    const at::Tensor right = Bf16();
    EXPECT_EQ(&takes(right), &right);
    const at::Tensor wrong = F32();
    ExpectThrows<c10::TypeError>([&] { takes(wrong); },
                                 {"forward returns a reference"});
  });
  With<Takes>(Policy(std::nullopt, std::nullopt, kHalf), [](Takes& takes) {
    const at::Tensor wrong = F32();
    ExpectThrows<c10::TypeError>([&] { takes(wrong); },
                                 {"forward returns a reference"});
  });
}

TEST_F(BoundaryCastTest, OutputsAndTheirGradients) {
  With(Policy(kBFloat16, std::nullopt, kFloat), [](Probe& probe) {
    const at::Tensor x = F32().requires_grad_();
    const auto [y, i] = probe(std::make_pair(x * 1, torch::arange(2)));
    EXPECT_EQ(y.scalar_type(), kFloat);
    EXPECT_EQ(i.scalar_type(), torch::kLong);
    EXPECT_TRUE(torch::equal(y, Bf16().to(kFloat)));
    (y * y).sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), kFloat);
    EXPECT_TRUE(torch::equal(x.grad(), 2 * Bf16().to(kFloat)));
  });
}

TEST_F(BoundaryCastTest, CastsCanBeSwitchedOff) {
  With(Policy(kBFloat16).cast_forward_inputs(false), [](Probe& probe) {
    const at::Tensor x = F32();
    EXPECT_TRUE(probe(x).is_same(x));
    EXPECT_EQ(probe->fc->weight.scalar_type(), kBFloat16);
  });
  // No policy, no group of its own, and not sharded at all.
  With({}, [](Probe& probe) {
    const at::Tensor x = F32();
    EXPECT_TRUE(probe(x).is_same(x));
  });
  Probe plain;
  const at::Tensor x = F32();
  EXPECT_TRUE(plain(x).is_same(x));
}

TEST_F(BoundaryCastTest, OnlyTheModulesOwnPolicyCounts) {
  RunRanks(1, [](RankContext& rank) {
    struct OuterImpl : torch::nn::Module {
      at::Tensor forward(const at::Tensor& x) {
        seen = x.scalar_type();
        return composable::call(inner, torch::ones({2}));
      }
      Probe inner{register_module("inner", Probe())};
      c10::ScalarType seen = at::kByte;
    };
    const auto outer = std::make_shared<OuterImpl>();
    fully_shard(outer->inner, WithPolicy(rank, Policy(kHalf)));
    fully_shard(outer, WithPolicy(rank, Policy(kBFloat16)));
    EXPECT_EQ(composable::call(outer, F32()).scalar_type(), kHalf);
    EXPECT_EQ(outer->seen, kBFloat16);
  });
}

TEST_F(BoundaryCastTest, EveryMemberOfAListCasts) {
  RunRanks(2, [](RankContext& rank) {
    Probe a;
    Probe b;
    fully_shard({a, b}, WithPolicy(rank, Policy(kBFloat16, kFloat, kHalf)));
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(a(F32()).scalar_type(), kHalf);
      EXPECT_EQ(b(F32()).scalar_type(), kHalf);
      EXPECT_TRUE(torch::equal(b(F32()), Bf16().to(kHalf)));
    }
  });
}

// A re-entrant checkpoint: forward without a graph, and again in backward.
class Recompute : public torch::autograd::Function<Recompute> {
 public:
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const Body& body) {
    context->save_for_backward({x});
    context->saved_data["body"] =
        reinterpret_cast<int64_t>(&body);  // outlives the graph in this test
    const at::NoGradGuard no_grad;
    return body(x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const auto& body =
        *reinterpret_cast<const Body*>(context->saved_data["body"].toInt());
    const at::Tensor x =
        context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode grad(true);
    const at::Tensor y = body(x);
    y.backward(gradients[0].to(y.scalar_type()));
    return {x.grad(), at::Tensor()};
  }
};

struct RecordingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    seen.push_back(x.scalar_type());
    return fc(x);
  }
  std::vector<c10::ScalarType> seen;
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(3, 3))};
};
COMPOSABLE_MODULE(Recording);

TEST_F(BoundaryCastTest, RecomputesCastAlike) {
  RunRanks(2, [](RankContext& rank) {
    const auto make = [] { return Recording(); };
    auto [plain, sharded] = MakePair(make);
    CastReference<Recording> reference(plain, make, {kBFloat16, kFloat});
    fully_shard(sharded, WithPolicy(rank, Policy(kBFloat16, kFloat, kFloat)));
    reference.Backward(rank, [](Recording& m, int r) {
      return m->fc(Input(r, {2, 3}).to(kBFloat16)).to(kFloat).pow(2).sum();
    });
    std::vector<c10::ScalarType> outputs;
    const Recompute::Body body = [&](const at::Tensor& x) {
      const at::Tensor y = sharded(x);
      outputs.push_back(y.scalar_type());
      return y;
    };
    const at::Tensor x = Input(rank.rank, {2, 3}).requires_grad_();
    Recompute::apply(x, body).pow(2).sum().backward();
    EXPECT_EQ(sharded->seen, (std::vector<c10::ScalarType>(2, kBFloat16)));
    EXPECT_EQ(outputs, (std::vector<c10::ScalarType>(2, kFloat)));
    EXPECT_EQ(x.grad().scalar_type(), kFloat);
    ExpectGradients(*sharded, *plain, 0);
  });
}

TEST_F(BoundaryCastTest, AutocastDecidesForEachOperator) {
  RunRanks(1, [](RankContext& rank) {
    Recording model;
    fully_shard(model, WithPolicy(rank, Policy(kHalf)));
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, kBFloat16);
    const at::Tensor y = model(Input(0, {2, 3}));
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(model->seen.front(), kHalf);
    EXPECT_EQ(y.scalar_type(), kBFloat16);
    y.sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), kFloat);
  });
}

}  // namespace
}  // namespace composable
