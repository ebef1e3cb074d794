#include "examples/support/byte_text.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

namespace examples {
namespace {

namespace fs = std::filesystem;

bool IsText(const fs::path& path) {
  static const std::array<std::string, 4> kEndings = {".md", ".h", ".cc",
                                                      ".py"};
  return std::find(kEndings.begin(), kEndings.end(),
                   path.extension().string()) != kEndings.end();
}

bool IsSkipped(const std::string& folder) {
  return folder.rfind('.', 0) == 0 || folder.rfind("bazel-", 0) == 0;
}

// Appends the text files below `folder` to `files`, sorted by path.
void AppendTextFiles(const fs::path& folder, std::vector<fs::path>& files) {
  const auto first = static_cast<std::ptrdiff_t>(files.size());
  std::error_code error;
  fs::recursive_directory_iterator it(
      folder, fs::directory_options::skip_permission_denied, error);
  for (; !error && it != fs::recursive_directory_iterator();
       it.increment(error)) {
    std::error_code ignored;  // a file that vanishes meanwhile is no text
    if (it->is_directory(ignored)) {
      if (IsSkipped(it->path().filename().string()))
        it.disable_recursion_pending();
    } else if (it->is_regular_file(ignored) && IsText(it->path())) {
      files.push_back(it->path());
    }
  }
  TORCH_CHECK_VALUE(!error, "can't list the folder ", folder.string(), ": ",
                    error.message());
  std::sort(files.begin() + first, files.end());
}

// One step of SplitMix64: every bit of the result depends on every bit of `x`.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

at::Tensor ReadText(std::vector<std::string> paths) {
  if (paths.empty()) {
    const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
    paths.emplace_back(workspace != nullptr ? workspace : ".");
  }
  std::vector<fs::path> files;
  for (const std::string& path : paths) {
    if (std::error_code ignored; fs::is_directory(path, ignored)) {
      AppendTextFiles(path, files);
    } else {
      files.emplace_back(path);
    }
  }
  std::string bytes;
  for (const fs::path& file : files) {
    std::ifstream in(file, std::ios::binary);
    TORCH_CHECK_VALUE(in, "can't read ", file.string(), ": ",
                      std::strerror(errno));
    bytes.append(std::istreambuf_iterator<char>(in), {});
  }
  TORCH_CHECK_VALUE(!bytes.empty(), "found no text in ", paths.front(),
                    "; give files or folders to train on with --data=PATH,...");
  at::Tensor text = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(text.mutable_data_ptr(), bytes.data(), bytes.size());
  return text;
}

ByteBatches::ByteBatches(at::Tensor text, const ByteBatchesOptions& options,
                         int64_t rank, int64_t world_size)
    : text_(std::move(text)),
      options_(options),
      rank_(rank),
      world_size_(world_size) {
  TORCH_CHECK_VALUE(
      options_.batch > 0 && options_.seq > 0 && options_.steps >= 0,
      "expected batch and seq above 0 and steps not below it, but got batch ",
      options_.batch, ", seq ", options_.seq, ", steps ", options_.steps);
  TORCH_CHECK_VALUE(rank_ >= 0 && rank_ < world_size_,
                    "expected a rank below the world size ", world_size_,
                    ", but got ", rank_);
  TORCH_CHECK_VALUE(text_.numel() > options_.seq,
                    "expected more than seq = ", options_.seq,
                    " bytes of text, but got ", text_.numel(),
                    "; give more with --data=PATH,...");
}

at::Tensor ByteBatches::Batch(int64_t step) const {
  const int64_t length = options_.seq + 1;
  const uint64_t starts = static_cast<uint64_t>(text_.numel() - length + 1);
  at::Tensor batch = at::empty({options_.batch, length}, at::kLong);
  for (int64_t i = 0; i < options_.batch; ++i) {
    const int64_t row = rank_ * options_.batch + i;  // of the global batch
    const uint64_t start = Mix(Mix(Mix(options_.seed) + step) + row) % starts;
    batch.select(0, i).copy_(
        text_.narrow(0, static_cast<int64_t>(start), length));
  }
  return batch;
}

ByteBatches ByteBatches::Global() const {
  ByteBatchesOptions all = options_;
  all.batch *= world_size_;
  return ByteBatches(text_, all, /*rank=*/0, /*world_size=*/1);
}

}  // namespace examples
