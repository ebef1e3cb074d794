#include "collectives/device_mesh.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "collectives/subgroups.h"

namespace composable {

struct DeviceMesh::Impl {
  std::string device_type;
  std::vector<int64_t> shape;
  std::vector<std::string> names;  // empty, or one per dimension
  std::vector<int64_t> ranks;      // row-major
  int64_t rank = 0;                // this one
  std::optional<std::vector<int64_t>> coordinate;
  std::vector<ProcessGroupPtr> groups;  // per dimension; none for a non-member
  ProcessGroupPtr parent;               // null if made of groups
};

namespace {

int64_t Product(c10::IntArrayRef shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

void CheckArguments(const std::string& device_type, c10::IntArrayRef shape,
                    const std::vector<std::string>& names) {
  TORCH_CHECK_VALUE(device_type == "cpu" || device_type == "cuda",
                    "Device type with index is not supported: expected 'cpu' "
                    "or 'cuda', got '",
                    device_type, "'.");
  TORCH_CHECK_VALUE(
      !shape.empty() && std::all_of(shape.begin(), shape.end(),
                                    [](int64_t size) { return size >= 1; }),
      "A DeviceMesh needs at least one dimension, of at least 1 rank each, got "
      "the shape ",
      shape, ".");
  if (names.empty()) return;
  TORCH_CHECK_VALUE(
      std::set<std::string>(names.begin(), names.end()).size() == names.size(),
      "Each mesh_dim_name must be unique, got [", absl::StrJoin(names, ", "),
      "].");
  TORCH_CHECK_VALUE(names.size() == shape.size(),
                    "mesh_shape and mesh_dim_names should have same length, "
                    "got len(mesh_dim_names): ",
                    names.size(), ", len(mesh_shape): ", shape.size(), ".");
}

std::vector<int64_t> CoordinateOf(int64_t index, c10::IntArrayRef shape) {
  std::vector<int64_t> coordinate(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    coordinate[d] = index % shape[d];
    index /= shape[d];
  }
  return coordinate;
}

int64_t IndexOf(c10::IntArrayRef coordinate, c10::IntArrayRef shape) {
  int64_t index = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    index = index * shape[d] + coordinate[d];
  }
  return index;
}

// The ranks of a grid whose coordinates are free along `dims` and fixed to
// `coordinate` otherwise.
std::vector<int64_t> RanksAlong(const std::vector<int64_t>& ranks,
                                c10::IntArrayRef shape,
                                const std::vector<int64_t>& coordinate,
                                const std::vector<size_t>& dims) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto here = CoordinateOf(static_cast<int64_t>(i), shape);
    bool on_it = true;
    for (size_t d = 0; d < shape.size(); ++d) {
      const bool free = std::find(dims.begin(), dims.end(), d) != dims.end();
      on_it &= free || here[d] == coordinate[d];
    }
    if (on_it) result.push_back(ranks[i]);
  }
  return result;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<const Impl> impl)
    : impl_(std::move(impl)) {}

DeviceMesh::DeviceMesh(const ProcessGroupPtr& group, std::string device_type) {
  if (group == nullptr) return;
  CheckArguments(device_type, {group->getSize()}, {});
  auto impl = std::make_shared<Impl>();
  impl->device_type = std::move(device_type);
  impl->shape = {group->getSize()};
  impl->ranks.resize(group->getSize());
  std::iota(impl->ranks.begin(), impl->ranks.end(), 0);
  impl->rank = group->getRank();
  impl->coordinate = {{impl->rank}};
  impl->groups = {group};
  impl->parent = group;
  impl_ = std::move(impl);
}

DeviceMesh DeviceMesh::from_group(const ProcessGroupPtr& group,
                                  const std::string& device_type,
                                  const std::string& mesh_dim_name) {
  TORCH_CHECK_VALUE(group != nullptr,
                    "from_group: expected a process group, got none.");
  auto impl = std::make_shared<Impl>(DeviceMesh(group, device_type).impl());
  if (!mesh_dim_name.empty()) impl->names = {mesh_dim_name};
  return DeviceMesh(std::move(impl));
}

