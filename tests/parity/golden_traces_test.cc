// The order of gathers, frees and reductions, against that of PyTorch's
// fully_shard: traces recorded from it (tests/parity/golden) are changed by the
// three rules in which this library differs by design, and must then be equal.
//   (a) Nothing is gathered that the pass does not read ("unread" in the file).
//   (b) A group that is left keeps its slot: R is when another one takes it, or
//       never, and U of what is still there is nothing. A gather ahead waits for
//       a slot, unless a list of the user asks for it.
//   (c) A group is reduced once, when its gradients are there.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "composable/fully_shard.h"
#include "composable/gradient_sync_guard.h"
#include "composable/stats.h"
#include "tests/support/in_process_backend.h"
#include "tests/support/manual_backend.h"

namespace composable {
namespace {

constexpr size_t kSlots = 2;

struct Event {
  char kind = 0;  // U, R, P; u: a U that finds the group, in upstream's only
  std::string group;
  bool operator==(const Event& other) const {
    return kind == other.kind && group == other.group;
  }
};
using Trace = std::vector<Event>;

std::string Text(const Trace& trace) {
  std::string text;
  for (const auto& e : trace)
    text += std::string(1, e.kind) + " " + e.group + "; ";
  return text;
}

Trace Parse(const std::string& text) {
  Trace trace;
  std::istringstream in(text);
  for (std::string entry; std::getline(in, entry, ';');) {
    std::istringstream words(entry);
    Event event;
    if (words >> event.kind >> event.group) trace.push_back(event);
  }
  return trace;
}

struct Golden {
  std::map<std::string, std::string> values;

  static Golden Read(const std::string& name) {
    Golden golden;
    std::ifstream file("tests/parity/golden/" + name + ".txt");
    EXPECT_TRUE(file.good()) << name;
    for (std::string line; std::getline(file, line);) {
      if (line.empty() || line[0] == '#') continue;
      const size_t space = std::min(line.find(' '), line.size());
      golden.values[line.substr(0, space)] =
          space == line.size() ? "" : line.substr(space + 1);
    }
    return golden;
  }
  std::string Get(const std::string& key,
                  const std::string& otherwise = "") const {
    const auto it = values.find(key);
    return it == values.end() ? otherwise : it->second;
  }
  int Number(const std::string& key) const { return std::stoi(Get(key, "0")); }
  std::set<std::string> Names(const std::string& key) const {
    std::istringstream in(Get(key));
    std::set<std::string> names;
    for (std::string name; in >> name;) names.insert(name);
    return names;
  }
};

// Applies the rules to upstream's list of a pass.
class Normaliser {
 public:
  Normaliser(const Golden& golden, bool first)
      : unread_(golden.Names("unread")),
        frozen_(golden.Names("frozen")),
        first_(first) {
    const std::string freed = golden.Get("reshard_after_forward", "none");
    all_stay_ = freed == "false";
    if (freed == "none") stay_.insert({"root", "norm"});
    if (golden.Get("setup") == "unshard_first") stay_.insert({"root", "L0"});
    frees_are_listed_ = golden.Get("events", "URP") != "UP";
    reduces_ = golden.Get("events", "URP") != "UR";
    holds_ = golden.Get("setup") == "no_sync_stays";
  }

  Trace Forward(const Trace& upstream, bool explicit_lists) {
    return Run(upstream, /*backward=*/false, explicit_lists);
  }
  Trace Backward(const Trace& upstream, bool explicit_lists) {
    return Run(upstream, /*backward=*/true, explicit_lists);
  }

