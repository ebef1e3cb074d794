// Abseil, nlohmann-json and Gloo's headers are found; those of Gloo agree with
// c10d's use of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(int, answer, 42, "read back by the test");

namespace {

using ::testing::ElementsAre;

TEST(SystemLibrariesTest, Abseil) {
  absl::flat_hash_map<std::string, int> map = {{"a", 1}};
  absl::InlinedVector<int, 4> list = {map["a"], absl::GetFlag(FLAGS_answer)};
  absl::StatusOr<int> error = absl::NotFoundError(absl::StrCat("no ", 1));
  absl::Mutex mutex;
  absl::MutexLock lock(&mutex);
  EXPECT_THAT(absl::MakeConstSpan(list), ElementsAre(1, 42));
  EXPECT_EQ(absl::StrFormat("%s", error.status().ToString()),
            "NOT_FOUND: no 1");
  EXPECT_GT(absl::Now(), absl::UnixEpoch());
}

TEST(SystemLibrariesTest, Json) {
  EXPECT_EQ(nlohmann::json::parse(R"({"a":[1,2]})")["a"][1], 2);
}

TEST(SystemLibrariesTest, Gloo) {
  const auto options = c10d::ProcessGroupGloo::Options::create();
  EXPECT_EQ(options->backend, "gloo");
}

}  // namespace
