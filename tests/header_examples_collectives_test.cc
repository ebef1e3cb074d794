// The examples in the headers of collectives/, and of the tests' store; see
// header_examples_test.cc.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "collectives/agreement.h"
#include "collectives/backends.h"
#include "collectives/buffer_pool.h"
#include "collectives/collective.h"
#include "collectives/collective_label.h"
#include "collectives/communicator.h"
#include "collectives/divergence.h"
#include "collectives/environment.h"
#include "collectives/hash.h"
#include "collectives/host_list.h"
#include "collectives/launch_variables.h"
#include "collectives/order_predictor.h"
#include "collectives/process_group.h"
#include "state/shard_layout.h"
#include "tests/support/counting_store.h"
#include "tests/support/ranks.h"

namespace header_examples {
namespace {

composable::ShardLayout SomeLayout() {
  return composable::ShardLayout::Plan({{.numel = 4, .rows = 4}},
                                       {.world_size = 2, .itemsize = 4});
}

[[maybe_unused]] void Agreement(
    const std::string& prefix, const c10::intrusive_ptr<c10d::Store>& any_store,
    const std::chrono::milliseconds timeout,
    const composable::ProcessGroupPtr& group,
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const composable::Collective& gather, const at::Tensor& whole,
    const at::Tensor& shard) {
  // example-begin collectives/agreement.h
  auto store = c10::make_intrusive<composable::AgreedStore>(
      prefix, any_store, timeout);  // of the process group `group`
  const auto agreement = composable::OrderAgreement::Of(*group, *backend);
  agreement->Check(*backend, gather);  // throws on every rank, or on none
  auto work = composable::Post(*backend, gather, whole, shard);
  // example-end
}

TEST(HeaderExamples, Backends) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int rank = 0;
  const int world_size = 1;
  const std::chrono::seconds timeout(10);
  // example-begin collectives/backends.h
  c10::intrusive_ptr<c10d::Backend> gloo =
      composable::MakeGlooBackend(store, rank, world_size, timeout);
  // example-end
  EXPECT_EQ(gloo->getSize(), 1);
}

TEST(HeaderExamples, BufferPool) {
  const size_t bytes = 5000;
  // example-begin collectives/buffer_pool.h
  composable::BufferPool pool;
  composable::BufferPool::Buffer* buffer = pool.Acquire(bytes);
  std::memset(buffer->data, 0, bytes);
  pool.Release(buffer);  // kept for the next Acquire
  pool.Purge();          // between iterations: give the memory back
  // example-end
  EXPECT_EQ(pool.committed_bytes(), 0u);
}

[[maybe_unused]] void ClusterEnvironment() {
  // example-begin collectives/cluster_environment.h
  composable::LaunchEnvironment env = composable::ReadLaunchEnvironment();
  // example-end
}

TEST(HeaderExamples, Collective) {
  const auto backend = composable::MakeGlooBackend(
      c10::make_intrusive<c10d::HashStore>(), 0, 1, std::chrono::seconds(10));
  const uint64_t plan = SomeLayout().fingerprint();
  const at::Tensor whole = at::zeros({4});
  const at::Tensor shard = at::ones({4});
  // example-begin collectives/collective.h
  const auto label = composable::MakeCollectiveLabel("blocks.0", plan, 2);
  const composable::Collective gather(composable::CollectiveKind::kAllGather,
                                      shard, label);
  gather.text();  // all-gather of 'blocks.0'
  auto work = composable::Post(*backend, gather, whole, shard);
  // example-end
  work->wait();
  EXPECT_EQ(gather.text(), "all-gather of 'blocks.0'");
}

TEST(HeaderExamples, CollectiveLabel) {
  composable::RunRanks(2, [](composable::RankContext& rank) {
    composable::Communicator communicator(rank.group, c10::kCPU);
    const auto layout = SomeLayout();
    const at::Tensor whole = at::zeros({4});
    const at::Tensor shard = at::ones({2});
    // example-begin collectives/collective_label.h
    const composable::CollectiveLabelPtr label =
        composable::MakeCollectiveLabel("blocks.0", layout.fingerprint(),
                                        communicator.NextSerial());
    communicator.AllGather(whole, shard, label);
    // example-end
    EXPECT_EQ(label->serial, 1);
  });
}

TEST(HeaderExamples, Communicator) {
  composable::RunRanks(2, [](composable::RankContext& rank) {
    const auto& group = rank.group;
    at::Tensor whole = at::zeros({4});
    at::Tensor shard = at::full({2}, static_cast<float>(rank.rank));
    // example-begin collectives/communicator.h
    composable::Communicator comm(group, c10::kCPU);
    auto pending = comm.AllGather(whole, shard);  // returns at once
    // ... other work ...
    pending->Wait();  // `whole` may be read now
    // example-end
    EXPECT_TRUE(at::equal(whole, at::tensor({0.f, 0.f, 1.f, 1.f})));
  });
}

TEST(HeaderExamples, Divergence) {
  composable::RankAnswer answer;
  answer.issued = 16;
  answer.intent.text = "all-gather of 'blocks.1'";
  const std::string bytes = answer.Encode();
  // example-begin collectives/divergence.h
  std::vector<composable::RankAnswer> answers;  // one per rank
  answers.push_back(composable::RankAnswer::Decode(bytes));
  composable::DivergenceText(answers);
  // Ranks are about to run different collectives over one process group
  // (their 17th): rank 0: all-gather of 'blocks.1'; ranks 1-3: ...
  // example-end
  EXPECT_NE(composable::DivergenceText(answers).find(
                "(their 17th): rank 0: all-gather of 'blocks.1'"),
            std::string::npos);
}

TEST(HeaderExamples, Hash) {
  const auto layout = SomeLayout();
  // example-begin collectives/hash.h
  uint64_t all = composable::HashString("blocks.0");
  all = composable::HashMix(all, layout.fingerprint());
  // example-end
  EXPECT_NE(all, composable::HashString("blocks.0"));
}

TEST(HeaderExamples, HostList) {
  // example-begin collectives/host_list.h
  const auto hosts = composable::ParseHostList("node[003-005,7],gpu1");
  // hosts->first is "node003", hosts->count is 5
  // example-end
  ASSERT_TRUE(hosts.has_value());
  EXPECT_EQ(hosts->first, "node003");
  EXPECT_EQ(hosts->count, 5);
}

[[maybe_unused]] void LaunchEnvironment() {
  // example-begin collectives/environment.h
  composable::LaunchEnvironment env = composable::ReadLaunchEnvironment();
  std::cout << "rank " << env.rank << " of " << env.world_size << "\n";
  // example-end
}

TEST(HeaderExamples, LaunchVariables) {
  setenv("SLURM_STEP_NUM_TASKS", "4", /*replace=*/1);
  // example-begin collectives/launch_variables.h
  composable::LaunchVariables variables(std::getenv, "srun sets it.");
  const int size = variables.Number("SLURM_STEP_NUM_TASKS", 1, 1024);
  // example-end
  EXPECT_EQ(size, 4);
  unsetenv("SLURM_STEP_NUM_TASKS");
}

TEST(HeaderExamples, OrderPredictor) {
  const composable::Collective gather(composable::CollectiveKind::kAllGather,
                                      at::zeros({4}), nullptr);
  const composable::Collective reduction(
      composable::CollectiveKind::kReduceScatter, at::zeros({4}), nullptr);
  // example-begin collectives/order_predictor.h
  composable::OrderPredictor predictor;
  predictor.Advance(gather);
  predictor.Advance(reduction);
  const composable::Collective* next = predictor.Predict();  // the gather
  // example-end
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(next->fingerprint, gather.fingerprint);
}

[[maybe_unused]] void ProcessGroup() {
  // example-begin collectives/process_group.h
  auto group = composable::init_process_group();  // torchrun, mpirun, srun
  // ... train ...
  composable::destroy_process_group();  // optional
  // example-end
}

TEST(HeaderExamples, CountingStore) {
  // example-begin tests/support/counting_store.h
  auto shared = c10::make_intrusive<c10d::HashStore>();
  auto store = c10::make_intrusive<composable::CountingStore>(shared);
  store->add("key", 1);
  store->calls();  // all but looks
  store->Fail("the host is gone");
  // example-end
  EXPECT_EQ(store->calls(), 1);
}

}  // namespace
}  // namespace header_examples