 private:
  bool Stays(const std::string& g) const {
    return all_stay_ || stay_.count(g) != 0;
  }
  bool Has(const std::string& g) const {
    return std::find(resident_.begin(), resident_.end(), g) != resident_.end();
  }
  size_t Slots() const {
    return std::count_if(
        resident_.begin(), resident_.end(),
        [&](const auto& g) { return !Stays(g) && held_.count(g) == 0; });
  }
  void Drop(const std::string& g) {
    resident_.erase(std::remove(resident_.begin(), resident_.end(), g),
                    resident_.end());
    left_.erase(g);
  }
  // Frees left groups, that whose next U comes last first, then the oldest.
  bool MakeRoom(const Trace& upstream, size_t now, bool known, Trace& out) {
    while (Slots() >= kSlots) {
      std::string victim;
      size_t latest = 0;
      for (const auto& g : resident_) {
        if (Stays(g) || left_.count(g) == 0 || held_.count(g) != 0) continue;
        const auto next =
            std::find(upstream.begin() + now, upstream.end(), Event{'U', g});
        const size_t use = known ? next - upstream.begin() : 1;
        if (victim.empty() || use > latest) {
          victim = g;
          latest = use;
        }
      }
      if (victim.empty()) return false;
      Drop(victim);
      out.push_back({'R', victim});
    }
    return true;
  }
  void Gather(const std::string& g, Trace& out) {
    resident_.push_back(g);
    out.push_back({'U', g});
  }

  Trace Run(const Trace& upstream, bool backward, bool explicit_lists) {
    Trace out;
    std::vector<std::string> waiting;  // for a slot
    const auto take_waiting = [&](const std::string& g) {
      const auto it = std::find(waiting.begin(), waiting.end(), g);
      if (it == waiting.end()) return;
      waiting.erase(it);
      Gather(g, out);
    };
    for (size_t i = 0; i < upstream.size(); ++i) {
      const auto& [kind, g] = upstream[i];
      const auto later =
          std::find(upstream.begin() + i + 1, upstream.end(), Event{'P', g});
      const bool again = backward && reduces_ && later != upstream.end() &&
                         !(kind == 'R' && later == upstream.begin() + i + 1);
      const bool repeated =
          backward &&
          std::count(upstream.begin() + i, upstream.end(), Event{kind, g}) > 1;
      if (kind == 'u') {
        EXPECT_EQ(held_.count(g), 1U) << g;
        MakeRoom(upstream, i, /*known=*/true, out);
        held_.erase(g);
      } else if (kind == 'U') {
        if (backward && unread_.count(g) != 0) continue;  // (a)
        if (Has(g)) {                                     // (b)
          resident_.erase(std::find(resident_.begin(), resident_.end(), g));
          resident_.push_back(g);
          left_.erase(g);
          continue;
        }
        if (!backward && !frees_are_listed_) {
          left_.insert(resident_.begin(), resident_.end());
        }
        if (Stays(g) || MakeRoom(upstream, i, backward || !first_, out) ||
            !backward || explicit_lists) {
          Gather(g, out);
        } else {
          waiting.push_back(g);
        }
      } else if (kind == 'R' && (!backward || frozen_.count(g) != 0)) {
        if (Has(g)) left_.insert(g);  // (b)
      } else if (repeated) {
        take_waiting(g);  // (c)
      } else if (kind == 'R') {
        take_waiting(g);
        if (Has(g)) out.push_back({'R', g});
        Drop(g);
        if (!reduces_ || !again) Serve(waiting, out, upstream, i);
      } else {
        if (!frees_are_listed_) Drop(g);
        if (holds_) held_.insert(g);
        out.push_back({'P', g});
        Serve(waiting, out, upstream, i);
      }
    }
    if (backward && !upstream.empty()) {  // its end
      for (const auto& g : std::set<std::string>(left_)) {
        Drop(g);
        out.push_back({'R', g});
      }
    }
    return out;
  }
  void Serve(std::vector<std::string>& waiting, Trace& out,
             const Trace& upstream, size_t now) {
    // P of a group follows its R.
    if (now + 1 < upstream.size() && upstream[now].kind == 'R' &&
        upstream[now + 1] == Event{'P', upstream[now].group}) {
      return;
    }
    while (!waiting.empty() && Slots() < kSlots) {
      const std::string g = waiting.front();
      waiting.erase(waiting.begin());
      Gather(g, out);
    }
  }