DeviceMesh DeviceMesh::from_group(
    const std::vector<ProcessGroupPtr>& groups, const std::string& device_type,
    c10::IntArrayRef shape, const std::vector<std::string>& mesh_dim_names) {
  TORCH_CHECK_VALUE(!groups.empty(),
                    "Expects at least one ProcessGroup to be passed");
  TORCH_CHECK_VALUE(!shape.empty(),
                    "Must pass mesh if passing multiple ProcessGroups: its "
                    "shape is empty.");
  TORCH_CHECK_VALUE(
      !mesh_dim_names.empty(),
      "Must pass mesh_dim_names if passing multiple ProcessGroups");
  TORCH_CHECK_VALUE(
      shape.size() == groups.size(),
      "Expects mesh with ndim equal to number of ProcessGroups but got mesh ",
      shape, " and ", groups.size(), " ProcessGroups");
  CheckArguments(device_type, shape, mesh_dim_names);
  auto impl = std::make_shared<Impl>();
  impl->coordinate.emplace();
  for (size_t d = 0; d < groups.size(); ++d) {
    TORCH_CHECK_VALUE(groups[d] != nullptr && groups[d]->getSize() == shape[d],
                      "from_group: expected a process group of ", shape[d],
                      " ranks for dimension ", d, ", got ",
                      groups[d] == nullptr
                          ? "none"
                          : absl::StrCat("one of ", groups[d]->getSize()),
                      ".");
    impl->coordinate->push_back(groups[d]->getRank());
  }
  impl->device_type = device_type;
  impl->shape = shape.vec();
  impl->names = mesh_dim_names;
  impl->ranks.resize(Product(shape));
  std::iota(impl->ranks.begin(), impl->ranks.end(), 0);
  impl->rank = IndexOf(*impl->coordinate, shape);
  impl->groups = groups;
  return DeviceMesh(std::move(impl));
}

DeviceMesh init_device_mesh(const std::string& device_type,
                            c10::IntArrayRef shape,
                            const std::vector<std::string>& mesh_dim_names,
                            const ProcessGroupPtr& group) {
  CheckArguments(device_type, shape, mesh_dim_names);
  auto impl = std::make_shared<DeviceMesh::Impl>();
  impl->parent = group == nullptr ? default_process_group() : group;
  const int64_t world_size = impl->parent->getSize();
  const int64_t numel = Product(shape);
  TORCH_CHECK_VALUE(numel <= world_size,
                    "Mesh should not be bigger than default world size ",
                    world_size, ", but found ", numel, " ranks!");
  impl->device_type = device_type;
  impl->shape = shape.vec();
  impl->names = mesh_dim_names;
  impl->ranks.resize(numel);
  std::iota(impl->ranks.begin(), impl->ranks.end(), 0);
  impl->rank = impl->parent->getRank();
  if (impl->rank < numel) {
    impl->coordinate = CoordinateOf(impl->rank, shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      impl->groups.push_back(
          SubgroupOf(impl->parent,
                     RanksAlong(impl->ranks, shape, *impl->coordinate, {d})));
    }
  }
  return DeviceMesh(std::move(impl));
}

const DeviceMesh::Impl& DeviceMesh::impl() const {
  TORCH_CHECK_VALUE(impl_ != nullptr,
                    "An empty DeviceMesh was used. Make one with "
                    "init_device_mesh or from_group.");
  return *impl_;
}

int64_t DeviceMesh::ndim() const {
  return static_cast<int64_t>(impl().shape.size());
}
const std::vector<int64_t>& DeviceMesh::shape() const { return impl().shape; }
int64_t DeviceMesh::size() const { return Product(impl().shape); }
int64_t DeviceMesh::size(int64_t dim) const { return impl().shape[DimOf(dim)]; }
const std::vector<std::string>& DeviceMesh::mesh_dim_names() const {
  return impl().names;
}
const std::string& DeviceMesh::device_type() const {
  return impl().device_type;
}
const std::vector<int64_t>& DeviceMesh::ranks() const { return impl().ranks; }
int64_t DeviceMesh::get_rank() const { return impl().rank; }

int64_t DeviceMesh::DimOf(int64_t dim) const {
  const int64_t n = ndim();
  TORCH_CHECK_VALUE(-n <= dim && dim < n, "Expected a dimension from ", -n,
                    " to ", n - 1, " of ", text(), ", got ", dim, ".");
  return dim < 0 ? dim + n : dim;
}

int64_t DeviceMesh::DimOf(const std::string& name) const {
  const auto& names = impl().names;
  TORCH_CHECK_VALUE(!names.empty(), "No `mesh_dim_names` found: ", text(),
                    " has none.");
  const auto it = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(it != names.end(), "Mesh dimension '", name,
                    "' does not exist. Available mesh dimensions are: "
                    "mesh_dim_names=[",
                    absl::StrJoin(names, ", "), "]");
  return it - names.begin();
}

