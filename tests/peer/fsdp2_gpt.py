"""Trains examples/gpt.h's model with PyTorch's own FSDP2, to compare losses with.

The modules below are constructed in the order of examples/gpt.h, so the same
seed gives the same initial weights, bit by bit; AdamW has the same constants in
both languages. On the same batches the two trainings agree to a few ulp.

Every process is one rank and reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
as tools/run and torchrun set them; without RANK it runs alone. CPU, Gloo:

    tools/run --nproc=2 python tests/peer/fsdp2_gpt.py \\
        --config=config.json --batches=batches.bin --output=losses.json

Protocol, with nothing but files:

  --config   JSON object; its keys are the long options below. Options given on
             the command line win.
  --batches  raw int64, native byte order, shape [steps, world_size * batch,
             seq + 1]: the global batches, one after the other, as
             ByteBatches::Global() cuts them. Rank r trains on rows r * batch to
             (r + 1) * batch. The number of steps follows from the file's size.
  --output   written by rank 0 at the end, the keys of train_gpt's --losses:
             {"world_size": W, "losses": [...], "grad_norms": [...]}; losses are
             means over ranks, norms those before clipping.
  --initial_weights, --final_weights
             written by rank 0 if given: all parameters, unsharded, before the
             first and after the last step, as raw float32 one after the other
             in the order of parameters().
"""

import argparse
import json
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x):
        split = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, seq, layers, dim, heads):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))

    def loss(self, batch):
        # Through __call__, since FSDP2 hooks nothing else.
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--config", type=pathlib.Path)
    parser.add_argument("--batches", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--initial_weights", type=pathlib.Path)
    parser.add_argument("--final_weights", type=pathlib.Path)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.config is not None:
        given = json.loads(args.config.read_text())
        if unknown := sorted(set(given) - set(vars(args))):
            parser.error(f"unknown keys in {args.config}: {', '.join(unknown)}")
        parser.set_defaults(**given)
        args = parser.parse_args()
    return args


def read_batches(path, rows, length):
    """The global batches, [steps, rows, length]."""
    size = path.stat().st_size
    if size == 0 or size % (8 * rows * length) != 0:
        raise ValueError(f"expected {path} to hold whole batches of {rows} rows of {length} int64,"
                         f" but it has {size} bytes")
    return torch.from_file(str(path), size=size // 8, dtype=torch.int64).view(-1, rows, length)


def write_weights(path, model, rank):
    """A collective; only rank 0 writes."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if rank == 0:
        path.write_bytes(torch.cat([p.detach().flatten() for p in full]).numpy().tobytes())


def mean_over_ranks(value):
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = read_batches(args.batches, world_size * args.batch, args.seq + 1)

    torch.manual_seed(args.seed)
    model = GPT(args.vocab, args.seq, args.layers, args.dim, args.heads)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if args.initial_weights:
        write_weights(args.initial_weights, model, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    losses, grad_norms = [], []
    for batch in batches:
        loss = model.loss(batch[rank * args.batch : (rank + 1) * args.batch])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        grad_norms.append(norm.full_tensor().item())

    if args.final_weights:
        write_weights(args.final_weights, model, rank)
    if rank == 0:
        report = {"world_size": world_size, "losses": losses, "grad_norms": grad_norms}
        args.output.write_text(json.dumps(report) + "\n")


def main():
    args = parse_args()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": "0"}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Without the interpreter's own end: Gloo's threads may still hold tensors then, and to let go
    # of one needs the interpreter, which aborts the process ("terminate called without an active
    # exception").
    os._exit(0)