  std::set<std::string> unread_;
  std::set<std::string> frozen_;
  bool first_;  // iteration: in its forward nothing is known about what follows
  std::set<std::string> stay_;
  bool all_stay_ = false;
  bool frees_are_listed_ = true;
  bool reduces_ = true;
  bool holds_ = false;          // reshard_after_backward is false
  std::set<std::string> held_;  // by that, out of the slots
  std::vector<std::string> resident_;
  std::set<std::string> left_;
};

// Blocks in a row, between an embedding and a head where tokens come in.
struct StackImpl : torch::nn::Module {
  StackImpl(int count, bool tokens) {
    if (tokens) tok = register_module("tok", torch::nn::Embedding(8, 4));
    for (int i = 0; i < count; ++i) {
      layers.push_back(
          register_module("L" + std::to_string(i), torch::nn::Linear(4, 4)));
    }
    if (tokens) norm = register_module("norm", torch::nn::Linear(4, 8));
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = tok.is_empty() ? input : tok(input);
    for (size_t i = 0; i < layers.size(); ++i) {
      if (i == 0 && first == First::kNotRun) continue;
      const at::Tensor y = layers[i](x).tanh();
      if (i > 0 || first == First::kUsed) x = y;
    }
    return norm.is_empty() ? x : norm(x);
  }
  // What becomes of the first layer.
  enum class First { kUsed, kOutputUnused, kNotRun } first = First::kUsed;
  torch::nn::Embedding tok{nullptr};
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear norm{nullptr};
};
TORCH_MODULE(Stack);

class Recorded {
 public:
  explicit Recorded(const Golden& golden)
      : golden_(golden),
        backend_(MakeManualBackend(2, [](const std::string& /*event*/) {})),
        tokens_(golden.Number("layers") == 0),
        model_(std::max({golden.Number("blocks"), golden.Number("layers"),
                         golden.Get("lists").empty() ? 0 : 5}),
               tokens_) {
    backend_->set_finish_on_wait(true);
    for (const auto& name : golden.Names("frozen")) {
      for (auto& p : Layer(name)->parameters()) p.set_requires_grad(false);
    }
    if (golden.Get("lists").empty()) {
      for (auto& layer : model_->layers)
        handles_.push_back(fully_shard(layer, Options()));
    } else {
      const auto& l = model_->layers;
      fully_shard(model_->tok, Options());
      fully_shard(l[0], Options());
      fully_shard({l[1], l[2]}, Options());
      fully_shard({l[3], l[4]}, Options());
      fully_shard(model_->norm, Options().reshard_after_forward(false));
    }
    handles_.push_back(fully_shard(model_, Options()));
    Configure();
    set_trace_observer(model_, [this](TraceEvent event,
                                      const std::string& fqn) {
      const std::map<TraceEvent, char> kinds = {{TraceEvent::kUnshard, 'U'},
                                                {TraceEvent::kReshard, 'R'},
                                                {TraceEvent::kReduce, 'P'}};
      const auto it = kinds.find(event);
      if (it == kinds.end()) return;
      if (golden_.Get("events", "URP").find(it->second) == std::string::npos)
        return;
      trace_.push_back({it->second, fqn.empty() ? "root" : fqn});
    });
    if (golden.Get("setup") == "unshard_first") {
      handles_.back().unshard();
      handles_.front().unshard();
    }
  }

  Trace Forward() {
    const at::AutoGradMode mode(golden_.Get("setup") != "no_grad");
    for (int i = 0; i < std::max(1, golden_.Number("forwards")); ++i) {
      const at::Tensor loss = model_(Input()).sum();
      loss_ = loss_.defined() ? loss_ + loss : loss;
    }
    return Take();
  }
  Trace Backward() {
    if (loss_.requires_grad()) loss_.backward();
    loss_.reset();
    return Take();
  }

