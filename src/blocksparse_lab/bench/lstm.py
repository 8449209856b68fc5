"""Compare language models with recurrent layers: check a small model, then time whole steps in alternation.

The model is a `CharLM` on random bytes. A "train" step is forward, cross entropy, backward, clipping and AdamW; an
"inference" step is all scores without gradients. bfloat16 means autocast, as in training: parameters stay float32.

The peers:
    dense        the same model with dense weights, with a width that gives it as many parameters as ours.
    dense-wide   the same model with dense weights, of the same width.
    torch        as dense, with a torch.nn.LSTM in it: cuDNN's on a GPU.
    torch-wide   as dense-wide, with a torch.nn.LSTM in it.

On a GPU a step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.checked import is_int
from blocksparse.errors import BlockSparseError
from blocksparse.measure import Call
from blocksparse.ops.registry import use_backend

from ..models.char_lm import CharLM, CharLMConfig, parameter_count, width_for
from .case import OURS, Bench, Case, check_errors, forward

PEERS = ("dense", "dense-wide", "torch", "torch-wide")
PASSES = ("train", "inference")

# Largest relative L2 error against float64 of scores and of each parameter's gradient, over a few steps. The
# small-world cell has kinks: rounding across one changes a gradient completely, so KINKS times more is accepted.
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2}
KINKS = 20

# The checked model has at least this many blocks a side, or what the pattern needs, and runs this many steps.
CHECKED_BLOCKS, CHECKED_STEPS = 9, 4


@dataclass(frozen=True)
class LstmSpec:
    """One pass of a language model and the size of its input.

    With `dtype` "bfloat16" the model runs under autocast. `narrow` is the width of the peers "dense" and "torch"; by
    default it gives them as many parameters as ours.

    >>> LstmSpec(CharLMConfig(width=2048, pattern="barabasi_albert"))
    LstmSpec(lstm 2048, barabasi_albert m 8, block 32, batch 64, seq 64, float32 train)
    """

    config: CharLMConfig
    batch: int = 64
    seq: int = 64
    dtype: str = "float32"
    pass_: str = "train"
    narrow: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            if not is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise BlockSparseError.expected(name, "a positive int", repr(getattr(self, name)))
        for name, known in (("dtype", tuple(BOUNDS)), ("pass_", PASSES)):
            if getattr(self, name) not in known:
                raise BlockSparseError.expected(
                    name.rstrip("_"), f"one of {', '.join(known)}", repr(getattr(self, name))
                )

    products = 0  # operations are not counted: a step does more than its products

    @property
    def block(self) -> int:
        return self.config.block_size

    @property
    def tokens(self) -> int:
        """The bytes of text in a step."""
        return self.batch * self.seq

    @property
    def pattern(self) -> str:
        """The name of the pattern with the parameter that sets its density.

        >>> LstmSpec(CharLMConfig(pattern="random", density=0.03)).pattern
        'random density 0.03'
        """
        c = self.config
        parameter = dict.fromkeys(("random", "random_diagonal", "block_diagonal"), f"density {c.density:g}")
        parameter |= {"barabasi_albert": f"m {c.m}", "watts_strogatz": f"neighbors {c.neighbors}"}
        return " ".join([c.pattern, *([parameter[c.pattern]] if c.pattern in parameter else [])])

    def small(self) -> LstmSpec:
        """Return a small spec for the check."""
        c = self.config
        least = {"barabasi_albert": c.m, "watts_strogatz": c.neighbors}.get(c.pattern, 0) + 1
        width = min(c.width, c.block_size * max(CHECKED_BLOCKS, least))
        return replace(self, config=replace(c, width=width), seq=min(self.seq, CHECKED_STEPS), narrow=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file, with `pass_` as "pass"."""
        fields = {name: value for name, value in vars(self).items() if name != "config"}
        return {**asdict(self.config), **{name.rstrip("_"): value for name, value in fields.items()}}

    def __repr__(self) -> str:
        block = "" if self.config.pattern == "dense" else f", block {self.config.block_size}"
        return (
            f"LstmSpec({self.config.cell} {self.config.width}, {self.pattern}{block}, "
            f"batch {self.batch}, seq {self.seq}, {self.dtype} {self.pass_})"
        )


