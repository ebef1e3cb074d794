// Wrong use is answered at once, with what is wrong and what to do; the module
// is as it was before.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tests/composable/semantics.h"

namespace composable {
namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: a zoo of its names

// Most errors need no second rank.
void OneRank(const std::function<void(RankContext&)>& body) {
  RunRanks(1, body);
}

Linear MakeLinear() {
  return RankContext::Seeded(1, [] { return Linear(3, 5); });
}

TEST(AppliedTwiceTest, NamesApiAndModule) {
  OneRank([](RankContext& rank) {
    Linear model = MakeLinear();
    fully_shard(model, rank.options());
    const Tensor shard = model->parameters()[0];
    for (int attempt = 0; attempt < 2; ++attempt) {
      ExpectThrows<c10::ValueError>(
          [&] { fully_shard(model, rank.options()); },
          {"fully_shard was already applied", "torch::nn::LinearImpl", "once"});
    }
    EXPECT_TRUE(model->parameters()[0].is_same(shard));
    // In a list too, and then its other modules are untouched.
    Linear fresh = MakeLinear();
    ExpectThrows<c10::ValueError>(
        [&] {
          fully_shard({fresh, model}, rank.options());
        },
        {"fully_shard was already applied"});
    EXPECT_FALSE(IsShard(fresh->parameters()[0]));
    EXPECT_EQ(fully_shard.state(fresh), nullptr);
  });
}

// A tensor on a GPU in all but its memory, so that it can be made without one.
Tensor TensorOnCuda(at::IntArrayRef sizes) {
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), 0,
          c10::DataPtr(nullptr, c10::Device(c10::kCUDA, 0)), nullptr, false)),
      c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(torch::kFloat));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

struct OnCudaImpl : Module {
  OnCudaImpl() : weight(register_parameter("weight", TensorOnCuda({4, 3}))) {}
  Tensor weight;
};
TORCH_MODULE(OnCuda);

TEST(DeviceTest, RefusesACudaParameterAndNamesIt) {
  OneRank([](RankContext& rank) {
    OnCuda model;
    ExpectThrows<c10::NotImplementedError>(
        [&] { fully_shard(model, rank.options()); },
        {"fully_shard", "'weight'", "cuda:0", "only CPU parameters",
         "module->to(torch::kCPU)"});
    EXPECT_TRUE(model->parameters()[0].is_same(model->weight));
  });
}

TEST(WhatIsAModuleTest, RefusesAModuleThatNothingOwns) {
  OneRank([](RankContext& rank) {
    LinearImpl on_stack(3, 5);
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(on_stack, rank.options()); },
        {"torch::nn::LinearImpl", "owned by a std::shared_ptr",
         "std::make_shared"});
    EXPECT_FALSE(IsShard(on_stack.parameters()[0]));
  });
}

TEST(WhatIsAModuleTest, RefusesEmptyHoldersPointersAndLists) {
  OneRank([](RankContext& rank) {
    Linear empty = nullptr;
    ExpectThrows<c10::ValueError>([&] { fully_shard(empty, rank.options()); },
                                  {"empty holder or pointer"});
    const std::shared_ptr<LinearImpl> null;
    ExpectThrows<c10::ValueError>([&] { fully_shard(null, rank.options()); },
                                  {"empty holder or pointer"});
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(std::vector<Linear>{}, rank.options()); },
        {"fully_shard", "empty list"});
    ExpectThrows<c10::ValueError>(
        [&] {
          fully_shard({MakeLinear(), empty}, rank.options());
        },
        {"empty holder or pointer"});
  });
}

TEST(HeldByRegistryAloneTest, ParameterListAndParameterDict) {
  OneRank([](RankContext& rank) {
    ParameterList list;
    list->append(torch::ones({4, 3}));
    ExpectThrows<c10::ValueError>(
        [&] { fully_shard(list, rank.options()); },
        {"parameter '0'", "registry alone", "register_parameter", "member"});
    ParameterDict dict;
    dict->insert("scale", torch::ones({4}));
    ModuleList parent(Linear(3, 3), dict);
    ExpectThrows<c10::ValueError>([&] { fully_shard(parent, rank.options()); },
                                  {"parameter '1.scale'", "registry alone"});
    EXPECT_FALSE(IsShard(parent->parameters()[0]));
  });
}

TEST(OptionsTest, LimitOfAllGathers) {
  OneRank([](RankContext& rank) {
    for (const int64_t limit : {0, -1}) {
      Linear model = MakeLinear();
      ExpectThrows<c10::ValueError>(
          [&] { fully_shard(model, rank.options().limit_all_gathers(limit)); },
          {"limit_all_gathers", "at least 1", std::to_string(limit)});
      EXPECT_FALSE(IsShard(model->weight));
      EXPECT_EQ(fully_shard.state(model), nullptr);
    }
  });
}

// --- Writing to members ------------------------------------------------------

struct MemberWrite {
  std::string name;
  std::function<void(Linear&)> write;
  std::string op;
};

const std::vector<MemberWrite>& MemberWrites() {
  static const auto* writes = new std::vector<MemberWrite>{
      {"Init", [](Linear& m) { init::constant_(m->weight, 1); }, "fill_"},
      {"InitNormal", [](Linear& m) { init::normal_(m->weight); }, "normal_"},
      {"Add", [](Linear& m) { m->weight.add_(1); }, "add_"},
      {"Data", [](Linear& m) { m->weight.data().zero_(); }, "zero_"},
      {"View", [](Linear& m) { m->weight.t().mul_(2); }, "mul_"},
      {"Row", [](Linear& m) { m->weight[0].fill_(2); }, "fill_"},
      {"Out",
       [](Linear& m) {
         torch::mul_out(m->weight, torch::ones({3, 3}), torch::ones({3, 3}));
       },
       "mul"},
      {"Copy",
       [](Linear& m) {
         m->weight.copy_(torch::ones({3, 3}));
       },
       "copy_"},
      {"Foreach", [](Linear& m) { at::_foreach_zero_({m->weight}); },
       "_foreach_zero_"},
      {"Index",
       [](Linear& m) {
         m->weight.index_put_({torch::tensor({0})}, torch::ones({3}));
       },
       "index_put_"},
  };
  return *writes;
}

