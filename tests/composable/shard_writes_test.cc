// Whatever writes shards notices a forgotten finalize_backward().
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;

TEST(ShardWritesTest, ThrowBetweenABackwardAndItsFinalization) {
  RunRanks(2, [](RankContext& rank) {
    auto [plain, model] = MakePair([] { return Mlp(); });
    auto other = RankContext::Seeded(2, [] { return Mlp(); });
    auto handle = fully_shard(model, rank.options());
    handle.set_manual_backward_finalization(true);
    const StateDict weights = full_state_dict(other);
    Tensor shard = model->parameters()[0];
    const std::vector<std::pair<std::string, std::function<void()>>> writers = {
        {"set_data",
         [&] {
           shard.set_data(torch::zeros({7, 5}));
         }},
        {"aten::set_",
         [&] {
           const torch::NoGradGuard no_grad;
           shard.set_(torch::zeros({7, 5}));
         }},
        {"load_full_state_dict", [&] { load_full_state_dict(model, weights); }},
        {"FullParameters",
         [&] { const FullParameters scope(model, {.writeback = true}); }},
    };
    MlpLoss(model, rank.rank).backward();
    for (const auto& [name, write] : writers) {
      ExpectThrows<c10::ValueError>(
          write, {name, "writes the shards of", "finalize_backward()"});
    }
    { const FullParameters reads(model, {.writeback = false}); }
    handle.finalize_backward();
    ExpectParameters(*model, *plain);  // none of them got through
    for (const auto& [name, write] : writers) EXPECT_NO_THROW(write()) << name;
  });
}

}  // namespace
}  // namespace composable
