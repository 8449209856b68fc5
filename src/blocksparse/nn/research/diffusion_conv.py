"""Diffusion convolution on graphs without weak transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import ops
from ...checked import integer, number, shape_of
from ...errors import BlockSparseError
from ...layout import BlockLayout, import_scipy_sparse


class Diffusion(nn.Module):
    """A random walk over a graph: P^j x for j = 0, 1, ..., `hops`, with a sparse transition matrix P.

    P = A D^-1, where D has the degrees plus 1: column n has 1 / (degree(n) + 1) for each neighbour of node n. Entries
    up to the threshold are removed before the powers are computed. So no column of P has more than 1 / threshold - 1
    entries, and memory grows with the number of nodes only, even if some nodes have many neighbours.

    Args:
        edges: int `[2, edges]`, pairs of nodes in either order; duplicates and loops are ignored.
        nodes: the number of nodes.
        hops: the length of the longest walk. Default: 2.
        threshold: from 0, which removes nothing, to below 1. Default: 0.
        dtype: of the powers. Default: torch.float32.

    The powers are buffers that are not in the state dict: `layouts` with block size 1, and their values. `nnz` are the
    numbers of their entries, `isolated` is the number of nodes without a neighbour.

    Shapes: `[nodes, features]` to `[nodes, hops + 1, features]`.

    Raises:
        BlockSparseError: a node or an argument is out of range, the threshold removes every edge, or scipy is missing.

    Example:
        >>> import torch, blocksparse as bs
        >>> ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> diffusion = bs.nn.Diffusion(ring, nodes=4, hops=2)
        >>> diffusion(torch.eye(4))[0].round(decimals=3)
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.0000, 0.3330, 0.0000, 0.3330],
                [0.2220, 0.0000, 0.2220, 0.0000]])
        >>> diffusion.nnz
        (8, 8)

    Source: Atwood, Towsley, Diffusion-convolutional neural networks (2016); Atwood, Pal, Towsley, Swami, Sparse
    diffusion-convolutional neural networks (2017).
    """

    def __init__(
        self, edges: Tensor, nodes: int, hops: int = 2, threshold: float = 0.0, dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.nodes, self.hops = integer("nodes", nodes, 1), integer("hops", hops, 1)
        self.threshold = number("threshold", threshold, 0, below=1)
        transition, self.isolated = _transition(edges, self.nodes, self.threshold)
        self.layouts: list[BlockLayout] = []
        power = transition
        for hop in range(1, self.hops + 1):
            if hop > 1:
                power = power @ transition
            power.sort_indices()
            rows = np.repeat(np.arange(self.nodes), np.diff(power.indptr))
            self.layouts.append(BlockLayout.from_indices(rows, power.indices, (self.nodes, self.nodes), block_size=1))
            values = torch.from_numpy(power.data).to(dtype).view(-1, 1, 1)
            self.register_buffer(f"power_{hop}", values, persistent=False)

    @property
    def nnz(self) -> tuple[int, ...]:
        """The numbers of entries of P, P^2, ..."""
        return tuple(layout.nnz for layout in self.layouts)

    @property
    def nbytes(self) -> int:
        """The bytes of all powers: values, columns and row starts."""
        indices = sum(i.nbytes for layout in self.layouts for i in (layout.crow_indices(), layout.col_indices()))
        return indices + sum(values.nbytes for values in self.buffers())

    def forward(self, input: Tensor) -> Tensor:
        """Return P^j x for j = 0, 1, ..., `hops` side by side, `[nodes, hops + 1, features]`."""
        x = input
        if not isinstance(x, Tensor) or x.dim() != 2 or len(x) != self.nodes:
            raise BlockSparseError.expected("x", f"a tensor [{self.nodes}, features]", shape_of(x))
        walks = [x]
        for layout, values in zip(self.layouts, self.buffers(), strict=True):
            walks.append(ops.linear(x.T, values, layout).T)
        return torch.stack(walks, 1)

    def extra_repr(self) -> str:
        return f"nodes={self.nodes}, hops={self.hops}, threshold={self.threshold:g}, nnz={self.nnz}"


class DiffusionConv(nn.Module):
    """An elementwise weight on the output z of a `Diffusion`, tanh(W * z), the same for all nodes.

    Args:
        features: the number of features per node.
        hops: the hops of the diffusion. Default: 2.
        device, dtype: of the weight.

    Shapes: `[..., hops + 1, features]` to the same.

    Raises:
        BlockSparseError: a size is not a positive int; in the call, z has another shape.

    Example:
        >>> import torch, blocksparse as bs
        >>> diffusion = bs.nn.Diffusion(torch.tensor([[0, 1], [1, 2]]), nodes=3, hops=2)
        >>> bs.nn.DiffusionConv(features=5, hops=2)(diffusion(torch.randn(3, 5))).shape
        torch.Size([3, 3, 5])

    Source: Atwood, Towsley, Diffusion-convolutional neural networks (2016).
    """

    def __init__(self, features: int, hops: int = 2, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        shape = integer("hops", hops, 1) + 1, integer("features", features, 1)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, input: Tensor) -> Tensor:
        """Return tanh(weight * z), element by element."""
        z = input
        if not isinstance(z, Tensor) or z.shape[-2:] != self.weight.shape:
            raise BlockSparseError.expected(
                "z", f"a tensor [..., {', '.join(map(str, self.weight.shape))}]", shape_of(z)
            )
        return torch.tanh(self.weight * z)

    def extra_repr(self) -> str:
        hops, features = self.weight.shape
        return f"{features}, hops={hops - 1}"


def _transition(edges: Any, nodes: int, threshold: float) -> tuple[Any, int]:
    """Return P as a scipy matrix without entries up to the threshold, and the number of isolated nodes."""
    sparse = import_scipy_sparse()
    if not isinstance(edges, Tensor) or edges.dim() != 2 or len(edges) != 2 or edges.is_floating_point():
        got = f"{edges.dtype} {list(edges.shape)}" if isinstance(edges, Tensor) else type(edges).__name__
        raise BlockSparseError.expected("edges", "ints [2, edges]", got)
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
        raise BlockSparseError.expected("edges", f"nodes from 0 to {nodes - 1}", f"{edges.min()} to {edges.max()}")
    i, j = edges.cpu().numpy()
    i, j = i[i != j], j[i != j]
    both = np.concatenate([i, j]), np.concatenate([j, i])
    adjacency = sparse.csr_array((np.ones(2 * i.size, dtype=bool), both), shape=(nodes, nodes)).astype(np.float64)
    degrees = np.asarray(adjacency.sum(0)).reshape(-1)
    if not degrees.any():
        raise BlockSparseError.expected("edges", "at least one edge between two nodes", "none")
    transition = (adjacency @ sparse.diags_array(1 / (degrees + 1))).tocsr()
    transition.data[transition.data <= threshold] = 0
    transition.eliminate_zeros()
    if transition.nnz == 0:
        strongest = 1 / (degrees[degrees > 0].min() + 1)
        expected = f"one that leaves an edge; the strongest transition is {strongest:g}"
        raise BlockSparseError.expected("threshold", expected, f"{threshold:g}")
    return transition, int(np.count_nonzero(degrees == 0))
