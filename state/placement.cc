#include "state/placement.h"

#include <c10/util/Exception.h>

namespace composable {

std::string ToString(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kRagged:
      return "RaggedShard()";
    case Placement::Kind::kShard:
      return "Shard(" + std::to_string(placement.dim) + ")";
    case Placement::Kind::kOwned:
      return "Owned(" +
             (placement.owner ? std::to_string(*placement.owner) : "") + ")";
    case Placement::Kind::kReplicate:
      return "Replicate()";
  }
  return "?";
}

Placement ResolvePlacement(const std::optional<Placement>& placement,
                           const std::string& fqn, const at::Tensor& parameter,
                           int world_size) {
  Placement resolved = placement.value_or(RaggedShard());
  const int64_t ndim = parameter.dim();
  const std::string who = "fully_shard: shard_placement_fn gave " +
                          ToString(resolved) + " for parameter '" + fqn + "'";
  switch (resolved.kind) {
    case Placement::Kind::kRagged:
      if (ndim == 0) resolved = Replicate();
      break;
    case Placement::Kind::kShard:
      if (resolved.dim < 0) resolved.dim += ndim;
      TORCH_CHECK_VALUE(0 <= resolved.dim && resolved.dim < ndim, who,
                        " of sizes ", parameter.sizes(), ": Shard dim ",
                        placement->dim, " is invalid for ", ndim,
                        "D tensor. Give a dimension from ", -ndim, " to ",
                        ndim - 1, ", or std::nullopt for the default.");
      break;
    case Placement::Kind::kOwned:
      TORCH_CHECK_VALUE(ndim > 0, who,
                        ", which is a scalar and can't have shape (0, ...) on "
                        "the other ranks. Give std::nullopt: scalars are "
                        "replicated.");
      TORCH_CHECK_VALUE(!resolved.owner || (0 <= *resolved.owner &&
                                            *resolved.owner < world_size),
                        who, ": expected a rank from 0 to ", world_size - 1,
                        ", or none to have one chosen.");
      break;
    case Placement::Kind::kReplicate:
      break;
  }
  return resolved;
}

}  // namespace composable
