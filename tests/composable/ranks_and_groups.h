// Tests of values for 1 to 3 ranks, in one group and in a group per module.
//
//   class GradScalerTest : public RanksAndGroupsTest {};
//   INSTANTIATE_TEST_SUITE_P(All, GradScalerTest, RanksAndGroups(),
//                            NameOfRanksAndGroups);
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/composable/semantics.h"

namespace composable {

class RanksAndGroupsTest
    : public testing::TestWithParam<std::tuple<int, Groups>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  Groups groups() const { return std::get<1>(GetParam()); }
};

inline auto RanksAndGroups() {
  return testing::Combine(testing::Values(1, 2, 3),
                          testing::Values(Groups::kOne, Groups::kPerModule));
}

inline std::string NameOfRanksAndGroups(
    const testing::TestParamInfo<std::tuple<int, Groups>>& info) {
  return Name(std::get<1>(info.param)) +
         std::to_string(std::get<0>(info.param));
}

}  // namespace composable
