"""Tensor parallelism: a small language model on two processes, compared with the same model on one.

Run: torchrun --nproc-per-node 2 examples/distributed/tensor_parallel.py
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel, clip_grad_norm_, parallelize_module

WIDTH, HEADS, HEAD, HIDDEN, LAYERS, BYTES = 128, 8, 16, 512, 2, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (bs.nn.Linear(WIDTH, HEADS * HEAD, density=0.25, block_size=16) for _ in "qkv")
        self.out = bs.nn.Linear(HEADS * HEAD, WIDTH, density=0.25, block_size=16)

    def forward(self, x):
        # -1 is the number of heads on this process.
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, seed):
        super().__init__()
        # The first rows of this graph are hubs: with equally many features, one process would have far more blocks.
        mask = bs.patterns.barabasi_albert(HIDDEN, block_size=16, m=4, seed=seed).mask()[:, : WIDTH // 16]
        self.fc1 = bs.nn.Linear(WIDTH, HIDDEN, layout=bs.BlockLayout(mask, 16), activation="gelu")
        self.fc2 = bs.nn.Linear(HIDDEN, WIDTH, layout=bs.BlockLayout(mask.T, 16))

    def forward(self, x):
        return self.fc2(self.fc1(x))


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.RMSNorm(WIDTH), MLP(seed)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.layers = nn.Sequential(*(Block(seed) for seed in range(LAYERS)))
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


PLAN = {
    "layers.*.attention.[qkv]": ColwiseParallel(multiple=HEAD),
    "layers.*.attention.out": RowwiseParallel(multiple=HEAD),
    "layers.*.mlp.fc1": ColwiseParallel(multiple=1),
    "layers.*.mlp.fc2": RowwiseParallel(multiple=1),
}


def train(model, steps=20):
    """Train the model to predict the next byte; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)  # the same batches on all processes
    losses = []
    for _ in range(steps):
        tokens = torch.randint(BYTES, (8, 32), generator=generator)
        for t in range(1, 32):
            tokens[:, t] = (5 * tokens[:, t - 1] + 1) % BYTES
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], PLAN)

    local, total = (sum(p.numel() for p in each.parameters()) for each in (model, alone))
    blocks = torch.tensor([sum(m.layout.nnz for m in model.modules() if isinstance(m, bs.nn.Linear))])
    by_rank = [torch.empty_like(blocks) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, blocks)
    losses, expected = train(model), train(alone)
    if dist.get_rank() == 0:
        print(f"blocks of each process: {', '.join(str(each.item()) for each in by_rank)}")
        print(f"parameters: {local:,} of {total:,}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; one process: {expected[0]:.4f} -> {expected[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
