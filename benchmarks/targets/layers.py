"""Layers of experts and GRUs in inference on a GPU.

The peer `dense` is the same layer with dense weights; of a GRU, torch.nn.GRU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blocksparse import densify
from blocksparse.measure import Call
from blocksparse.nn import GRU, Experts
from blocksparse_lab.bench.case import OURS, Bench, Case, forward
from targets.transformer import PartCase, PartSpec


@dataclass(frozen=True)
class ExpertsSpec(PartSpec):
    """Gated MLPs, `features -> hidden -> features`, of which each token uses some.

    >>> print(ExpertsSpec(4096, 0.1, 64, 2048, hidden=8192, experts=8, chosen=2))
    2 of 8 experts 2048-8192-2048, 4096 tokens, block 64, density 0.1
    """

    hidden: int
    experts: int
    chosen: int

    small: ClassVar = {**PartSpec.small, "hidden": 512}

    def __str__(self) -> str:
        return self._describe(f"{self.chosen} of {self.experts} experts {self.features}-{self.hidden}-{self.features}")


@dataclass(frozen=True)
class GruSpec(PartSpec):
    """A GRU with as many inputs as units; `tokens` are those of all sequences.

    >>> print(GruSpec(8192, 0.1, 32, 4096, steps=64))
    GRU of 4096 units, 64 steps, 8192 tokens, block 32, density 0.1
    """

    steps: int

    small: ClassVar = {"tokens": 32, "features": 64, "steps": 4}

    def __str__(self) -> str:
        return self._describe(f"GRU of {self.features} units, {self.steps} steps")


class LayerCase(PartCase):
    """A layer with its inputs and its dense peer."""

    peers = ("dense",)
    layout = None
    inputs: tuple[Tensor, ...]

    def __init__(self, spec: Any, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        torch.manual_seed(seed)
        self.module = self.build(density=spec.density, block_size=spec.block)

    def build(self, **sparse: Any) -> nn.Module:
        """Build a layer, which is dense without a density and a block size."""
        raise NotImplementedError

    @property
    def stored(self) -> tuple[int, float]:
        return sum(p.numel() for p in self.module.parameters() if p.dim() == 3) // self.spec.block**2, self.spec.density

    def call(self, name: str, copy: int = 0) -> Call:
        module = self.module if name == OURS else self.build()
        return forward(lambda *inputs: _first(module(*inputs)), *self.inputs)

    def exact(self) -> Tensor:
        module = densify(self.module).double()
        with torch.no_grad():
            return _first(module(*(x.double() if x.is_floating_point() else x for x in self.inputs)))


class ExpertsCase(LayerCase):
    """A layer of experts; each token uses those with the largest of random scores."""

    def __init__(self, spec: ExpertsSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        x, scores = self.randn(spec.tokens, spec.features), self.randn(spec.tokens, spec.experts)
        weights, index = scores.softmax(1).topk(spec.chosen)
        self.inputs = x, index, weights

    def build(self, **sparse: Any) -> nn.Module:
        spec, kind = self.spec, {"device": self.device, "dtype": self.spec.torch_dtype}
        return Experts(spec.experts, spec.features, spec.hidden, **sparse, **kind)


class GruCase(LayerCase):
    """A GRU."""

    def __init__(self, spec: GruSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        self.inputs = (self.randn(spec.steps, spec.tokens // spec.steps, spec.features),)

    def build(self, **sparse: Any) -> nn.Module:
        size, kind = self.spec.features, {"device": self.device, "dtype": self.spec.torch_dtype}
        return GRU(size, size, **sparse, **kind) if sparse else nn.GRU(size, size, **kind)


class ExpertsBench(Bench):
    """Measures eager calls: the host waits for the number of tokens of each expert, and a graph cannot capture that."""

    kind = ExpertsCase

    def prepare(self, case: Case, name: str, counts: dict[str, int]) -> Call:
        counts[name] = 1
        return case.call(name)


class GruBench(Bench):
    kind = GruCase


def _first(result: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the first of several results, or the only one."""
    return result if isinstance(result, Tensor) else result[0]


# Bench, spec, and target speed-up over dense: none.
LAYERS: tuple[tuple[type[Bench], Any, None], ...] = (
    (ExpertsBench, ExpertsSpec(4096, 0.1, 64, 2048, hidden=8192, experts=8, chosen=2), None),
    (GruBench, GruSpec(8192, 0.1, 32, 4096, steps=64), None),
)
