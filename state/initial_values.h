// Makes the values that a module has when it is sharded equal on all ranks, or
// makes sure that they are.
//
//   const std::vector<at::Tensor> values = composable::SyncInitialValues(
//       communicator, group, buffers, "Linear");
//   // ... nothing can fail any more ...
//   composable::SetBuffers(buffers, values);
//
// Between the making of a group and its Attach, while its members are still
// whole. All collectives here are of rank 0's values, found by one flag per
// parameter and buffer: whether rank 0 has a value, or has it on the meta device.
//
// Only dense buffers on the CPU or the meta device are looked at.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "state/fsdp_param_group.h"

namespace composable {

struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

// (collective over `communicator`) Scatters the parameters of rank 0 into the
// shards of `group`, which may be null, and returns rank 0's buffers, undefined
// where it has none. `module` names the call in errors.
std::vector<at::Tensor> SyncInitialValues(
    Communicator& communicator, FSDPParamGroup* group,
    const std::vector<NamedBuffer>& buffers, const std::string& module);

// (collective over `communicator`) Gives the flat shards of rank 0 of it to all
// others: for ranks that hold the same rows.
void BroadcastShards(Communicator& communicator, FSDPParamGroup& group,
                     const std::string& module);

// (collective over both; `replicas` may be null) Throws c10::ValueError on all
// ranks of the mesh, naming the parameters and buffers and the ranks, counted in
// the mesh, where values differ from rank 0's.
void CheckInitialValues(Communicator& shards, Communicator* replicas,
                        const FSDPParamGroup* group,
                        const std::vector<NamedBuffer>& buffers,
                        const std::string& module);

// Copies `values`, where they are defined, into the buffers; those on the meta
// device get memory first.
void SetBuffers(const std::vector<NamedBuffer>& buffers,
                const std::vector<at::Tensor>& values);

// Undoes SetBuffers of the same arguments: to be made before it. Holds copies of
// the buffers.
std::function<void()> BuffersBack(const std::vector<NamedBuffer>& buffers,
                                  const std::vector<at::Tensor>& values);

}  // namespace composable
