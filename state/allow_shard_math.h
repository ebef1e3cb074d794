// Allows differentiable and reducing operators on shards, in this thread, while
// it lives.
//
//   composable::AllowShardMath allowed;
//   for (const auto& p : model->parameters()) loss = loss + 1e-4 * p.pow(2).sum();
//   loss.backward();
//
// A shard is this rank's rows. An operator that sums over them, or that autograd
// records, would compute something about this rank alone, which is seldom what
// a program means; so both throw outside of this scope. Inside, a gradient that
// reaches a shard is added to its grad() as it is: it is not averaged over the
// ranks. In the example each rank adds the penalty of its own rows, which gives
// the gradient of (mean of the ranks' losses) + (penalty of the whole model).
#pragma once

namespace composable {

class AllowShardMath {
 public:
  AllowShardMath() { ++depth_; }
  ~AllowShardMath() { --depth_; }
  AllowShardMath(const AllowShardMath&) = delete;
  AllowShardMath& operator=(const AllowShardMath&) = delete;

  static bool IsAllowed() { return depth_ > 0; }

 private:
  inline static thread_local int depth_ = 0;
};

}  // namespace composable
