// Tells ThreadSanitizer about absl::Mutex and absl::CondVar.
//
// The system's Abseil is not instrumented, so its locks order nothing in the
// sanitizer's eyes and every guarded variable would look like a race. The
// functions below take the place of Abseil's in programs built with
// --config=tsan; each calls the real one and adds the order it makes.
// Orders too much rather than too little: readers are ordered among each other.
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "absl/synchronization/mutex.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

#define COMPOSABLE_STRING(x) #x
#define COMPOSABLE_STRING_OF(x) COMPOSABLE_STRING(x)

namespace {

// The real function of that signature. `start` and `rest` are its mangled name
// around Abseil's inline namespace.
template <typename Function>
Function* Real(const char* start, const char* rest) {
  const std::string space =
      COMPOSABLE_STRING_OF(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  const std::string name = start + std::to_string(space.size()) + space + rest;
  void* function = dlsym(RTLD_NEXT, name.c_str());
  if (function == nullptr) std::abort();
  return reinterpret_cast<Function*>(function);
}

template <typename Function>
Function* RealMutex(const char* rest) {
  return Real<Function>("_ZN4absl", (std::string("5Mutex") + rest).c_str());
}

template <typename Function>
Function* RealCondVar(const char* rest) {
  return Real<Function>("_ZN4absl", (std::string("7CondVar") + rest).c_str());
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static auto* const real = RealMutex<void(Mutex*)>("4LockEv");
  real(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  static auto* const real = RealMutex<void(Mutex*)>("6UnlockEv");
  __tsan_release(this);
  real(this);
}

bool Mutex::TryLock() {
  static auto* const real = RealMutex<bool(Mutex*)>("7TryLockEv");
  const bool locked = real(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::ReaderLock() {
  static auto* const real = RealMutex<void(Mutex*)>("10ReaderLockEv");
  real(this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  static auto* const real = RealMutex<void(Mutex*)>("12ReaderUnlockEv");
  __tsan_release(this);
  real(this);
}

void Mutex::LockWhen(const Condition& condition) {
  static auto* const real =
      RealMutex<void(Mutex*, const Condition&)>("8LockWhenERKNS0_9ConditionE");
  real(this, condition);
  __tsan_acquire(this);
}

void Mutex::Await(const Condition& condition) {
  static auto* const real =
      RealMutex<void(Mutex*, const Condition&)>("5AwaitERKNS0_9ConditionE");
  __tsan_release(this);
  real(this, condition);
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static auto* const real = RealMutex<bool(Mutex*, const Condition&, Duration)>(
      "16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  __tsan_release(this);
  const bool met = real(this, condition, timeout);
  __tsan_acquire(this);
  return met;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static auto* const real = RealMutex<bool(Mutex*, const Condition&, Time)>(
      "17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  __tsan_release(this);
  const bool met = real(this, condition, deadline);
  __tsan_acquire(this);
  return met;
}

void CondVar::Wait(Mutex* mutex) {
  static auto* const real =
      RealCondVar<void(CondVar*, Mutex*)>("4WaitEPNS0_5MutexE");
  __tsan_release(mutex);
  real(this, mutex);
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static auto* const real = RealCondVar<bool(CondVar*, Mutex*, Duration)>(
      "15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  __tsan_release(mutex);
  const bool timed_out = real(this, mutex, timeout);
  __tsan_acquire(mutex);
  return timed_out;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static auto* const real = RealCondVar<bool(CondVar*, Mutex*, Time)>(
      "16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  __tsan_release(mutex);
  const bool timed_out = real(this, mutex, deadline);
  __tsan_acquire(mutex);
  return timed_out;
}

// A thread that unlocks looks at what others wait for, after its release.
bool Condition::Eval() const {
  static auto* const real =
      Real<bool(const Condition*)>("_ZNK4absl", "9Condition4EvalEv");
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  const bool met = real(this);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  return met;
}

ABSL_NAMESPACE_END
}  // namespace absl
