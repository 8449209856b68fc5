"""Time a mixture's experts, forward and backward, against a loop of dense experts and against one dense layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import to_dense
from blocksparse.measure import Call
from blocksparse.nn import Experts
from blocksparse_lab.bench.case import OURS, check_errors, relative_error
from targets.rows import RowIterator, race

# Largest relative L2 error of outputs and gradients of the input against the loop with the same weights.
BOUND = 1e-5
# Least speed-ups of block-sparse experts over the loop, and over a dense layer of the active units.
OVER_LOOP, OVER_LAYER = 3.0, 0.8


@dataclass(frozen=True)
class ExpertsSpec:
    """The sizes of a layer: experts, active ones per token, units of each, features, tokens, density, block."""

    experts: int = 48
    active: int = 8
    units: int = 192
    features: int = 1536
    tokens: int = 512
    density: float = 0.5
    block: int = 64

    def __str__(self) -> str:
        chosen = f"{self.active} of {self.experts} experts of {self.units} units"
        return f"{chosen}, {self.tokens} tokens of {self.features:,}"


class Loop(nn.Module):
    """Dense experts in a Python loop, each with weights of its own."""

    def __init__(self, experts: Experts):
        super().__init__()
        up, down = (_matrices(experts, name) for name in ("gate_up_proj", "down_proj"))
        self.up, self.down = nn.ParameterList(up), nn.ParameterList(down)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(index == expert)
            gate, value = F.linear(x[token], up).chunk(2, -1)
            y = y.index_add(0, token, F.linear(F.silu(gate) * value, down) * weights[token, place, None])
        return y


class Layer(nn.Module):
    """A dense gated linear unit with as many units as each token has active ones."""

    def __init__(self, spec: ExpertsSpec):
        super().__init__()
        units = spec.active * spec.units
        self.up = nn.Linear(spec.features, 2 * units, bias=False)
        self.down = nn.Linear(units, spec.features, bias=False)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * value)
        return y


def rows(budget: float = 8.0, quick: bool = False) -> RowIterator:
    """Yield a row per baseline for block-sparse experts, then for dense ones, which have no target.

    Raises:
        BlockSparseError: outputs or gradients differ from those of the loop.
    """
    spec = ExpertsSpec(6, 2, 32, 64, 24, block=16) if quick else ExpertsSpec()
    torch.manual_seed(0)
    weights, index = torch.randn(spec.tokens, spec.experts).softmax(-1).topk(spec.active)
    x = torch.randn(spec.tokens, spec.features)
    sizes = spec.experts, spec.features, spec.units
    sparse, dense = Experts(*sizes, density=spec.density, block_size=spec.block), Experts(*sizes)
    models = {OURS: sparse, "dense experts": dense, "loop": Loop(sparse), "layer": Layer(spec)}
    calls = {name: _step(model, x, index, weights) for name, model in models.items()}
    ours, exact = (_results(model, x, index, weights) for model in (sparse, models["loop"]))
    errors = {OURS: max(map(relative_error, ours, exact))}
    check_errors(BOUND, errors, spec, against="the loop")
    timed = race(calls, 3 if quick else 9, budget)
    details = {**asdict(spec), "errors": errors}
    work = f"{spec}, forward + backward"
    peers = {"loop": "a loop of dense experts", "layer": "a dense layer"}
    sparse_kind = f"density {spec.density:g}, block {spec.block}"
    for name, kind, least in ((OURS, sparse_kind, (OVER_LOOP, OVER_LAYER)), ("dense experts", "dense", (None, None))):
        for (over, peer), goal in zip(peers.items(), least, strict=True):
            yield timed.row(f"{work}, {kind}", over, name, peer, details=details, least=goal)


def _matrices(experts: Experts, name: str) -> list[nn.Parameter]:
    """Return a copy of each expert's weight as a dense matrix."""
    weight: Any = experts.get_submodule(name)
    matrices = to_dense(weight.values, weight.layout).detach().chunk(experts.num_experts)
    return [nn.Parameter(each.clone()) for each in matrices]


def _step(model: nn.Module, *inputs: Tensor) -> Call:
    """Return a call of forward and backward, with gradients of the inputs and all weights."""
    x, index, weights = inputs
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    used = leaves[:1] if isinstance(model, Layer) else leaves
    grad = torch.ones_like(x)
    return lambda: torch.autograd.grad(model(leaves[0], index, leaves[1]), [*used, *model.parameters()], grad)


def _results(model: Callable[..., Tensor], x: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the inputs in float64."""
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = model(leaves[0], index, leaves[1])
    return [each.double() for each in (y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y)))]
