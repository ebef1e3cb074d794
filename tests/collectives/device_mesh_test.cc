#include "collectives/device_mesh.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/subgroups.h"
#include "tests/support/errors.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/ranks.h"

namespace composable {
namespace {

using Names = std::vector<std::string>;
using Ranks = std::vector<int64_t>;

// The sum over `group` of each rank's number in the test.
double SumOver(const ProcessGroupPtr& group, int rank) {
  at::Tensor value = at::full({1}, rank, at::kDouble);
  Communicator(group, c10::kCPU)
      .AllReduce(value, Communicator::Reduction::kSum);
  return value.item<double>();
}

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

void ExpectError(const std::function<void()>& call, const std::string& text) {
  const std::string error = ErrorOf(call);
  EXPECT_NE(error.find(text), std::string::npos) << error;
}

TEST(DeviceMeshTest, AGridHasAGroupAlongEachDimension) {
  RunRanks(4, [](RankContext& rank) {
    const auto mesh =
        init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, rank.group);
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size(1), 2);
    EXPECT_EQ(mesh.size(-1), 2);
    EXPECT_EQ(mesh.shape(), (Ranks{2, 2}));
    EXPECT_EQ(mesh.ranks(), (Ranks{0, 1, 2, 3}));
    EXPECT_EQ(mesh.get_rank(), rank.rank);
    EXPECT_EQ(mesh.get_coordinate(), (Ranks{rank.rank / 2, rank.rank % 2}));
    EXPECT_EQ(mesh.get_local_rank("replicate"), rank.rank / 2);
    EXPECT_EQ(mesh.get_local_rank(1), rank.rank % 2);
    EXPECT_EQ(mesh.text(), "DeviceMesh((replicate=2, shard=2), 'cpu')");
    EXPECT_EQ(SumOver(mesh.get_group("shard"), rank.rank),
              rank.rank < 2 ? 0 + 1 : 2 + 3);
    EXPECT_EQ(SumOver(mesh.get_group(0), rank.rank),
              rank.rank % 2 == 0 ? 0 + 2 : 1 + 3);
    EXPECT_EQ(mesh.get_all_groups().size(), 2u);
  });
}

TEST(DeviceMeshTest, SlicesKeepGroupsAndRanks) {
  RunRanks(4, [](RankContext& rank) {
    const auto mesh =
        init_device_mesh("cpu", {1, 2, 2}, {"pp", "dp", "tp"}, rank.group);
    const auto tp = mesh["tp"];
    EXPECT_EQ(tp.ndim(), 1);
    EXPECT_EQ(tp.get_group(), mesh.get_group("tp"));
    EXPECT_EQ(tp.ranks(), rank.rank < 2 ? (Ranks{0, 1}) : (Ranks{2, 3}));
    EXPECT_EQ(tp.get_local_rank(), rank.rank % 2);
    const auto both = mesh[Names{"dp", "tp"}];
    EXPECT_EQ(both.shape(), (Ranks{2, 2}));
    EXPECT_EQ(both.ranks(), (Ranks{0, 1, 2, 3}));
    EXPECT_EQ(both["dp"], mesh["dp"]);
    EXPECT_NE(both["tp"], mesh["dp"]);
    const auto flat = both.flatten();
    EXPECT_EQ(flat.mesh_dim_names(), (Names{"dp_tp"}));
    EXPECT_EQ(flat.get_local_rank(), rank.rank);
    EXPECT_EQ(flat.get_group(), rank.group);
    EXPECT_EQ(mesh["tp"].flatten("t").get_group(), mesh.get_group("tp"));
  });
}

TEST(DeviceMeshTest, EqualRankSetsShareAGroupForAsLongAsItIsHeld) {
  RunRanks(4, [](RankContext& rank) {
    const auto store = rank.group->getStore();
    const Ranks pair = rank.rank < 2 ? Ranks{0, 1} : Ranks{2, 3};
    const auto made = [&] {
      return store->add(
          (rank.rank < 2 ? "subgroup//0,1/calls/" : "subgroup//2,3/calls/") +
              std::to_string(rank.rank % 2),
          0);
    };
    {
      const auto mesh = init_device_mesh("cpu", {2, 2}, {}, rank.group);
      const auto again =
          init_device_mesh("cpu", {2, 2}, {"a", "b"}, rank.group);
      EXPECT_EQ(mesh.get_all_groups(), again.get_all_groups());
      EXPECT_NE(mesh, again);  // names
      EXPECT_EQ(SubgroupOf(rank.group, pair), mesh.get_group(1));
      EXPECT_NE(SubgroupOf(rank.group, pair, "other"), mesh.get_group(1));
      EXPECT_EQ(made(), 1);
    }
    // Another order of ranks is another group.
    const auto reversed = SubgroupOf(rank.group, {pair[1], pair[0]});
    EXPECT_EQ(reversed->getRank(), 1 - rank.rank % 2);
    SubgroupOf(rank.group, pair);
    EXPECT_EQ(made(), 2);
    EXPECT_EQ(init_device_mesh("cpu", {4}, {}, rank.group).get_group(),
              rank.group);
    EXPECT_EQ(DeviceMesh(rank.group),
              init_device_mesh("cpu", {4}, {}, rank.group));
  });
}

