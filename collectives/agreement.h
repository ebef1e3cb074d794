// Makes sure that all ranks of a process group run the same collectives in the
// same order. Without it, ranks that run different ones exchange wrong bytes,
// or end in the transport's abort.
//
//   auto store = c10::make_intrusive<composable::AgreedStore>(
//       prefix, any_store, timeout);   // of the process group `group`
//   const auto agreement = composable::OrderAgreement::Of(*group, *backend);
//   agreement->Check(*backend, gather);   // throws on every rank, or on none
//   auto work = composable::Post(*backend, gather, whole, shard);
//
// Note [Agreed order]
// Each rank foretells its next collective from those before it (OrderPredictor).
// Histories are equal, so all ranks expect the same. One that is about to run
// what it expects posts it without a word: O(1), no traffic. One that is not
// (the first iteration, another kind of pass, or a divergence) writes what it
// is about to do into the process group's store, and waits until all ranks have
// answered. If all are about to do the same, it is agreed and learnt.
//
// A rank that has posted what the others do not run waits for it in vain. So
// waits listen: now and then they look for a notice in the store that another
// rank does not follow, for a collective that this rank has posted, and answer
// it. Then all ranks throw, naming what each was about to do. Before that they
// take part, with memory of their own, in what some have posted and others have
// not: Gloo can't abort a collective, and its threads must not write into
// memory that is used for something else. The results are thrown away.
//
// A rank that does not answer within the process group's timeout makes the
// others throw; it throws too when it comes later. After any of these errors the
// process group can't be used any more.
//
// Keys in the store: "agreed_order/<backend>/<exchange>/...", where exchanges
// are counted from 0; those of an exchange go when the next one has ended.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "collectives/collective.h"
#include "collectives/divergence.h"
#include "collectives/order_predictor.h"

namespace composable {

// Thread-safe.
class OrderAgreement {
 public:
  // The one of `backend`, which belongs to `group`: the same for every caller,
  // as long as the group lives. Null for a single rank, and for a group whose
  // store is no AgreedStore: its order is not checked.
  static std::shared_ptr<OrderAgreement> Of(const c10d::ProcessGroup& group,
                                            const c10d::Backend& backend);

  // Keys in `store` are this object's own, and the same for all ranks.
  OrderAgreement(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                 std::chrono::milliseconds timeout);

  // Returns if all ranks run `next` now, as their next collective over
  // `backend`; the caller then posts it. Throws c10::DistError otherwise.
  void Check(c10d::Backend& backend, const Collective& next);

  // For a rank whose wait takes long: throws c10::DistError if this process
  // group can't be used any more, or another rank does not run what this one has
  // posted. One look into the store; it being out of reach is no error.
  void Listen(c10d::Backend& backend);

  // Throws c10::DistError if this process group can't be used any more.
  void ThrowIfBroken();

  // 1, 2, ...: ranks that shard equal modules over this process group, in the
  // same order, get the same numbers.
  int64_t NextSerial();

  // See Communicator::tally.
  std::vector<int64_t> tally();
  void AddToTally(const std::vector<int64_t>& more);

 private:
  // Answers the present exchange: with `next` or, if it is null, with that this
  // rank went on as foretold. Returns if all ranks agree.
  void Exchange(c10d::Backend& backend, const Collective* next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PostAnswer(const Collective* next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LowerNotice() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string AwaitVerdict(const Collective* next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DeletePreviousKeys() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One per rank; of those that have not answered: issued == -1.
  std::vector<RankAnswer> ReadAnswers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string LastText() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakePartUntil(c10d::Backend& backend, int64_t issued)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  [[noreturn]] void Break(const std::string& error)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the present exchange.
  std::string Key(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string RankKey(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string SameKey(const Collective& next) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;

  absl::Mutex mutex_;
  OrderPredictor predictor_ ABSL_GUARDED_BY(mutex_);
  int64_t issued_ ABSL_GUARDED_BY(mutex_) = 0;     // collectives so far
  int64_t exchanges_ ABSL_GUARDED_BY(mutex_) = 0;  // ended
  int64_t serials_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<int64_t> tally_ ABSL_GUARDED_BY(mutex_);  // one per rank
  // Of the exchange before, and of the present one: what this rank deletes.
  std::vector<std::string> previous_keys_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> present_keys_ ABSL_GUARDED_BY(mutex_);
  std::string broken_ ABSL_GUARDED_BY(mutex_);  // the error; empty: usable
};

// The store of a process group: `store` with its keys behind a prefix. Owns the
// agreements of the group's backends.
class AgreedStore final : public c10d::PrefixStore {
 public:
  // `timeout`: how long a rank waits for the answers of the others.
  AgreedStore(const std::string& prefix,
              const c10::intrusive_ptr<c10d::Store>& store,
              std::chrono::milliseconds timeout);

  std::shared_ptr<OrderAgreement> AgreementOf(const c10d::Backend& backend);

  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  const c10::intrusive_ptr<c10d::Store> keys_;
  const std::chrono::milliseconds timeout_;
  absl::Mutex mutex_;
  // By the backend's name.
  absl::flat_hash_map<std::string, std::shared_ptr<OrderAgreement>> agreements_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace composable
