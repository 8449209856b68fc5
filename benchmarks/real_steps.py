"""Run a net of the planner in the processes of a gloo group, and measure its bytes, collectives and seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel
from blocksparse.errors import BlockSparseError
from blocksparse.surgery.sharding import local_of
from blocksparse_lab.planner.net import Net, ProductShape
from blocksparse_lab.planner.plan import Job

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),  # the fused one does not support DTensor
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
}
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
}


class Pair(nn.Module):
    """Two products with a ReLU between them, split by outputs (the first) and by inputs (the second)."""

    def __init__(self, wide: ProductShape, narrow: ProductShape):
        super().__init__()
        self.up = bs.nn.Linear(wide.in_features, wide.out_features, layout=layout_of(wide), activation="relu")
        self.down = bs.nn.Linear(narrow.in_features, narrow.out_features, layout=layout_of(narrow))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def layout_of(product: ProductShape) -> bs.BlockLayout:
    """Return a layout with equal numbers of blocks per row and per column, which any number of ranks shares evenly."""
    if product.out_blocks < product.in_blocks:
        tall = ProductShape(product.in_blocks, product.out_blocks, product.nnz, product.block, product.cut)
        return layout_of(tall).T
    each, rest = divmod(product.nnz, product.out_blocks)
    if rest or not each:
        raise BlockSparseError.expected("nnz", f"a multiple of {product.out_blocks}", product.nnz)
    rows = np.repeat(np.arange(product.out_blocks), each)
    cols = (rows + np.tile(np.arange(each), product.out_blocks) * (product.in_blocks // each)) % product.in_blocks
    grid = (product.out_blocks, product.in_blocks)
    return bs.BlockLayout.from_indices(rows, cols, grid, block_size=product.block)


def build(net: Net, tensor_parallel: int | None) -> nn.Module:
    """Return the net wrapped for DDP (None) or for FSDP2 with this many tensor-parallel ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Pair(wide, narrow) for wide, narrow in net.layers])
    if tensor_parallel is None:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    sizes = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
    for pair in model:
        if tensor_parallel > 1:
            parallelize_module(pair, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if sizes[0] > 1:
            fully_shard(pair, mesh=mesh["shard"])
    if sizes[0] > 1:
        fully_shard(model, mesh=mesh["shard"])
    return model


class Traffic(TorchDispatchMode):
    """Records each collective: its name, the bytes of the whole tensor, the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[float, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name in COLLECTIVES:
            whole = args[1] if name == "_reduce_scatter_base_" else args[0]
            size = sum(tensor.nbytes for tensor in ([whole] if isinstance(whole, Tensor) else whole))
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            ranks = dist.ProcessGroup.unbox(named["process_group"]).size()
            self.calls.setdefault(COLLECTIVES[name], []).append((size, ranks))
        return func(*args, **(kwargs or {}))


def _local_bytes(tensors: Iterator[Tensor | None]) -> int:
    return sum(local_of(tensor).nbytes for tensor in tensors if tensor is not None)


def run(net: Net, job: Job, tensor_parallel: int | None, steps: int = 0) -> dict[str, Any]:
    """Return this rank's `memory` by category, `calls` as in `Plan`, and the median `seconds` of several steps."""
    model = build(net, tensor_parallel)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    torch.manual_seed(1)
    x = torch.randn(job.tokens * (tensor_parallel or 1), net.width, requires_grad=True)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    def cleared() -> None:
        optimizer.zero_grad()
        x.grad = None

    for _ in range(2):  # DDP rebuilds its buckets in the second step
        step()
        cleared()
    saved: dict[int, int] = {}
    parameters = {local_of(p).data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        at = tensor.untyped_storage().data_ptr()
        if tensor.dim() == 2 and len(tensor) == len(x) and tensor.is_floating_point() and at not in parameters:
            saved[at] = tensor.nbytes
        return tensor

    with Traffic() as traffic, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    memory = {
        "values": _local_bytes(iter(model.parameters())),
        "gradients": _local_bytes(p.grad for p in model.parameters()),
        "optimizer": _local_bytes(s for state in optimizer.state.values() for n, s in state.items() if n != "step"),
        "layouts": _local_bytes(iter(model.buffers())),
        "activations": sum(saved.values()),
    }
    cleared()
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = perf_counter()
        step()
        cleared()
        dist.barrier()
        seconds.append(perf_counter() - start)
    return {"memory": memory, "calls": traffic.calls, "seconds": statistics.median(seconds) if seconds else None}
