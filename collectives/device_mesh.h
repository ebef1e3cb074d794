// Ranks arranged in a grid, with a process group along each dimension: what
// torch.distributed's DeviceMesh is to Python.
//
//   // Two replicas, each sharded over the ranks that are left:
//   const int64_t shards = composable::world_size() / 2;
//   auto mesh = composable::init_device_mesh("cpu", {2, shards},
//                                            {"replicate", "shard"});
//   mesh["shard"].get_group();            // this rank's row of the grid
//   mesh.get_local_rank("replicate");     // 0 or 1
//   fully_shard(model, composable::FullyShardOptions().mesh(mesh));
//
// Ranks are numbered in row-major order: those of one row of the last dimension
// follow each other. A mesh is a handle, cheap to copy, that holds its groups.
// Equal lists of ranks share one group: see Note [One group per rank set].
//
// Thread-compatible. Errors are c10::ValueError where upstream has RuntimeError,
// KeyError and ValueError.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/process_group.h"

namespace composable {

class DeviceMesh {
 public:
  // No mesh: fully_shard takes all ranks of the default process group.
  DeviceMesh() = default;
  // One dimension without a name, over all ranks of `group`. Implicit, so that a
  // process group may be given where a mesh is expected. Null: no mesh.
  // NOLINTNEXTLINE(google-explicit-constructor)
  DeviceMesh(const ProcessGroupPtr& group, std::string device_type = "cpu");

  static DeviceMesh from_group(const ProcessGroupPtr& group,
                               const std::string& device_type = "cpu",
                               const std::string& mesh_dim_name = "");
  // groups[i] holds the ranks along dimension i, this one among them.
  static DeviceMesh from_group(const std::vector<ProcessGroupPtr>& groups,
                               const std::string& device_type,
                               c10::IntArrayRef shape,
                               const std::vector<std::string>& mesh_dim_names);

  // False for a default-constructed one, on which the rest throws.
  bool defined() const { return impl_ != nullptr; }

  int64_t ndim() const;
  const std::vector<int64_t>& shape() const;
  // Of all dimensions, or of one; a negative one counts from the end.
  int64_t size() const;
  int64_t size(int64_t dim) const;
  // Empty if they have none.
  const std::vector<std::string>& mesh_dim_names() const;
  const std::string& device_type() const;
  // The ranks, in row-major order, as numbers of the group that the mesh was
  // made of.
  const std::vector<int64_t>& ranks() const;

  // The mesh of some dimensions, in the order of this one, through this rank.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;

  // All dimensions as one, in row-major order, called `mesh_dim_name`; by
  // default their names joined by "_". (collective over the ranks of the mesh)
  DeviceMesh flatten(const std::string& mesh_dim_name = "") const;

  // The group along one dimension; which may be left out where there is one.
  ProcessGroupPtr get_group() const;
  ProcessGroupPtr get_group(int64_t dim) const;
  ProcessGroupPtr get_group(const std::string& name) const;
  std::vector<ProcessGroupPtr> get_all_groups() const;

  // This rank, in the group that the mesh was made of.
  int64_t get_rank() const;
  // This rank's place along a dimension.
  int64_t get_local_rank() const;
  int64_t get_local_rank(int64_t dim) const;
  int64_t get_local_rank(const std::string& name) const;
  // Nothing on a rank that is not part of the mesh.
  std::optional<std::vector<int64_t>> get_coordinate() const;

  // "DeviceMesh((replicate=2, shard=4), 'cpu')"
  std::string text() const;

  // Equal ranks, shape, names, device type and groups.
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);
  friend bool operator!=(const DeviceMesh& a, const DeviceMesh& b) {
    return !(a == b);
  }

 private:
  friend DeviceMesh init_device_mesh(
      const std::string& device_type, c10::IntArrayRef shape,
      const std::vector<std::string>& mesh_dim_names,
      const ProcessGroupPtr& group);
  struct Impl;
  explicit DeviceMesh(std::shared_ptr<const Impl> impl);
  const Impl& impl() const;
  int64_t DimOf(int64_t dim) const;
  int64_t DimOf(const std::string& name) const;
  int64_t OnlyDim() const;

  std::shared_ptr<const Impl> impl_;
};

// (collective over all ranks of the mesh) The first ranks of `group`, which is
// the default process group if null, as a grid. device_type is "cpu" or "cuda".
// Ranks that are not part of it need not call.
DeviceMesh init_device_mesh(const std::string& device_type,
                            c10::IntArrayRef shape,
                            const std::vector<std::string>& mesh_dim_names = {},
                            const ProcessGroupPtr& group = nullptr);

}  // namespace composable
