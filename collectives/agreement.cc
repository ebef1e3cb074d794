#include "collectives/agreement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "collectives/divergence.h"

namespace composable {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kAgreed = "agreed";
constexpr const char* kDiffer = "differ";
constexpr const char* kLate = "late:";  // and the error

constexpr const char* kHowToGoOn =
    " This process group can't be used any more: make a new one and shard the "
    "module over it, or start the job again.";

// Sleeps a little, then longer and longer.
class Backoff {
 public:
  void Sleep() {
    std::this_thread::sleep_for(next_);
    next_ = std::min<Clock::duration>(next_ * 3 / 2, kLongest);
  }

 private:
  static constexpr Clock::duration kLongest = std::chrono::milliseconds(10);
  Clock::duration next_ = std::chrono::microseconds(20);
};

std::string Read(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

RankIntent IntentOf(const Collective* collective) {
  if (collective == nullptr) return {};
  return {collective->text(), collective->detail(), collective->fingerprint};
}

}  // namespace

AgreedStore::AgreedStore(const std::string& prefix,
                         const c10::intrusive_ptr<c10d::Store>& store,
                         std::chrono::milliseconds timeout)
    : PrefixStore(prefix, store),
      // Not this object, which owns the agreements.
      keys_(c10::make_intrusive<c10d::PrefixStore>(prefix, store)),
      timeout_(timeout) {}

std::shared_ptr<OrderAgreement> AgreedStore::AgreementOf(
    const c10d::Backend& backend) {
  const absl::MutexLock lock(&mutex_);
  auto& agreement = agreements_[backend.getBackendName()];
  if (agreement == nullptr) {
    agreement = std::make_shared<OrderAgreement>(
        c10::make_intrusive<c10d::PrefixStore>(
            absl::StrCat("agreed_order/", backend.getBackendName()), keys_),
        backend.getRank(), backend.getSize(), timeout_);
  }
  return agreement;
}

std::shared_ptr<OrderAgreement> OrderAgreement::Of(
    const c10d::ProcessGroup& group, const c10d::Backend& backend) {
  if (backend.getSize() == 1) return nullptr;
  const auto store = group.getStore();
  auto* agreed = dynamic_cast<AgreedStore*>(store.get());
  return agreed == nullptr ? nullptr : agreed->AgreementOf(backend);
}

OrderAgreement::OrderAgreement(c10::intrusive_ptr<c10d::Store> store, int rank,
                               int size, std::chrono::milliseconds timeout)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      tally_(size, 0) {}

int64_t OrderAgreement::NextSerial() {
  const absl::MutexLock lock(&mutex_);
  return ++serials_;
}

std::vector<int64_t> OrderAgreement::tally() {
  const absl::MutexLock lock(&mutex_);
  return tally_;
}

void OrderAgreement::AddToTally(const std::vector<int64_t>& more) {
  const absl::MutexLock lock(&mutex_);
  for (size_t r = 0; r < tally_.size(); ++r) tally_[r] += more[r];
}

void OrderAgreement::ThrowIfBroken() {
  const absl::MutexLock lock(&mutex_);
  if (!broken_.empty()) C10_THROW_ERROR(DistError, broken_);
}

void OrderAgreement::Check(c10d::Backend& backend, const Collective& next) {
  const absl::MutexLock lock(&mutex_);
  if (!broken_.empty()) {
    C10_THROW_ERROR(
        DistError,
        absl::StrCat("Rank ", rank_, " can't run ", next.text(),
                     ", because its process group failed before: ", broken_));
  }
  const Collective* expected = predictor_.Predict();
  if (expected == nullptr || expected->fingerprint != next.fingerprint) {
    Exchange(backend, &next);
  }
  predictor_.Advance(next);
  ++issued_;
}

void OrderAgreement::Listen(c10d::Backend& backend) {
  const absl::MutexLock lock(&mutex_);
  if (!broken_.empty()) C10_THROW_ERROR(DistError, broken_);
  int64_t noticed = 0;
  try {
    const std::string key = Key("notice");
    if (!store_->check({key})) return;
    TORCH_CHECK(absl::SimpleAtoi(Read(*store_, key), &noticed));
  } catch (const std::exception&) {
    return;  // what this rank waits for may come nevertheless
  }
  if (noticed < issued_) Exchange(backend, nullptr);
}

void OrderAgreement::Exchange(c10d::Backend& backend, const Collective* next) {
  std::string verdict;
  std::vector<RankAnswer> answers;
  try {
    PostAnswer(next);
    verdict = AwaitVerdict(next);
    if (verdict == kAgreed) DeletePreviousKeys();
    if (verdict == kDiffer) answers = ReadAnswers();
  } catch (const std::exception& error) {
    Break(absl::StrCat(
        "Rank ", rank_, " could not agree with the others on the ",
        Ordinal(issued_ + 1), " collective of its process group",
        next == nullptr ? "" : ", " + next->text(),
        ": the group's store failed: ", TextOf(error),
        ". If the process that hosts the store (rank 0, or the launcher) has "
        "ended, its error is the cause.",
        kHowToGoOn));
  }
  if (verdict == kAgreed) {
    ++exchanges_;
    return;
  }
  if (verdict != kDiffer) Break(verdict.substr(std::string(kLate).size()));
  int64_t most = 0;
  for (const RankAnswer& answer : answers) {
    most = std::max(most, answer.issued);
  }
  TakePartUntil(backend, most);
  Break(DivergenceText(answers) + kHowToGoOn);
}

void OrderAgreement::PostAnswer(const Collective* next) {
  const RankAnswer answer{issued_, IntentOf(next),
                          IntentOf(predictor_.Predict())};
  const std::string bytes = answer.Encode();
  present_keys_ = {RankKey(rank_)};
  store_->set(present_keys_[0],
              std::vector<uint8_t>(bytes.begin(), bytes.end()));
  if (next == nullptr) return;
  LowerNotice();
  store_->add(SameKey(*next), 1);
}

// The notice holds the lowest number of a collective that some rank did not
// foretell.
void OrderAgreement::LowerNotice() {
  const std::string mine = absl::StrCat(issued_);
  std::string expected;
  while (true) {
    const std::string found = store_->compareSet(Key("notice"), expected, mine);
    int64_t noticed = 0;
    if (found == mine) return;
    if (absl::SimpleAtoi(found, &noticed) && noticed <= issued_) return;
    expected = found;
  }
}

std::string OrderAgreement::AwaitVerdict(const Collective* next) {
  const auto deadline = Clock::now() + timeout_;
  const std::string key = Key("verdict");
  if (store_->check({key})) {
    // The others have given up. This rank's answer is theirs to read as well.
    return absl::StrCat(Read(*store_, key), " Since then rank ", rank_,
                        " has come, too:", PartiesText(ReadAnswers()), ".");
  }
  if (store_->add(Key("answered"), 1) == size_) {
    const bool agreed =
        next != nullptr && store_->add(SameKey(*next), 0) == size_;
    if (agreed) {
      for (const auto& shared :
           {key, Key("answered"), Key("notice"), SameKey(*next)}) {
        present_keys_.push_back(shared);
      }
    }
    return store_->compareSet(key, "", agreed ? kAgreed : kDiffer);
  }
  // Not with the store's own wait, which keeps other threads of this process
  // from using the store.
  Backoff backoff;
  while (!store_->check({key})) {
    if (Clock::now() >= deadline) {
      const std::string late = absl::StrCat(
          kLate, LateText(ReadAnswers(), timeout_), LastText(), kHowToGoOn);
      return store_->compareSet(key, "", late);
    }
    backoff.Sleep();
  }
  return Read(*store_, key);
}

// Every rank has answered the present exchange, so none reads the one before.
void OrderAgreement::DeletePreviousKeys() {
  for (const auto& key : previous_keys_) store_->deleteKey(key);
  previous_keys_ = std::exchange(present_keys_, {});
}

std::vector<RankAnswer> OrderAgreement::ReadAnswers() {
  std::vector<RankAnswer> answers(size_);
  for (int r = 0; r < size_; ++r) {
    const std::string key = RankKey(r);
    if (store_->check({key}))
      answers[r] = RankAnswer::Decode(Read(*store_, key));
  }
  return answers;
}

std::string OrderAgreement::LastText() const {
  const Collective* last = predictor_.Last();
  if (last == nullptr) return " There was none before.";
  return absl::StrCat(" The last one of rank ", rank_, " before is ",
                      last->text(), ".");
}

void OrderAgreement::TakePartUntil(c10d::Backend& backend, int64_t issued) {
  while (issued_ < issued) {
    const Collective* expected = predictor_.Predict();
    if (expected == nullptr) return;
    const Collective collective = *expected;
    predictor_.Advance(collective);
    ++issued_;
    TakePart(backend, collective);
  }
}

void OrderAgreement::Break(const std::string& error) {
  broken_ = error;
  C10_THROW_ERROR(DistError, error);
}

std::string OrderAgreement::Key(const std::string& name) const {
  return absl::StrCat(exchanges_, "/", name);
}

std::string OrderAgreement::RankKey(int rank) const {
  return Key(absl::StrCat("rank", rank));
}

std::string OrderAgreement::SameKey(const Collective& next) const {
  return Key(absl::StrCat("same/", issued_, "/", next.fingerprint));
}

}  // namespace composable
