// Text as bytes, and deterministic batches of it.
//
// ReadText() turns files into one row of bytes. ByteBatches cuts training
// sequences out of it. Which bytes a sequence holds depends on (seed, step, row
// of the global batch) alone, so W ranks that take B rows each see, together,
// exactly what one process sees that takes W * B rows. Comparing a sharded run
// with an unsharded one needs no more than that.
//
//   at::Tensor text = ReadText({"book.txt"});
//   ByteBatches batches(text, {.steps = 20, .batch = 4, .seq = 128}, rank,
//                       world_size);
//   for (const at::Tensor& batch : batches) {
//     std::cout << batch.sizes() << "\n";   // [4, 129], int64
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace examples {

// Reads `paths` and returns their bytes one after the other: uint8, one
// dimension. A path that is a folder stands for the .md, .h, .cc and .py files
// below it, sorted by path, without hidden folders and those named `bazel-*`.
// An empty list stands for the workspace that `bazel run` was called in, or
// else the current directory. Throws c10::ValueError when a path can't be read
// or there is no text.
at::Tensor ReadText(std::vector<std::string> paths);

struct ByteBatchesOptions {
  uint64_t seed = 0;
  int64_t steps = 20;  // number of batches
  int64_t batch = 4;   // sequences per rank
  int64_t seq =
      128;  // tokens per sequence; a row has one more, the last target
};

// The batches of one rank. Thread-compatible; cheap to copy, the text is
// shared.
class ByteBatches {
 public:
  // `text` is what ReadText() returns. Throws c10::ValueError when it is
  // shorter than one sequence, or a number is out of range.
  ByteBatches(at::Tensor text, const ByteBatchesOptions& options, int64_t rank,
              int64_t world_size);

  // The batch of this rank at `step`: int64, [batch, seq + 1].
  at::Tensor Batch(int64_t step) const;

  // The same batches as one process sees that holds the rows of all ranks.
  ByteBatches Global() const;

  // Tokens that all ranks together predict in one step.
  int64_t GlobalTokens() const {
    return world_size_ * options_.batch * options_.seq;
  }

  const ByteBatchesOptions& options() const { return options_; }

  class Iterator {
   public:
    Iterator(const ByteBatches* batches, int64_t step)
        : batches_(batches), step_(step) {}
    at::Tensor operator*() const { return batches_->Batch(step_); }
    Iterator& operator++() {
      ++step_;
      return *this;
    }
    bool operator==(const Iterator& other) const {
      return step_ == other.step_;
    }

   private:
    const ByteBatches* batches_;
    int64_t step_;
  };
  Iterator begin() const { return {this, 0}; }
  Iterator end() const { return {this, options_.steps}; }

 private:
  at::Tensor text_;
  ByteBatchesOptions options_;
  int64_t rank_;
  int64_t world_size_;
};

}  // namespace examples
