// What each rank answered when the order of collectives had to be agreed, and
// the errors that follow from it.
//
//   std::vector<composable::RankAnswer> answers;   // one per rank
//   answers.push_back(composable::RankAnswer::Decode(bytes));
//   composable::DivergenceText(answers);
//   // Ranks are about to run different collectives over one process group
//   // (their 17th): rank 0: all-gather of 'blocks.1'; ranks 1-3: ...
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace composable {

// A collective that a rank is about to run.
struct RankIntent {
  std::string text;    // Collective::text(); empty: none
  std::string detail;  // Collective::detail(), told where texts do not differ
  uint64_t fingerprint = 0;
};

struct RankAnswer {
  int64_t issued = -1;  // collectives that it has posted; -1: no answer
  RankIntent intent;    // its next one; none: it went on as foretold
  RankIntent foretold;  // what it expected as its next one

  bool unforeseen() const { return issued >= 0 && !intent.text.empty(); }

  std::string Encode() const;
  // Throws c10::Error if Encode() has not made `bytes`.
  static RankAnswer Decode(const std::string& bytes);
};

// All have answered, and not alike.
std::string DivergenceText(const std::vector<RankAnswer>& answers);

// Some have not answered in time.
std::string LateText(const std::vector<RankAnswer>& answers,
                     std::chrono::milliseconds timeout);

// What each rank is about to do:
// " rank 0: all-gather of 'blocks.1'; ranks 1-3: ..."
std::string PartiesText(const std::vector<RankAnswer>& answers);

// "rank 3", "ranks 0, 2-5".
std::string RanksText(const std::vector<int>& ranks);

// What an error says, without LibTorch's backtrace.
std::string TextOf(const std::exception& error);

// "1st", "17th".
std::string Ordinal(int64_t number);

}  // namespace composable
