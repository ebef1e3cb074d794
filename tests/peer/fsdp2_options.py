"""Trains small networks with PyTorch's own FSDP2, one for each set of options.

Each case is a network of blocks that are sharded one by one, and then as a whole;
fsdp2_options_test.cc trains the same ones. A seed gives both languages the same
weights and the same batches, bit by bit: modules are constructed in one order,
and batches are drawn from the generator after them.

Every process is one rank and reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT:

    tools/run --nproc=2 python tests/peer/fsdp2_options.py cases.json out/

`cases.json` is a list of objects with the keys of DEFAULTS, of which `name` must
be given. Rank 0 writes out/NAME.json with

    losses      the mean over ranks (and microbatches) of each step's losses
    norms       of all gradients, before clipping, of each step
    gradients   by name, of the first step, whole and flat, as float32
    weights     the same of the parameters after the last step
"""

import json
import math
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

DEFAULTS = {
    "name": None,
    "seed": 1,
    "steps": 10,
    "batch": 4,            # rows per rank and microbatch
    "dim": 16,             # of inputs and outputs
    "hidden": 24,
    "blocks": 3,
    "microbatches": 1,     # all but the last without gradient sync
    "replicas": 1,         # above 1: a 2-D mesh (replicas, world / replicas)
    "reshard": None,       # reshard_after_forward of blocks and root
    "param_dtype": None,   # names of torch's dtypes
    "reduce_dtype": None,
    "frozen": "none",      # or "blocks", every second; or "weights", all but biases
    "optimizer": "sgd",    # or "adamw"
    "lr": 0.05,
    "clip": None,          # a norm,
    "clip_order": 2.0,     # of this order; null: infinity
}


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim, hidden, blocks):
        super().__init__()
        self.enter = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))
        self.leave = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def shard(model, case):
    world = dist.get_world_size()
    if case["replicas"] > 1:
        mesh = init_device_mesh("cpu", (case["replicas"], world // case["replicas"]),
                                mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    dtype = lambda name: None if name is None else getattr(torch, name)
    options = {
        "mesh": mesh,
        "reshard_after_forward": case["reshard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype(case["param_dtype"]),
                                          reduce_dtype=dtype(case["reduce_dtype"])),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def freeze(model, what):
    for name, parameter in model.named_parameters():
        if what == "blocks" and name.startswith("blocks.") and int(name.split(".")[1]) % 2 == 0:
            parameter.requires_grad_(False)
        if what == "weights" and not name.endswith("bias"):
            parameter.requires_grad_(False)


def full(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float().flatten().tolist()


def run(case):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(case["seed"])
    model = Net(case["dim"], case["hidden"], case["blocks"])
    rows = world * case["batch"]
    data = torch.randn(case["steps"], case["microbatches"], 2, rows, case["dim"])
    freeze(model, case["frozen"])
    shard(model, case)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[case["optimizer"]]
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=case["lr"])
    order = math.inf if case["clip_order"] is None else case["clip_order"]

    report = {"losses": [], "norms": [], "gradients": {}}
    for step in data:
        mean = 0
        for i, (x, target) in enumerate(step):
            model.set_requires_gradient_sync(i + 1 == case["microbatches"])
            mine = slice(rank * case["batch"], (rank + 1) * case["batch"])
            loss = F.mse_loss(model(x[mine]).float(), target[mine]) / case["microbatches"]
            loss.backward()
            mean += loss.detach().double()
        dist.all_reduce(mean)
        report["losses"].append(mean.item() / world)
        if not report["gradients"]:
            report["gradients"] = {name: full(p.grad) for name, p in model.named_parameters()
                                   if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), case["clip"] or math.inf, order)
        report["norms"].append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    report["weights"] = {name: full(p) for name, p in model.named_parameters()}
    return report


def main():
    cases, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for given in json.loads(cases.read_text()):
            if unknown := sorted(set(given) - set(DEFAULTS)):
                raise ValueError(f"unknown keys in {cases}: {', '.join(unknown)}")
            report = run(DEFAULTS | given)
            if dist.get_rank() == 0:
                (out / f"{given['name']}.json").write_text(json.dumps(report))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # See the end of fsdp2_gpt.py.
    os._exit(0)
