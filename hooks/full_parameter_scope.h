// Holds whole parameters in memory outside of any forward or backward, for those
// who read or write them.
//
//   auto held = composable::HoldWhole({state}, /*writeback=*/true, "example");
//   held.clear();   // written back and freed
//
// Note [Full parameter scope]
// While a group is held, operators read its whole parameters without starting a
// forward, and with `writeback` may write them, with gradients off. When it is
// let go, each rank copies its own rows back to its shards, whether the scope is
// left by an exception or not: what was written stays, as in a plain module. The
// group is freed then, also where it was gathered or pinned before, because the
// rows of other ranks may differ now; whether it is does not depend on what a
// rank has written, so all ranks gather alike afterwards.
//
// Scopes nest: an inner one writes back at its own end, the outermost frees.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "state/fsdp_state.h"

namespace composable {

// One group, held until this is destroyed.
class HeldGroup {
 public:
  // What `Hold` does: nothing yet.
  HeldGroup() = default;
  ~HeldGroup();
  HeldGroup(HeldGroup&& other) noexcept = default;
  HeldGroup& operator=(HeldGroup&&) = delete;
  HeldGroup(const HeldGroup&) = delete;
  HeldGroup& operator=(const HeldGroup&) = delete;

  FSDPState& state() const { return *state_; }
  // Lets go without writing back.
  void Discard() { writes_back_ = false; }

 private:
  friend std::vector<HeldGroup> HoldWhole(
      const std::vector<std::shared_ptr<FSDPState>>& states, bool writeback,
      const std::string& api);
  friend HeldGroup HoldForInit(const std::shared_ptr<FSDPState>& state,
                               const std::string& api);
  HeldGroup(std::shared_ptr<FSDPState> state, bool writeback,
            const std::string& api);
  void LetGo();

  std::shared_ptr<FSDPState> state_;           // null: moved from
  std::shared_ptr<FSDPStateContext> context_;  // its tree
  bool was_pinned_ = false;
  bool may_write_ = false;
  bool writes_back_ = false;
};

// (collective) Gathers the groups of `states`, in their order, and holds them.
// Throws c10::ValueError, naming `api`, inside of a forward or backward of the
// tree, whose mutex must be held.
void CheckBetweenPasses(const FSDPStateContext& context, const FSDPState& state,
                        const std::string& api);

// Throws c10::ValueError, naming `api`, inside of a forward or backward; then
// nothing is held.
std::vector<HeldGroup> HoldWhole(
    const std::vector<std::shared_ptr<FSDPState>>& states, bool writeback,
    const std::string& api);

// (collective if some parameters of the group have values) Holds a group some
// of whose parameters have no values yet: these are filled with kUnwritten
// bytes. Members are of the dtype of the shards meanwhile, whatever the gathered
// one. The caller writes back what it wants to keep.
HeldGroup HoldForInit(const std::shared_ptr<FSDPState>& state,
                      const std::string& api);

// What memory without values is filled with: NaN in every floating type.
inline constexpr unsigned char kUnwritten = 0xff;
void FillUnwritten(const at::Tensor& dense);
// Whether every byte is still that.
bool IsUnwritten(const at::Tensor& dense);

}  // namespace composable
