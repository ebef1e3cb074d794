#include "hooks/missing_values.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"

namespace composable {

void CheckHasValues(absl::Span<FSDPState* const> states) {
  const auto lacks_values = [](const FSDPState* state) {
    return state != nullptr && state->group() != nullptr &&
           !state->group()->has_all_values();
  };
  if (std::none_of(states.begin(), states.end(), lacks_values)) return;
  std::vector<std::string> missing;
  for (const FSDPState* state : states) {
    if (!lacks_values(state)) continue;
    for (const auto& param : state->group()->params()) {
      if (!param.has_values) missing.push_back("'" + param.fqn + "'");
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "FSDP parameters should be materialized from meta device before they are "
      "used, but these have no values yet: ",
      absl::StrJoin(missing, ", "),
      ". Call composable::materialize(module, init_fn), or load whole values "
      "with composable::load_full_state_dict.");
}

}  // namespace composable
