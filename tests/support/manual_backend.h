// A c10d backend of one rank whose collectives finish only when the test says
// so. Shows, without clocks, what is issued before what is waited for.
//
//   auto backend = composable::MakeManualBackend(/*world_size=*/2, log);
//   auto group = composable::GroupOf(backend);
//   std::thread user([&] { UseModuleShardedOver(group); });
//   backend->AwaitWait(0);   // the thread waits for collective 0
//   backend->Finish(0);      // lets it go on
//   user.join();
//
// Broadcasts and scatters, with which fully_shard begins, are not counted: they
// are done at once.
//
// The other ranks hold what this rank holds: a gathered buffer is this rank's
// shard repeated, a reduction is this rank's part times the world size. Results
// are written by Finish. Until then outputs are full of NaN, and inputs are
// read by Finish, not before, and spoilt by it where the interface allows that:
// so what is read too early, or overwritten too early, shows in the values.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace composable {

class ManualBackend final : public c10d::Backend {
 public:
  // "issue gather 3", "wait gather 3", "issue reduce 4", ...: numbers count all
  // collectives.
  using Log = std::function<void(const std::string&)>;

  ManualBackend(int world_size, Log log);

  // With true, a wait finishes its collective itself: for tests of order alone.
  void set_finish_on_wait(bool on);

  // Blocks until some thread waits for collective `index`; throws after 20 s.
  void AwaitWait(size_t index);
  void Finish(size_t index);
  // Blocks until some thread waits for a collective that has not finished, and
  // returns its index; nothing if NoMoreWaits() was called instead, which the
  // thread that waits does at its end. set_finish_on_wait() undoes that.
  std::optional<size_t> AwaitAnyWait();
  void NoMoreWaits();
  // Makes the wait for collective `index`, issued already or not, throw
  // c10::DistError with `message`.
  void Fail(size_t index, const std::string& message);

  size_t issued() const;
  bool waited(size_t index) const;
  // What collective `index` sends; undefined once it has finished.
  at::Tensor input(size_t index) const;

  const std::string getBackendName() const override { return "manual"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override;

 private:
  friend class ManualWork;
  struct Operation {
    bool gather = false;
    bool waited = false;
    bool finished = false;
    at::Tensor output;
    at::Tensor input;
  };
  c10::intrusive_ptr<c10d::Work> Issue(bool gather, const at::Tensor& output,
                                       const at::Tensor& input);
  void Wait(size_t index);
  void FinishLocked(size_t index);

  Log log_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool finish_on_wait_ = false;
  bool no_more_waits_ = false;
  std::vector<Operation> operations_;
  std::map<size_t, std::string> failures_;
};

c10::intrusive_ptr<ManualBackend> MakeManualBackend(int world_size,
                                                    ManualBackend::Log log);

}  // namespace composable
