// What fully_shard takes over: memory that others share, and what it gives back
// where it fails. And what unshard() of a group lets go of.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "state/fsdp_state.h"
#include "tests/composable/semantics.h"
#include "tests/composable/warnings.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

struct TransposedImpl : Module {
  explicit TransposedImpl(const Tensor& value)
      : weight(register_parameter("weight", value)) {}
  Tensor forward(const Tensor& x) { return x.mm(weight); }
  Tensor weight;
};
TORCH_MODULE(Transposed);

constexpr char kAliasWarning[] = "shares its memory with another tensor";

Tensor Value() { return Input(1, {4, 6}).t().contiguous().t(); }

TEST(SharedMemoryTest, TheBaseOfAViewIsNoOtherTensor) {
  RunRanks(2, [](RankContext& rank) {
    WarningsOfThisThread warnings;
    Transposed plain(Value());
    Transposed model(Value());
    ASSERT_TRUE(model->weight.is_view());
    fully_shard(model, rank.options());
    EXPECT_EQ(warnings.Count(kAliasWarning), 0) << warnings.text();
    ExpectSameBackward(rank, plain, model, [](Transposed& m, int r) {
      return m(Input(r, {3, 4})).pow(2).sum();
    });
  });
}

TEST(SharedMemoryTest, WarnsOfABaseOrAViewThatSomebodyHolds) {
  RunRanks(2, [](RankContext& rank) {
    for (const int what : {0, 1, 2, 3}) {
      WarningsOfThisThread warnings;
      const Tensor base = Input(1, {6, 4});
      Tensor view = base.t();
      Tensor value = what == 0 ? view : Value();
      Transposed model(value);
      Tensor alias;
      if (what == 1) alias = model->weight.detach();
      if (what == 2) alias = model->weight._base();
      if (what == 3) alias = model->weight.narrow(0, 0, 2);
      fully_shard(model, rank.options());
      EXPECT_EQ(warnings.Count(kAliasWarning), 1) << what;
    }
  });
}

struct BufferedImpl : Module {
  explicit BufferedImpl(int rank)
      : fc(register_module("fc", Linear(3, 3))),
        plain(register_buffer("plain", torch::full({2}, 1.0 + rank))),
        late(register_buffer("late", rank == 0
                                         ? torch::ones({2})
                                         : torch::empty({2}, torch::kMeta))) {
    const torch::InferenceMode mode;
    inference = register_buffer("inference", torch::full({2}, 1.0 + rank));
  }
  Linear fc;
  Tensor plain, late, inference;
};
TORCH_MODULE(Buffered);

// Fails when the start values of rank 0 have reached the others: a name more.
TEST(FailedCallTest, GivesBuffersBack) {
  RunRanks(2, [](RankContext& rank) {
    Buffered model(rank.rank);
    const auto options = rank.options().shard_placement_fn(
        [&](const std::string& /*fqn*/,
            const Tensor& /*parameter*/) -> std::optional<Placement> {
          if (model->named_buffers().find("new") == nullptr) {
            model->register_buffer("new", torch::ones({1}));
          }
          return std::nullopt;
        });
    ExpectThrows<c10::ValueError>([&] { fully_shard(model, options); },
                                  {"names of buffers", "[new] came"});
    const Tensor mine = torch::full({2}, 1.0 + rank.rank);
    EXPECT_TRUE(torch::equal(model->plain, mine));
    EXPECT_TRUE(torch::equal(model->inference, mine));
    EXPECT_EQ(model->late.is_meta(), rank.rank == 1);
    fully_shard(model, rank.options());
    EXPECT_TRUE(torch::equal(model->plain, torch::ones({2})));
    EXPECT_TRUE(torch::equal(model->inference, torch::ones({2})));
    EXPECT_TRUE(torch::equal(model->late, torch::ones({2})));
  });
}

// A group that uses no slot takes none from a group that was left.
TEST(UnshardTest, OfAGroupThatStaysEvictsNothing) {
  RunRanks(2, [](RankContext& rank) {
    auto model = RankContext::Seeded(1, [] { return Mlp(); });
    const auto options =
        rank.options().limit_all_gathers(1).forward_prefetch(false);
    auto first = fully_shard(model->first, options);
    auto second =
        fully_shard(model->second, rank.options().reshard_after_forward(false));
    fully_shard(model->third, options);
    fully_shard(model, options);
    const torch::NoGradGuard no_grad;
    MlpLoss(model, 1);
    model->second(Input(1, {2, 7}));  // leaves the third, in the one slot
    second.reshard();
    const int64_t before = fsdp_stats(model).num_gathers;
    second.unshard();
    EXPECT_EQ(fsdp_stats(model).num_gathers - before, 1);
    model->third(Input(1, {2, 7}));
    EXPECT_EQ(fsdp_stats(model).num_gathers - before, 1);
    model->second(Input(1, {2, 7}));
    first.unshard();  // which would use one, and so makes room
    model->third(Input(1, {2, 7}));
    EXPECT_EQ(fsdp_stats(model).num_gathers - before, 3);
  });
}

}  // namespace
}  // namespace composable