TEST(DeviceMeshTest, RanksOutsideAreNoMembersAndTakeNoPart) {
  RunRanks(3, [](RankContext& rank) {
    const auto mesh = init_device_mesh("cpu", {2}, {"shard"}, rank.group);
    if (rank.rank < 2) {
      EXPECT_EQ(SumOver(mesh.get_group(), rank.rank), 1);
      return;
    }
    EXPECT_FALSE(mesh.get_coordinate().has_value());
    EXPECT_EQ(mesh.get_rank(), 2);
    ExpectError([&] { mesh.get_group(); },
                "Rank 2 is not part of DeviceMesh((shard=2), 'cpu'), which "
                "holds the ranks [0, 1]");
  });
}

TEST(DeviceMeshTest, OrderOfASubgroupsCollectivesIsChecked) {
  RunRanks(4, [](RankContext& rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {}, rank.group);
    Communicator communicator(mesh.get_group(1), c10::kCPU);
    at::Tensor value = at::full({2}, 1.0);
    // Ranks 0 and 1 go different ways; 2 and 3 do not notice.
    const auto reduction = rank.rank == 0 ? Communicator::Reduction::kMax
                                          : Communicator::Reduction::kSum;
    if (rank.rank >= 2) {
      communicator.AllReduce(value, reduction);
      EXPECT_EQ(value[0].item<float>(), 2);
      return;
    }
    EXPECT_THROW(communicator.AllReduce(value, reduction), c10::DistError);
  });
}

TEST(DeviceMeshTest, FromGroups) {
  RunRanks(4, [](RankContext& rank) {
    const auto made =
        init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, rank.group);
    const auto mesh = DeviceMesh::from_group(made.get_all_groups(), "cpu",
                                             {2, 2}, {"replicate", "shard"});
    EXPECT_EQ(mesh, made);
    EXPECT_EQ(mesh.get_rank(), rank.rank);
    EXPECT_EQ(mesh["shard"].get_group(), made.get_group("shard"));
    const auto line = DeviceMesh::from_group(rank.group, "cpu", "dp");
    EXPECT_EQ(line["dp"].get_group(), rank.group);
    const DeviceMesh implicit = rank.group;
    EXPECT_EQ(implicit.size(), 4);
    EXPECT_TRUE(implicit.mesh_dim_names().empty());
    ExpectError([&] { mesh.flatten(); }, "was made of process groups");
  });
}

TEST(DeviceMeshTest, Errors) {
  const auto hub =
      std::make_shared<InProcessHub>(1, std::chrono::milliseconds(1000));
  const auto group = MakeInProcessGroup(hub, 0);
  const auto mesh = [&](const std::string& type, Ranks shape, Names names) {
    return [=] { init_device_mesh(type, shape, names, group); };
  };
  ExpectError(mesh("cpu:0", {1}, {}), "Device type with index");
  ExpectError(mesh("cpu", {1, 1}, {"a", "a"}), "must be unique");
  ExpectError(mesh("cpu", {1, 1}, {"a"}), "should have same length");
  ExpectError(mesh("cpu", {2}, {}), "should not be bigger than default world");
  ExpectError(mesh("cpu", {}, {}), "at least one dimension");
  ExpectError(mesh("cpu", {0}, {}), "at least 1 rank each");
  const auto two = init_device_mesh("cpu", {1, 1}, {"a", "b"}, group);
  const auto unnamed = init_device_mesh("cpu", {1, 1}, {}, group);
  ExpectError([&] { two.get_group(); }, "`mesh_dim` needs to be specified");
  ExpectError([&] { two.get_local_rank(); }, "when device_mesh.ndim > 1");
  ExpectError([&] { two.get_group("c"); }, "Mesh dimension 'c' does not exist");
  ExpectError([&] { two.get_group(2); }, "Expected a dimension from -2 to 1");
  ExpectError([&] { (void)two["c"]; }, "Invalid mesh_dim_names [c]");
  ExpectError([&] { (void)two[Names{"b", "a"}]; }, "in ascending order");
  ExpectError([&] { (void)unnamed["a"]; },
              "Cannot slice a DeviceMesh without mesh_dim_names!");
  ExpectError([&] { unnamed.get_group("a"); }, "No `mesh_dim_names` found");
  ExpectError([&] { unnamed.flatten(); },
              "Cannot flatten a DeviceMesh without mesh_dim_names!");
  ExpectError([] { DeviceMesh().ndim(); }, "An empty DeviceMesh was used");
  const auto from = [&](std::vector<ProcessGroupPtr> groups, Ranks shape,
                        Names names) {
    return [=] { DeviceMesh::from_group(groups, "cpu", shape, names); };
  };
  ExpectError(from({}, {1}, {"a"}), "Expects at least one ProcessGroup");
  ExpectError(from({group}, {}, {"a"}), "Must pass mesh if passing multiple");
  ExpectError(from({group}, {1}, {}), "Must pass mesh_dim_names if passing");
  ExpectError(from({group}, {1, 1}, {"a", "b"}),
              "Expects mesh with ndim equal to number of ProcessGroups");
  ExpectError(from({group}, {2}, {"a"}), "of 2 ranks for dimension 0");
  ExpectError([&] { SubgroupOf(group, {0, 1}); }, "distinct ranks of it");
  ExpectError([&] { SubgroupOf(group, {0}, "other"); }, "has no store");
}

}  // namespace
}  // namespace composable
