// What one call of fully_shard keeps: FSDPState; and what all calls in one
// module tree share: FSDPStateContext.
//
//   std::shared_ptr<composable::FSDPState> state =
//       composable::fully_shard.state(block);
//   state->group()->sharded_state();   // kSharded after a backward
//
// A state exists from fully_shard on. The context is made at the first use of
// the tree (hooks/root_pre_forward), when the root is known: the topmost module
// with a state that contains the one in use.
//
// Thread rules: a tree is used by one forward or backward at a time. The
// context's mutex guards the context and all its states; it is recursive
// because an operator issued by a hook may itself touch a sharded parameter.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/buffer_pool.h"
#include "state/contract_registry.h"
#include "state/fsdp_param_group.h"
#include "state/fully_shard_options.h"
#include "state/gradient_reduction.h"
#include "state/ignored_params.h"
#include "state/pass_order.h"
#include "state/trace.h"
#include "state/training_state.h"
#include "state/tree_snapshot.h"

namespace composable {

class FSDPState;

// What a handle on a finalization and the tree share.
struct BackwardFinalization {
  bool done = false;
  bool dropped = false;  // by an exception, or reset_iter_state()
};

class FSDPStateContext {
 public:
  FSDPStateContext() = default;
  FSDPStateContext(const FSDPStateContext&) = delete;
  FSDPStateContext& operator=(const FSDPStateContext&) = delete;

  std::recursive_mutex mutex;

  // By FSDPState::id, in the order of the tree's modules; null where a state
  // has died with its module.
  std::vector<FSDPState*> states;
  FullyShardOptions options;  // of the root
  // Those whose groups are not kSharded.
  std::vector<FSDPState*> resident;

  // Operators that read whole parameters and have not ended: how many, and the
  // thread and graph task of the last one.
  std::atomic<int> operators_running = 0;
  std::thread::id operator_thread;
  int operator_task = -1;

  TrainingState training_state = TrainingState::kIdle;
  // Whether a backward of the tree runs, in whatever thread.
  bool is_in_backward() const {
    return training_state == TrainingState::kPreBackward ||
           training_state == TrainingState::kPostBackward;
  }
  std::vector<std::weak_ptr<torch::nn::Module>> roots;
  TreeSnapshot snapshot;
  // The states whose parameters the last operator read.
  std::vector<FSDPState*> current;
  bool current_grad_mode = false;  // of that operator
  // Alive while the graph task that runs root_post_backward at its end does.
  // Backwards nested in it, as in a re-entrant checkpoint, leave that to it.
  std::weak_ptr<void> running_backward;

  // The root was called through a module boundary: whole parameters may be read
  // in a forward or a backward only. See Note [Forward scopes].
  bool has_boundary = false;
  int open_scopes = 0;  // of all states of the tree
  // Of all states of the tree: see FSDPState.
  int full_parameter_scopes = 0;

  PassOrder forward_order;
  PassOrder backward_order;
  // The first backward follows the reverse of the forward. One whose trainable
  // parameters have just changed follows nothing.
  bool seed_backward_order = true;
  uint64_t touches = 0;  // clock for least recently used

  // See hooks/finalize_backward.h. Backwards since the last one that ended an
  // iteration count as one pass.
  bool is_last_backward = true;
  bool manual_finalization = false;
  bool iteration_open = false;
  bool unfinalized = false;  // a backward has ended, and no finalization since
  bool has_reduced = false;  // in this iteration
  std::weak_ptr<BackwardFinalization> finalization;  // to be waited for

  BufferPool pool;
  // The states whose reductions are in flight, the oldest first.
  std::vector<FSDPState*> reducing;
  // How many of them may hold a payload: the most that any state asks for.
  int64_t max_reduction_payloads = 1;

  FSDPStats stats;
  TraceObserver observer;

  void Trace(TraceEvent event, const FSDPState& state) const;

  // After a change of a state's max_reduction_payloads.
  void UpdateMaxReductionPayloads();

  // Check that the change of the group of `state`, from `before`, is legal, and
  // keep `stats` and `resident` right.
  void AccountIssued(FSDPState& state, ShardedState before);
  void AccountWaited();
  void AccountFreed(FSDPState& state, ShardedState before,
                    GroupEvent event = GroupEvent::kReshard);

