// What travels when a parameter is gathered, in place of the shard itself: a
// cast, a quantised copy with its scales, anything that each rank can make of
// its shard and that gives the whole parameter when all ranks' parts are there.
//
//   struct HalfOnTheWire : composable::AllGatherExtension {
//     composable::AllGatherInputs PreAllGather(
//         const at::Tensor& shard,
//         const composable::AllGatherContext& /*context*/) override {
//       return {{shard.to(at::kHalf)}, {}};
//     }
//     void PostAllGather(const std::vector<at::Tensor>& outputs,
//                        const std::any& /*metadata*/,
//                        const composable::AllGatherContext& context,
//                        const at::Tensor& out) override {
//       composable::UnstackChunks(outputs[0], context.dim, out);
//     }
//   };
//
// and then
//
//   composable::fully_shard(
//       block, composable::FullyShardOptions().all_gather_extension_fn(
//                  [](const std::string& /*fqn*/, const at::Tensor& parameter)
//                      -> std::shared_ptr<composable::AllGatherExtension> {
//                    if (parameter.dim() < 2) return nullptr;  // as it is
//                    return std::make_shared<HalfOnTheWire>();
//                  }));
//
// A parameter with an extension is placed as Shard(0), or as the Shard(dim) that
// shard_placement_fn gives. Every rank's shard is handed out padded to the size
// of the first, with zeros, so what is made of it has the same size on every
// rank without any work of the extension. Gradients, optimizers and state dicts
// see the shard and the whole parameter as without one.
#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace composable {

struct AllGatherContext {
  std::string fqn;
  int rank = 0;
  int world_size = 1;
  at::IntArrayRef sizes;  // of the whole parameter
  at::IntArrayRef strides;
  int64_t dim = 0;     // that it is cut along
  int64_t length = 0;  // of this rank's part along it; the rest is padding
  c10::ScalarType param_dtype = c10::ScalarType::Undefined;  // of the whole
};

struct AllGatherInputs {
  std::vector<at::Tensor> tensors;
  std::any metadata;  // of this rank, for its PostAllGather
};

// Called with gradients, inference mode and autocast off, by the thread that
// issues or waits for the gather, while the tree's mutex is held: it must not
// touch a sharded parameter. One object may serve several parameters.
class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  // What this rank sends, made of `shard`, which may be read only. At least one
  // tensor; they may have different dtypes, and are copied. Sizes and dtypes
  // must be the same in every call and on every rank; where they are not, the
  // gather throws c10::ValueError, naming the parameter, before anything is
  // sent. Called once when the parameter is sharded, to learn them, and for
  // every gather.
  virtual AllGatherInputs PreAllGather(const at::Tensor& shard,
                                       const AllGatherContext& context) = 0;

  // Writes the whole parameter into all of `out`, whose dtype is
  // context.param_dtype. outputs[k] has the k-th tensor of every rank: sizes
  // [ranks, sizes of tensors[k]...]. Their memory is reused afterwards.
  virtual void PostAllGather(const std::vector<at::Tensor>& outputs,
                             const std::any& metadata,
                             const AllGatherContext& context,
                             const at::Tensor& out) = 0;
};

// Copies the chunks of all ranks, `stacked` of sizes [ranks, a padded chunk...],
// into the whole parameter, leaving out the padding.
void UnstackChunks(const at::Tensor& stacked, int64_t dim,
                   const at::Tensor& out);

// Gets the name of a parameter, counted from the module that fully_shard is
// called on, and the whole parameter; null: no extension. Called once for each.
using AllGatherExtensionFn = std::function<std::shared_ptr<AllGatherExtension>(
    const std::string& fqn, const at::Tensor& parameter)>;

}  // namespace composable
