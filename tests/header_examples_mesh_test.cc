// The examples in the headers of meshes, hybrid sharding and the settings of
// gathers and reductions; see header_examples_test.cc.
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cstring>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/custom_collectives.h"
#include "collectives/device_mesh.h"
#include "collectives/process_group_memory.h"
#include "collectives/subgroups.h"
#include "composable/fully_shard.h"
#include "state/gather_buffer.h"
#include "state/gradient_divide.h"
#include "state/group_communicators.h"
#include "state/managed_params.h"
#include "state/post_forward_shard.h"
#include "state/reduction_chain.h"
#include "state/reduction_settings.h"
#include "state/reshard_after_forward.h"
#include "tests/support/ranks.h"

namespace header_examples {
namespace {

using composable::fully_shard;
using composable::RankContext;
using composable::RunRanks;

[[maybe_unused]] void Mesh(const torch::nn::Linear& model) {
  // example-begin collectives/device_mesh.h
  // Two replicas, each sharded over the ranks that are left:
  const int64_t shards = composable::world_size() / 2;
  auto mesh =
      composable::init_device_mesh("cpu", {2, shards}, {"replicate", "shard"});
  mesh["shard"].get_group();         // this rank's row of the grid
  mesh.get_local_rank("replicate");  // 0 or 1
  fully_shard(model, composable::FullyShardOptions().mesh(mesh));
  // example-end
}

TEST(HeaderExamples, Subgroups) {
  RunRanks(3, [](RankContext& rank) {
    if (rank.rank == 1) return;
    const auto group = rank.group;
    // example-begin collectives/subgroups.h
    // Ranks 0 and 2 of `group`, on each of them:
    auto pair = composable::SubgroupOf(group, {0, 2});
    auto same = composable::SubgroupOf(group, {0, 2});  // == pair: made once
    // example-end
    EXPECT_EQ(same, pair);
    EXPECT_EQ(pair->getSize(), 2);
  });
}

TEST(HeaderExamples, CustomCollectives) {
  RunRanks(2, [](RankContext& rank) {
    torch::nn::Linear layer(2, 2);
    auto handle = fully_shard(layer, rank.options());
    // example-begin collectives/custom_collectives.h
    class Logged : public composable::DefaultReduceScatter {
     public:
      c10::intrusive_ptr<c10d::Work> operator()(
          const at::Tensor& output, const at::Tensor& input,
          const composable::ProcessGroupPtr& group, bool async_op) override {
        std::cout << input.numel() << " elements are reduced\n";
        return DefaultReduceScatter::operator()(output, input, group, async_op);
      }
    };
    handle.set_custom_reduce_scatter(std::make_shared<Logged>());
    // example-end
    layer(at::ones({1, 2})).sum().backward();
    EXPECT_TRUE(layer->parameters()[0].grad().defined());
  });
}

[[maybe_unused]] void Memory(composable::FSDPModule handle,
                             const composable::ProcessGroupPtr& group) {
  // example-begin collectives/process_group_memory.h
  if (composable::SupportsAllocation(group, c10::kCUDA)) {
    handle.set_custom_all_gather(
        std::make_shared<composable::ProcessGroupAllocAllGather>(group));
  }
  // example-end
}

TEST(HeaderExamples, ReshardAfterForward) {
  // example-begin state/reshard_after_forward.h
  composable::ReshardAfterForward automatic;  // false for the root only
  composable::ReshardAfterForward freed = true;
  composable::ReshardAfterForward partly = 8;  // a part stays: see below
  // example-end
  EXPECT_FALSE(automatic.frees().has_value());
  EXPECT_EQ(freed.frees(), true);
  EXPECT_EQ(partly.group_size(), 8);
}

TEST(HeaderExamples, PostForwardShard) {
  RunRanks(2, [](RankContext& rank) {
    const composable::Communicator communicator_of_k_ranks(rank.group,
                                                           c10::kCPU);
    const at::Tensor whole_bytes = at::ones({8}, at::kByte);
    const composable::CollectiveLabelPtr label;
    // example-begin state/post_forward_shard.h
    composable::PostForwardShard part(communicator_of_k_ranks);
    part.Keep({whole_bytes});  // copies this rank's k-th of it
    auto gather = part.Gather(0, whole_bytes, label, nullptr);
    gather->Wait();  // the same whole again
    part.Drop();
    // example-end
    EXPECT_TRUE(at::equal(whole_bytes, at::ones({8}, at::kByte)));
  });
}

TEST(HeaderExamples, GatherBuffer) {
  composable::BufferPool pool;
  const size_t bytes = 16;
  // example-begin state/gather_buffer.h
  composable::GatherBuffer buffer;
  buffer.Acquire(bytes, pool, /*custom=*/nullptr);
  std::memset(buffer.data(), 0, bytes);
  buffer.Release(pool);
  // example-end
  EXPECT_EQ(buffer.data(), nullptr);
}

TEST(HeaderExamples, GradientDivide) {
  // example-begin state/gradient_divide.h
  const auto divide = composable::GradientDivide::For(
      at::kFloat, /*ranks=*/4, /*factor=*/std::nullopt, /*force_sum=*/false);
  std::cout << divide.reduction << "\n";  // 4: a mean
  // example-end
  EXPECT_EQ(divide.reduction, 4);
}

TEST(HeaderExamples, GroupCommunicators) {
  RunRanks(1, [](RankContext& rank) {
    const composable::DeviceMesh mesh = rank.group;
    composable::ReshardAfterForward reshard_after_forward = true;
    // example-begin state/group_communicators.h
    composable::GroupCommunicators communicators =
        composable::MakeGroupCommunicators(mesh, c10::kCPU,
                                           reshard_after_forward);
    communicators.shard.size();           // ranks that share the parameters
    communicators.replicate.has_value();  // hybrid sharding (HSDP)
    // example-end
    EXPECT_FALSE(communicators.replicate.has_value());
  });
}

TEST(HeaderExamples, ReductionSettings) {
  // example-begin state/reduction_settings.h
  composable::ReductionSettings settings;
  settings.divide_factor = 8;
  // example-end
  EXPECT_FALSE(settings.force_sum);
}

TEST(HeaderExamples, ReductionChain) {
  RunRanks(1, [](RankContext& rank) {
    const torch::nn::Linear module(2, 2);
    composable::FSDPParamGroup group(
        composable::CollectManagedParams({module.ptr()}, "test").owned,
        composable::Communicator(rank.group, c10::kCPU));
    composable::ReductionChain chain(group);
    std::vector<composable::ReductionChain::Input> inputs = {
        {at::ones({4}), 3, nullptr, nullptr}};
    // example-begin state/reduction_chain.h
    chain.Issue(inputs, /*alone=*/false);
    chain.Advance();  // payloads may be reused; all-reduces are on their way
    chain.Finish();
    chain.output(0);  // this rank's part of the reduced gradients
    // example-end
    EXPECT_TRUE(at::equal(chain.output(0), at::ones({4})));
  });
}

}  // namespace
}  // namespace header_examples