  // A state of the tree is being destroyed.
  void Forget(FSDPState* state);
};

class FSDPState final : public ComposableState {
 public:
  FSDPState(std::vector<std::shared_ptr<torch::nn::Module>> modules,
            FullyShardOptions options, std::unique_ptr<FSDPParamGroup> group);
  ~FSDPState() override;
  bool owned_by_modules() const override { return group_ != nullptr; }
  void Commit() noexcept override;
  void Rollback() noexcept override;

  // Null if the modules have no parameters of their own.
  FSDPParamGroup* group() const { return group_.get(); }
  GradientReduction* reduction() const { return reduction_.get(); }
  // After shards were given another dtype: see Note [Dtype changes].
  void Readopt();
  const FullyShardOptions& options() const { return options_; }
  std::vector<std::shared_ptr<torch::nn::Module>> modules() const;

  // Gives back what the application changed beside this group.
  std::function<void()> undo;

  std::unique_ptr<IgnoredParams> ignored;  // by this call

  // The tree; null before its first use. Written by LazyInit and ResetTree.
  std::shared_ptr<FSDPStateContext> context;
  // `context` is complete: whoever does not hold a lock of it looks here first.
  std::atomic<bool> has_tree = false;
  std::shared_ptr<FSDPStateContext> tree() const {
    return has_tree.load(std::memory_order_acquire) ? context : nullptr;
  }
  // The state of the nearest module above that has one, once that was sharded.
  std::weak_ptr<FSDPState> parent;

  int id = -1;                        // index in context->states
  std::string fqn;                    // of the first module, from the root
  std::vector<int> ancestors;         // ids of the states above
  bool reshard_after_forward = true;  // resolved when the root is known
  // What set_reshard_after_forward() last said, over the options.
  std::optional<bool> reshard_after_forward_override;
  bool requires_gradient_sync = true;
  int64_t max_reduction_payloads = 1;  // see the context's
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool keep_unsharded_storage = false;
  // Gathered ahead when this group is used, instead of what the order says.
  std::vector<std::weak_ptr<FSDPState>> forward_prefetch;
  std::vector<std::weak_ptr<FSDPState>> backward_prefetch;
  // What the tree is to do, whichever states it will have: the last one counts
  // that was set on any of them.
  bool is_last_backward = true;
  bool manual_finalization = false;

  // Left: no operator of this pass is expected to read it next, so another
  // group may take its buffer.
  bool left = false;
  bool prefetched = false;  // gathered ahead and not read since
  bool listed = false;      // because a list of the user says so
  bool held = false;        // by a backward that was not to reshard it
  bool pinned = false;      // unshard() was called; stays until reshard()
  uint64_t last_touch = 0;
  int open_scopes = 0;  // forwards of the modules that run through a boundary
  // Scopes in which the whole parameters stay, and those of them in which they
  // may be written. See hooks/full_parameter_scope.h.
  int full_parameter_scopes = 0;
  int full_parameter_writers = 0;

  // Holds the mutex of the tree, if there is one yet.
  std::unique_lock<std::recursive_mutex> LockTree() const;

  bool is_root() const { return id == 0; }
  bool IsAncestorOf(const FSDPState& other) const;
  // Counts against limit_all_gathers.
  bool uses_slot() const {
    return reshard_after_forward && !pinned && !held && !keep_unsharded_storage;
  }

 private:
  std::vector<std::weak_ptr<torch::nn::Module>> modules_;
  FullyShardOptions options_;
  std::unique_ptr<FSDPParamGroup> group_;
  std::unique_ptr<GradientReduction> reduction_;
};

// The name fully_shard is registered under.
inline constexpr char kFullyShardApi[] = "fully_shard";

// The state of fully_shard on `module`, or null.
std::shared_ptr<FSDPState> FindFSDPState(const torch::nn::Module& module);

// What an entry of a module's parameter registry stands for: the parameter that
// it is the shard of or, in a module that no fully_shard covers, the whole of.
// Both null if it is neither.
struct ShardedEntry {
  std::shared_ptr<FSDPState> state;
  FSDPParam* param = nullptr;
};
ShardedEntry FindShardedEntry(const at::Tensor& entry);

}  // namespace composable