class MemberWriteTest : public testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(All, MemberWriteTest,
                         testing::Range<size_t>(0, MemberWrites().size()),
                         [](const auto& info) {
                           return MemberWrites()[info.param].name;
                         });

TEST_P(MemberWriteTest, NamesTheParameterAndTheFix) {
  const MemberWrite& write = MemberWrites()[GetParam()];
  RunRanks(2, [&](RankContext& rank) {
    Sequential parent = RankContext::Seeded(
        1, [] { return Sequential(Linear(3, 3), Linear(3, 3)); });
    fully_shard(parent, rank.options());
    Linear layer(parent->ptr<LinearImpl>(1));
    const StateDict before = full_state_dict(parent);
    for (const bool gathered : {false, true}) {
      const torch::NoGradGuard no_grad;
      if (gathered) parent->forward(Input(1, {2, 3}));
      ExpectThrows<c10::ValueError>(
          [&] { write.write(layer); },
          {"aten::" + write.op, "writes the whole parameter '1.weight'",
           "module->parameters()", "load_full_state_dict"});
    }
    const StateDict after = full_state_dict(parent);
    for (const auto& item : before) {
      EXPECT_TRUE(torch::equal(after[item.key()], item.value()));
    }
  });
}

// --- Reading memory ----------------------------------------------------------

TEST(DataPointerTest, OfAShardedParameterNamesItAndTheFix) {
  OneRank([](RankContext& rank) {
    Sequential parent(MakeLinear(), MakeLinear());
    auto handle = fully_shard(parent, rank.options());
    const Tensor weight = parent[1]->as<Linear>()->weight;
    const std::vector<std::string> texts = {"'1.weight'", "sharded",
                                            "unshard()", "reshard()"};
    // Before the first use, and after it.
    for (int i = 0; i < 2; ++i) {
      ExpectThrows([&] { weight.data_ptr<float>(); }, texts);
      ExpectThrows([&] { weight.data_ptr(); }, texts);
      ExpectThrows([&] { weight.const_data_ptr<float>(); }, texts);
      ExpectThrows([&] { (void)weight.accessor<float, 2>(); }, texts);
      handle.unshard();
      const Tensor view = weight.t();
      EXPECT_NO_THROW(weight.data_ptr<float>());
      EXPECT_NO_THROW(view.data_ptr<float>());
      handle.reshard();
      ExpectThrows([&] { view.data_ptr<float>(); }, texts);
      ExpectThrows([&] { weight.data_ptr<float>(); }, texts);
    }
  });
}

// --- Handles and states ------------------------------------------------------

TEST(HandleTest, OfADestroyedModule) {
  OneRank([](RankContext& rank) {
    auto model = MakeLinear();
    FSDPModule handle = fully_shard(model, rank.options());
    model = nullptr;
    const std::string destroyed = "was destroyed";
    EXPECT_EQ(handle.state(), nullptr);
    ExpectThrows<c10::ValueError>([&] { handle.unshard(); },
                                  {"unshard()", destroyed});
    ExpectThrows<c10::ValueError>([&] { handle.reshard(); },
                                  {"reshard()", destroyed});
    ExpectThrows<c10::ValueError>([&] { handle.mark_dirty(); },
                                  {"mark_dirty()", destroyed});
    ExpectThrows<c10::ValueError>(
        [&] { handle.set_requires_gradient_sync(true); },
        {"set_requires_gradient_sync()", destroyed});
    ExpectThrows<c10::ValueError>([&] { handle.pending_gradient_bytes(); },
                                  {"pending_gradient_bytes()", destroyed});
    ExpectThrows<c10::ValueError>([&] { handle.clear_pending_gradients(); },
                                  {"clear_pending_gradients()", destroyed});
  });
}

// --- The default process group -----------------------------------------------

std::string FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  bind(fd, reinterpret_cast<sockaddr*>(&address), length);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(fd);
  return std::to_string(ntohs(address.sin_port));
}

TEST(DefaultProcessGroupTest, MustExistAndMayGoBeforeTheModel) {
  Linear model = MakeLinear();
  ExpectThrows<c10::ValueError>(
      [&] { fully_shard(model); },
      {"no default process group", "init_process_group()", "mesh("});
  EXPECT_FALSE(IsShard(model->parameters()[0]));
  EXPECT_EQ(fully_shard.state(model), nullptr);

  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "1", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", FreePort().c_str(), 1);
  init_process_group();
  fully_shard(model);  // the same call, repeated
  destroy_process_group();
  const Tensor x = Input(1, {2, 3});
  model(x).sum().backward();
  EXPECT_TRUE(
      torch::allclose(model->parameters()[0].grad(), x.sum(0).expand({5, 3})));
}

TEST(NoParametersTest, NeedNoProcessGroup) {
  ReLU model;
  EXPECT_NO_THROW(fully_shard(model));
  ExpectThrows<c10::ValueError>([&] { fully_shard(model); },
                                {"fully_shard was already applied", "ReLU"});
}

}  // namespace
}  // namespace composable