int64_t DeviceMesh::OnlyDim() const {
  TORCH_CHECK_VALUE(ndim() == 1, "Found the DeviceMesh have ", ndim(),
                    " dimensions. Optional kwarg `mesh_dim` needs to be "
                    "specified when device_mesh.ndim > 1. For the list of all "
                    "the ProcessGroups in the DeviceMesh use "
                    "`get_all_groups()` instead.");
  return 0;
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const {
  return (*this)[std::vector<std::string>{name}];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  TORCH_CHECK_VALUE(!impl().names.empty(),
                    "Cannot slice a DeviceMesh without mesh_dim_names!");
  TORCH_CHECK_VALUE(!names.empty(), "Cannot slice ", text(), " by no names.");
  std::vector<size_t> dims;
  for (const auto& name : names) {
    const auto known =
        std::find(impl().names.begin(), impl().names.end(), name);
    TORCH_CHECK_VALUE(known != impl().names.end(), "Invalid mesh_dim_names [",
                      absl::StrJoin(names, ", "),
                      "] specified. Valid mesh_dim_names are [",
                      absl::StrJoin(impl().names, ", "), "].");
    const auto dim = static_cast<size_t>(known - impl().names.begin());
    TORCH_CHECK_VALUE(dims.empty() || dims.back() < dim,
                      "Invalid mesh_dim_names [", absl::StrJoin(names, ", "),
                      "] specified. Mesh dim indices should be in ascending "
                      "order.");
    dims.push_back(dim);
  }
  if (dims.size() == impl().shape.size()) return *this;
  auto slice = std::make_shared<Impl>();
  slice->device_type = impl().device_type;
  slice->names = names;
  slice->rank = impl().rank;
  slice->parent = impl().parent;
  const auto through =
      impl().coordinate.value_or(std::vector<int64_t>(impl().shape.size(), 0));
  slice->ranks = RanksAlong(impl().ranks, impl().shape, through, dims);
  for (const size_t dim : dims) slice->shape.push_back(impl().shape[dim]);
  if (impl().coordinate) {
    slice->coordinate.emplace();
    for (const size_t dim : dims) {
      slice->coordinate->push_back(through[dim]);
      slice->groups.push_back(impl().groups[dim]);
    }
  }
  return DeviceMesh(std::move(slice));
}

DeviceMesh DeviceMesh::flatten(const std::string& mesh_dim_name) const {
  TORCH_CHECK_VALUE(!impl().names.empty(),
                    "Cannot flatten a DeviceMesh without mesh_dim_names!");
  TORCH_CHECK_VALUE(impl().parent != nullptr || ndim() == 1,
                    "flatten: ", text(),
                    " was made of process groups, which tell no group of all "
                    "of its ranks. Make it with init_device_mesh.");
  auto flat = std::make_shared<Impl>(impl());
  flat->shape = {size()};
  flat->names = {mesh_dim_name.empty() ? absl::StrJoin(impl().names, "_")
                                       : mesh_dim_name};
  if (impl().coordinate && ndim() > 1) {
    flat->coordinate = {{IndexOf(*impl().coordinate, impl().shape)}};
    flat->groups = {SubgroupOf(impl().parent, impl().ranks)};
  }
  return DeviceMesh(std::move(flat));
}

ProcessGroupPtr DeviceMesh::get_group() const { return get_group(OnlyDim()); }
ProcessGroupPtr DeviceMesh::get_group(const std::string& name) const {
  return get_group(DimOf(name));
}
ProcessGroupPtr DeviceMesh::get_group(int64_t dim) const {
  const int64_t index = DimOf(dim);
  TORCH_CHECK_VALUE(impl().coordinate, "Rank ", impl().rank, " is not part of ",
                    text(), ", which holds the ranks [",
                    absl::StrJoin(impl().ranks, ", "),
                    "]: it has no process group of it.");
  return impl().groups[index];
}

std::vector<ProcessGroupPtr> DeviceMesh::get_all_groups() const {
  std::vector<ProcessGroupPtr> groups;
  for (int64_t d = 0; d < ndim(); ++d) groups.push_back(get_group(d));
  return groups;
}

int64_t DeviceMesh::get_local_rank() const { return get_local_rank(OnlyDim()); }
int64_t DeviceMesh::get_local_rank(const std::string& name) const {
  return get_local_rank(DimOf(name));
}
int64_t DeviceMesh::get_local_rank(int64_t dim) const {
  return get_group(dim)->getRank();
}

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const {
  return impl().coordinate;
}

std::string DeviceMesh::text() const {
  if (!defined()) return "DeviceMesh()";
  std::vector<std::string> dims;
  for (size_t d = 0; d < impl_->shape.size(); ++d) {
    dims.push_back(impl_->names.empty()
                       ? absl::StrCat(impl_->shape[d])
                       : absl::StrCat(impl_->names[d], "=", impl_->shape[d]));
  }
  return absl::StrCat("DeviceMesh((", absl::StrJoin(dims, ", "), "), '",
                      impl_->device_type, "')");
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.impl_ == b.impl_) return true;
  if (!a.defined() || !b.defined()) return false;
  const auto& x = *a.impl_;
  const auto& y = *b.impl_;
  return x.device_type == y.device_type && x.shape == y.shape &&
         x.names == y.names && x.ranks == y.ranks && x.groups == y.groups;
}

}  // namespace composable
