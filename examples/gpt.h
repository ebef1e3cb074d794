// A byte-level GPT made of ordinary LibTorch modules; nothing in here knows
// about sharding. Modules are constructed in the same order as those of
// tests/peer/fsdp2_gpt.py, so one seed gives both the same weights, bit by bit.
#pragma once

#include <torch/torch.h>

namespace examples {

struct GPTConfig {
  int64_t vocab = 256;  // one token per byte value
  int64_t seq = 128;    // longest sequence, in tokens
  int64_t layers = 6;
  int64_t dim = 384;
  int64_t heads = 6;  // must divide dim
};

// One pre-norm transformer block: causal self-attention, then an MLP.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t dim, int64_t heads) : heads(heads) {
    ln1 = register_module("ln1", torch::nn::LayerNorm(std::vector{dim}));
    qkv = register_module("qkv", torch::nn::Linear(dim, 3 * dim));
    proj = register_module("proj", torch::nn::Linear(dim, dim));
    ln2 = register_module("ln2", torch::nn::LayerNorm(std::vector{dim}));
    fc = register_module("fc", torch::nn::Linear(dim, 4 * dim));
    out = register_module("out", torch::nn::Linear(4 * dim, dim));
  }
  at::Tensor forward(at::Tensor x) {  // [B, T, dim] to [B, T, dim]
    auto split =
        qkv(ln1(x)).unflatten(-1, {3, heads, -1}).permute({2, 0, 3, 1, 4});
    auto attended =
        at::scaled_dot_product_attention(split[0], split[1], split[2], {},
                                         /*dropout_p=*/0.0, /*is_causal=*/true);
    x = x + proj(attended.transpose(1, 2).flatten(2));
    return x + out(torch::gelu(fc(ln2(x))));
  }
  int64_t heads;
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, fc{nullptr}, out{nullptr};
};
TORCH_MODULE(Block);

struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const GPTConfig& c) {
    TORCH_CHECK_VALUE(c.heads > 0 && c.dim % c.heads == 0,
                      "expected heads to divide dim, but got ", c.heads,
                      " heads and dim ", c.dim);
    wte = register_module("wte", torch::nn::Embedding(c.vocab, c.dim));
    wpe = register_module("wpe", torch::nn::Embedding(c.seq, c.dim));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < c.layers; ++i)
      blocks->push_back(Block(c.dim, c.heads));
    ln = register_module("ln", torch::nn::LayerNorm(std::vector{c.dim}));
    head = register_module(
        "head", torch::nn::Linear(
                    torch::nn::LinearOptions(c.dim, c.vocab).bias(false)));
  }
  at::Tensor forward(const at::Tensor& tokens) {  // [B, T] to [B, T, vocab]
    auto x = wte(tokens) + wpe(torch::arange(tokens.size(1), tokens.options()));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(ln(x));
  }
  // Mean cross entropy of predicting batch[:, 1:] from batch[:, :-1]; the batch
  // is [B, T + 1].
  at::Tensor loss(const at::Tensor& batch) {
    auto logits = forward(batch.slice(1, 0, -1));
    return at::cross_entropy_loss(logits.flatten(0, 1),
                                  batch.slice(1, 1).flatten());
  }
  torch::nn::Embedding wte{nullptr}, wpe{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm ln{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(GPT);

}  // namespace examples
