"""Which modules of the library transformers are experts of the kind that `blocksparse.nn.Experts` computes."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..nn.experts import Experts

MIXTRAL = "transformers.models.mixtral.modeling_mixtral"


def is_experts(module: nn.Module) -> bool:
    """Whether the module has the weights of all of its experts stacked, and computes what MixtralExperts does."""
    kind: Any = type(module)
    if not kind.__module__.startswith("transformers.models.") or "gate_up_proj" not in module._parameters:
        return False
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    stacked = all(weight is not None and weight.dim() == 3 and weight.is_contiguous() for weight in weights)
    return stacked and len(module._parameters) == 2 and _computes_the_same(kind)


@cache
def _computes_the_same(kind: Any) -> bool:
    """Whether the forward of a class is, instruction by instruction, that of MixtralExperts, and this is ours."""
    return _ours_is_mixtrals() and _code(kind) == _code(import_module(MIXTRAL).MixtralExperts)


def _code(kind: Any) -> tuple[Any, ...]:
    forward = getattr(kind.forward, "__wrapped__", kind.forward)  # of what chooses between implementations
    code = forward.__code__
    return code.co_code, code.co_names, code.co_consts


@cache
@torch.no_grad()
def _ours_is_mixtrals() -> bool:
    """Whether the installed version's experts compute what ours do, by trying it."""
    config = SimpleNamespace(
        num_local_experts=3, hidden_size=4, intermediate_size=5, hidden_act="silu", _experts_implementation="eager"
    )
    with torch.device("cpu"), torch.random.fork_rng([]):
        theirs = import_module(MIXTRAL).MixtralExperts(config).double()
        ours = Experts(3, 4, 5, theirs.act_fn, dtype=torch.float64)
        theirs.load_state_dict(ours.state_dict())
        x, index, weights = 50 * torch.randn(6, 4), torch.randint(4, (6, 2)), torch.rand(6, 2)
        x, weights = x.double(), weights.double()
        return torch.allclose(ours(x, index, weights), theirs(x, index, weights), rtol=1e-9, atol=1e-9)