class LstmCase(Case):
    """Steps of our model and its peers on one text; the check is of a small model."""

    peers = PEERS

    def __init__(self, spec: LstmSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        self.layout, self.bound = spec.config.layout, BOUNDS[spec.dtype]

    @cached_property
    def text(self) -> Tensor:
        """Random bytes `[seq + 1, batch]`: the input of the step and the byte after each."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(256, (self.spec.seq + 1, self.spec.batch), generator=generator).to(self.device)

    def config(self, name: str) -> CharLMConfig:
        """Return the configuration of our model or of a peer's."""
        config = self.spec.config
        if name == OURS:
            return config
        dense = replace(config, pattern="dense")
        if name.endswith("-wide"):
            return dense
        narrow = self.spec.narrow
        return width_for(dense, parameter_count(config)) if narrow is None else replace(dense, width=narrow)

    def model(self, name: str) -> CharLM:
        """Return our model or a peer's."""
        if name.startswith("torch") and self.spec.config.cell != "lstm":
            raise NotImplementedError(f"torch.nn has no such cell as {self.spec.config.cell}")
        kind = _TorchCharLM if name.startswith("torch") else CharLM
        if name == OURS:
            with use_backend("reference"):  # available on every machine
                model = kind(self.config(name))
            return model.to(self.device)
        with self.device:  # building wide peers on the host takes half a minute
            return kind(self.config(name))

    @property
    def stored(self) -> tuple[int, float]:
        blocks = -(-self.spec.config.width // self.spec.block)
        return (blocks**2, 1.0) if self.layout is None else super().stored

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return widths and parameter counts of the contenders."""
        configs = {name: self.config(name) for name in names}
        return {
            "widths": {name: config.width for name, config in configs.items()},
            "parameters": {name: parameter_count(config) for name, config in configs.items()},
        }

    def call(self, name: str, copy: int = 0) -> Call:
        model, spec = self.model(name), self.spec
        if spec.pass_ == "inference":
            return forward(self.scores, model)
        return train_step(model, lambda: self.backward(model))

    def scores(self, model: CharLM) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.dtype == "bfloat16"):
            return model(self.text[:-1])[0]

    def backward(self, model: CharLM) -> Tensor:
        """Run the backward pass and return the loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.dtype == "bfloat16"):
            loss = F.cross_entropy(self.scores(model).flatten(0, 1), self.text[1:].flatten())
        loss.backward()
        return loss.detach()

    def check(self, seed: int = 0) -> dict[str, float]:
        """Return errors by name of a small model's scores and gradients against the reference in float64."""
        small = LstmCase(self.spec.small(), self.seed, self.device)
        model = small.model(OURS)
        exact = deepcopy(model).double()
        found = small._results(model)
        small.spec = replace(small.spec, dtype="float32")  # without autocast
        with use_backend("reference"):
            expected = small._results(exact)
        each = {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in found}
        scores, (worst, gradient) = each.pop("scores"), max(each.items(), key=lambda item: item[1])
        check_errors(self.bound, {"scores": scores}, self.spec.small())
        check_errors(self.bound_for("gradients"), {f"gradient of {worst}": gradient}, self.spec.small())
        return {"scores": scores, "gradients": gradient}

    def bound_for(self, name: str) -> float:
        return self.bound * (KINKS if name == "gradients" and self.spec.config.cell == "smallworld" else 1)

    def _results(self, model: CharLM) -> dict[str, Tensor]:
        """Return scores and gradients in float64."""
        with torch.no_grad():
            scores = self.scores(model)
        self.backward(model)
        gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        return {"scores": scores.double(), **gradients}


class LstmBench(Bench):
    """Measures whole steps of language models.

    >>> result = LstmBench(rounds=3, budget=0.1).run(LstmSpec(CharLMConfig(width=64, embedding=8), batch=2, seq=3))
    >>> result.peers, result.facts["widths"]["dense"]
    (['dense'], 64)
    """

    kind = LstmCase


class _TorchCharLM(CharLM):
    """A CharLM with PyTorch's recurrent layers."""

    def __init__(self, config: CharLMConfig):
        super().__init__(config)
        ours = self.recurrent.state_dict()
        self.recurrent = nn.LSTM(config.embedding, config.width, config.layers)
        self.recurrent.load_state_dict(ours)

    def outputs(self, text, state=None):
        return self.recurrent(self.embedding(text), state)


def train_step(model: nn.Module, gradients: Call) -> Call:
    """Return one training step as a call: `gradients()`, clipping, AdamW; a CUDA graph can capture it."""
    parameters = list(model.parameters())
    on_gpu = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True, capturable=on_gpu)

    def step() -> object:
        optimizer.zero_grad()
        result = gradients()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return result

    return step