 private:
  torch::nn::Linear Layer(const std::string& name) const {
    return model_->layers.at(std::stoi(name.substr(1)));
  }
  FullyShardOptions Options() const {
    FullyShardOptions options;
    options.mesh(GroupOf(backend_));
    options.forward_prefetch(false);  // as upstream
    const std::string freed = golden_.Get("reshard_after_forward", "none");
    if (freed != "none") options.reshard_after_forward(freed == "true");
    return options;
  }
  void Configure() {
    const int count = static_cast<int>(model_->layers.size());
    for (int i = 0; i < count; ++i) {
      std::vector<ModuleRef> next;
      std::vector<ModuleRef> before;
      for (int n = 1; n <= golden_.Number("forward_list") && i + n < count;
           ++n) {
        next.emplace_back(model_->layers[i + n]);
      }
      for (int n = 1; n <= golden_.Number("backward_list") && i >= n; ++n) {
        before.emplace_back(model_->layers[i - n]);
      }
      if (!next.empty()) handles_[i].set_modules_to_forward_prefetch(next);
      if (!before.empty()) handles_[i].set_modules_to_backward_prefetch(before);
    }
    const std::string setup = golden_.Get("setup");
    if (setup == "no_sync") handles_.back().set_requires_gradient_sync(false);
    if (setup == "no_sync_stays") {
      handles_.back().set_requires_gradient_sync(false);
      handles_.back().set_reshard_after_backward(false);
    }
    if (setup == "output_unused")
      model_->first = StackImpl::First::kOutputUnused;
    if (setup == "never_run") model_->first = StackImpl::First::kNotRun;
    if (setup == "not_last") handles_.back().set_is_last_backward(false);
  }
  at::Tensor Input() const {
    return tokens_ ? at::arange(6).view({2, 3}) : at::ones({2, 4});
  }
  Trace Take() { return std::exchange(trace_, {}); }

  Golden golden_;
  c10::intrusive_ptr<ManualBackend> backend_;
  bool tokens_;
  Stack model_;
  std::vector<FSDPModule> handles_;
  Trace trace_;
  at::Tensor loss_;
};

class GoldenTrace : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(
    A, GoldenTrace,
    testing::Values("a1_true", "a1_none", "a1_none_12", "a1_false", "a2_true",
                    "a2_none", "a2_false", "a3_forward_1", "a3_forward_2",
                    "a3_backward_1", "a3_backward_2", "a5_lists",
                    "a6_unshard_first", "a6_no_sync", "a6_not_last",
                    "a6_middle_frozen", "a6_first_frozen", "a6_no_grad",
                    "a6_output_unused", "a6_never_run", "a6_no_sync_stays"),
    [](const auto& info) { return std::string(info.param); });

TEST_P(GoldenTrace, DiffersByTheRulesAlone) {
  const Golden golden = Golden::Read(GetParam());
  Recorded recorded(golden);
  const Trace forward = Parse(golden.Get("forward"));
  const Trace backward = Parse(golden.Get("backward"));
  ASSERT_FALSE(forward.empty());
  // Which groups a backward does not read is known after the first one; what
  // unshard() gathered, and evaluations leave, is there once only.
  const std::string setup = golden.Get("setup");
  const bool once = setup == "unshard_first" || setup == "no_grad";
  const int first = golden.Names("unread").empty() ? 1 : 2;
  // What a backward holds is there in the next iteration.
  const Trace next = Parse(golden.Get("next_forward", golden.Get("forward")));
  Normaliser normaliser(golden, /*first=*/true);
  for (int iteration = 1; iteration <= (once ? 1 : 3); ++iteration) {
    if (iteration > 1 && setup != "no_sync_stays")
      normaliser = Normaliser(golden, /*first=*/false);
    const Trace expected_forward = normaliser.Forward(
        iteration == 1 ? forward : next, golden.Number("forward_list") > 0);
    const Trace expected_backward =
        normaliser.Backward(backward, golden.Number("backward_list") > 0);
    Trace got_forward = recorded.Forward();
    const Trace got_backward = recorded.Backward();
    if (iteration < first) continue;
    const auto listed = [&](Trace trace) {
      const std::string kinds = golden.Get("events", "URP");
      trace.erase(std::remove_if(trace.begin(), trace.end(),
                                 [&](const Event& e) {
                                   return kinds.find(e.kind) ==
                                          std::string::npos;
                                 }),
                  trace.end());
      return Text(trace);
    };
    EXPECT_EQ(listed(got_forward), listed(expected_forward))
        << "iteration " << iteration;
    EXPECT_EQ(listed(got_backward), listed(expected_backward))
        << "iteration " << iteration;
  }
}

}  // namespace
}  // namespace composable
