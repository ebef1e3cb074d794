#include "collectives/divergence.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace composable {
namespace {

constexpr const char* kSeparator = "\x1f";

// Ranks that are about to do the same.
struct Party {
  RankIntent intent;
  std::vector<int> ranks;
};

// The number, from 0, of the first collective that some rank had not foretold.
int64_t FirstUnforeseen(const std::vector<RankAnswer>& answers) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const RankAnswer& answer : answers) {
    if (answer.unforeseen()) first = std::min(first, answer.issued);
  }
  return first;
}

// By what they do as that collective. Those that went on have run what the
// others foretold.
std::vector<Party> Parties(const std::vector<RankAnswer>& answers) {
  const int64_t first = FirstUnforeseen(answers);
  const auto diverges = [&](const RankAnswer& answer) {
    return answer.unforeseen() && answer.issued == first;
  };
  RankIntent foretold;
  for (const RankAnswer& answer : answers) {
    if (diverges(answer)) foretold = answer.foretold;
  }
  std::vector<Party> parties;
  for (size_t r = 0; r < answers.size(); ++r) {
    RankIntent intent = diverges(answers[r]) ? answers[r].intent : foretold;
    if (answers[r].issued < 0) intent = {"no answer", "", 0};
    auto it = std::find_if(parties.begin(), parties.end(), [&](const Party& p) {
      return p.intent.fingerprint == intent.fingerprint &&
             p.intent.text == intent.text;
    });
    if (it == parties.end()) it = parties.insert(it, {intent, {}});
    it->ranks.push_back(static_cast<int>(r));
  }
  return parties;
}

bool TextsAreAmbiguous(const std::vector<Party>& parties) {
  std::set<std::string> texts;
  for (const Party& party : parties) texts.insert(party.intent.text);
  return texts.size() < parties.size();
}

std::string PartiesText(const std::vector<Party>& parties) {
  const bool ambiguous = TextsAreAmbiguous(parties);
  std::string text;
  for (const Party& party : parties) {
    absl::StrAppend(&text, text.empty() ? " " : "; ", RanksText(party.ranks),
                    ": ", party.intent.text);
    if (ambiguous && !party.intent.detail.empty()) {
      absl::StrAppend(&text, " (", party.intent.detail, ")");
    }
  }
  return text;
}

}  // namespace

std::string PartiesText(const std::vector<RankAnswer>& answers) {
  return PartiesText(Parties(answers));
}

std::string RankAnswer::Encode() const {
  return absl::StrCat(issued, kSeparator, intent.text, kSeparator,
                      intent.detail, kSeparator, intent.fingerprint, kSeparator,
                      foretold.text, kSeparator, foretold.detail, kSeparator,
                      foretold.fingerprint);
}

RankAnswer RankAnswer::Decode(const std::string& bytes) {
  const std::vector<std::string> fields = absl::StrSplit(bytes, kSeparator);
  RankAnswer answer;
  TORCH_CHECK(fields.size() == 7 &&
                  absl::SimpleAtoi(fields[0], &answer.issued) &&
                  absl::SimpleAtoi(fields[3], &answer.intent.fingerprint) &&
                  absl::SimpleAtoi(fields[6], &answer.foretold.fingerprint),
              "expected a rank's answer, got '", bytes, "'");
  answer.intent.text = fields[1];
  answer.intent.detail = fields[2];
  answer.foretold.text = fields[4];
  answer.foretold.detail = fields[5];
  return answer;
}

std::string DivergenceText(const std::vector<RankAnswer>& answers) {
  const std::vector<Party> parties = Parties(answers);
  return absl::StrCat(
      "Ranks are about to run different collectives over one process group "
      "(their ",
      Ordinal(FirstUnforeseen(answers) + 1), "):", PartiesText(parties),
      TextsAreAmbiguous(parties)
          ? ". Shard the same modules, with the same parameters and in the "
            "same order, on every rank."
          : ". What uses sharded parameters, such as printing a norm, must be "
            "done by every rank, and in the same order.");
}

std::string LateText(const std::vector<RankAnswer>& answers,
                     std::chrono::milliseconds timeout) {
  std::vector<int> missing;
  for (size_t r = 0; r < answers.size(); ++r) {
    if (answers[r].issued < 0) missing.push_back(static_cast<int>(r));
  }
  std::string text = absl::StrCat(
      "Ranks did not agree on the ", Ordinal(FirstUnforeseen(answers) + 1),
      " collective of their process group within ", timeout.count(),
      " ms:", PartiesText(Parties(answers)), ".");
  if (missing.empty()) return text;
  return absl::StrCat(
      text, " Of ", RanksText(missing),
      " nothing was heard: it has ended, is busy with something else, or does "
      "not run this collective at all. What uses sharded parameters, such as "
      "printing a norm, must be done by every rank.");
}

std::string RanksText(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    absl::StrAppend(&text, i == 0 ? "" : ", ", ranks[i]);
    if (last != i) absl::StrAppend(&text, "-", ranks[last]);
    i = last;
  }
  return text;
}

std::string TextOf(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace()
                             : error.what();
}

std::string Ordinal(int64_t number) {
  const int64_t tens = number % 100;
  const char* suffix = "th";
  if (tens < 11 || tens > 13) {
    if (number % 10 == 1) suffix = "st";
    if (number % 10 == 2) suffix = "nd";
    if (number % 10 == 3) suffix = "rd";
  }
  return absl::StrCat(number, suffix);
}

}  // namespace composable
