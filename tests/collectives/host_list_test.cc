#include "collectives/host_list.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace composable {
namespace {

TEST(HostListTest, FirstHostAndNumber) {
  const struct {
    const char* text;
    const char* first;
    int64_t count;
  } kCases[] = {
      {"node1", "node1", 1},
      {"node1,node2", "node1", 2},
      {"node[003-005,7],gpu1", "node003", 5},
      {"gpu1,node[003-005,7]", "gpu1", 5},
      {"node[7,003-005]", "node7", 4},
      {"n[9-10]", "n9", 2},
      {"n[0001-0100]", "n0001", 100},
      {"n[5]", "n5", 1},
      {"n[5-5]", "n5", 1},
      {"[1-3]", "1", 3},
      {"n[1-2]-ib", "n1-ib", 2},
      {"n[1-2].cluster.example", "n1.cluster.example", 2},
      {"rack[0-1]n[00-15],login", "rack0n00", 33},
      {"a-b-1,c[1-2],d", "a-b-1", 4},
      {"10.0.0.[1-4]", "10.0.0.1", 4},
  };
  for (const auto& c : kCases) {
    const auto hosts = ParseHostList(c.text);
    ASSERT_TRUE(hosts.has_value()) << c.text;
    EXPECT_EQ(hosts->first, c.first) << c.text;
    EXPECT_EQ(hosts->count, c.count) << c.text;
  }
}

TEST(HostListTest, WhatIsNoListIsRefused) {
  for (const char* text : {"",
                           ",",
                           "a,",
                           ",a",
                           "a,,b",
                           "n[",
                           "n]",
                           "n[1",
                           "n1]",
                           "n[1-2",
                           "n[]",
                           "n[1-]",
                           "n[-2]",
                           "n[1,]",
                           "n[,1]",
                           "n[2-1]",
                           "n[a-b]",
                           "n[1-2-3]",
                           "n[1x]",
                           "n[[1-2]]",
                           "n[1[2]3]",
                           "n[1-2]]",
                           "n[ 1-2]",
                           "n[1-99999999999]",
                           "n[1-99999999999999999999]",
                           "n[0-9999][0-9999][0-9999]"}) {
    EXPECT_FALSE(ParseHostList(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace composable
