"""Language models with recurrent layers against their peers: correct first, then whole steps in alternation.

What is timed is a `CharLM` on random bytes: "train" is forward, cross entropy, backward, clipping and AdamW, the
"inference" all scores without gradients. bfloat16 is autocast, as in training: parameters stay float32.

The peers:
    dense        the same model with dense weights, so wide that it has as many parameters.
    dense-wide   the same model with dense weights, of the same width.
    torch        as dense, with a torch.nn.LSTM in it: cuDNN's on a GPU.
    torch-wide   as dense-wide, with a torch.nn.LSTM in it.

On a GPU a step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from blocksparse.checked import is_int
from blocksparse.errors import BlockSparseError
from blocksparse.measure import Call
from blocksparse.ops.registry import use_backend

from ..machine import machine
from ..models.char_lm import CharLM, CharLMConfig, parameter_count, width_for
from .linear import OURS, CaseResult, LinearBench
from .report import duration, figure_and_axes, plain_ticks, ratio, short, where

PEERS = ("dense", "dense-wide", "torch", "torch-wide")
PASSES = ("train", "inference")

# Relative L2 error against float64 that scores and the gradients of a few steps may have, of each parameter. The
# small-world cell has kinks, and rounding may move a number across one: such gradients differ completely.
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2}
KINKS = 20

# The check takes as many blocks a side as the pattern needs, at least this many, and this many steps.
CHECKED_BLOCKS, CHECKED_STEPS = 9, 4


@dataclass(frozen=True)
class LstmSpec:
    """One piece of work: a language model and its input.

    Args:
        config: of the model.
        batch, seq: texts at once, and bytes of each.
        dtype: "float32", or "bfloat16" by autocast.
        pass_: "train" or "inference".
        narrow: the width of the peers "dense" and "torch"; None for as many parameters.

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

    @property
    def tokens(self) -> int:
        """Bytes of a step."""
        return self.batch * self.seq

    @property
    def pattern(self) -> str:
        """The pattern with what says how dense it is.

        >>> LstmSpec(CharLMConfig(pattern="random", density=0.03)).pattern
        'random density 0.03'
        """
        c = self.config
        said = {"barabasi_albert": f"m {c.m}", "watts_strogatz": f"neighbors {c.neighbors}"}
        return " ".join([c.pattern, *([f"density {c.density:g}"] if c.pattern == "random" else []), *self._of(said)])

    def _of(self, said: dict[str, str]) -> list[str]:
        return [said[self.config.pattern]] if self.config.pattern in said else []

    def small(self) -> LstmSpec:
        """The same at a small size, for the check."""
        c = self.config
        least = {"barabasi_albert": c.m, "watts_strogatz": c.neighbors}.get(c.pattern, 0) + 1
        width = min(c.width, c.block_size * max(CHECKED_BLOCKS, least))
        return replace(self, config=replace(c, width=width), seq=min(self.seq, CHECKED_STEPS), narrow=None)

    def as_dict(self) -> dict[str, Any]:
        """The fields as they go into a JSON file, where `pass_` is "pass"."""
        fields = {name: value for name, value in vars(self).items() if name != "config"}
        return {**asdict(self.config), **{name.rstrip("_"): value for name, value in fields.items()}}

    def __repr__(self) -> str:
        block = "" if self.config.pattern == "dense" else f", block {self.config.block_size}"
        return (
            f"LstmSpec({self.config.cell} {self.config.width}, {self.pattern}{block}, "
            f"batch {self.batch}, seq {self.seq}, {self.dtype} {self.pass_})"
        )


@dataclass(frozen=True)
class LstmResult(CaseResult):
    """The result of one spec. `facts` has the widths and parameters of all contenders."""

    def bytes_per_second(self, name: str = OURS) -> float:
        return self.spec.tokens / self.time(name).median

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        names = self.samples.names
        found = {name: value for name, value in super().as_dict().items() if name != "gflops"}
        return {**found, "bytes_per_second": {name: self.bytes_per_second(name) for name in names}}

    @property
    def operations(self) -> int:
        """Not counted: a step is more than its products."""
        return 0


class LstmBench(LinearBench):
    """Measures specs one after the other, as `LinearBench` does; the peers here are those in `PEERS`.

    >>> result = LstmBench(rounds=3, budget=0.1).run(LstmSpec(CharLMConfig(width=64, embedding=8), batch=2, seq=3))
    >>> result.peers, result.facts["widths"]["dense"]
    (['dense'], 64)
    """

    known_peers = PEERS

    def run(self, spec: LstmSpec, against: Sequence[str] | None = None) -> LstmResult:  # type: ignore[override]
        """Checks a small model of `spec` against float64, then times its steps and those of its peers.

        Raises:
            BlockSparseError: the model is wrong.
        """
        problem = LstmProblem(spec, self.seed, self.device.torch)
        errors = problem.check()
        calls = {OURS: self.device.ready([problem.call(OURS)])}
        refused: dict[str, str] = {}
        for name in self.against if against is None else self._peers(against):
            try:
                call = problem.call(name)
                call()
                calls[name] = self.device.ready([call])
            except Exception as error:  # out of memory, say: the others are still measured
                refused[name] = " ".join(f"{error or type(error).__name__}".split())
        samples = self.alternate(calls, dict.fromkeys(calls, 1))
        layout = spec.config.layout
        blocks = -(-spec.config.width // spec.config.block_size)
        nnz, density = (blocks**2, 1.0) if layout is None else (layout.nnz, layout.density)
        configs = {name: problem.config(name) for name in calls}
        facts = {
            "device": self.device.torch.type,
            "widths": {name: config.width for name, config in configs.items()},
            "parameters": {name: parameter_count(config) for name, config in configs.items()},
        }
        return LstmResult(spec, nnz, density, errors, samples, refused, BOUNDS[spec.dtype], facts)  # type: ignore[arg-type]


class LstmProblem:
    """One spec with its text, and the steps of our model and its peers."""

    def __init__(self, spec: LstmSpec, seed: int, device: torch.device | None = None):
        self.spec, self.seed, self.device = spec, seed, device or torch.device("cpu")

    @cached_property
    def text(self) -> Tensor:
        """Random bytes `[seq + 1, batch]`: those of the step, and what comes after each."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(256, (self.spec.seq + 1, self.spec.batch), generator=generator).to(self.device)

    def config(self, name: str) -> CharLMConfig:
        """The configuration of our model or a peer's."""
        config = self.spec.config
        if name == OURS:
            return config
        dense = replace(config, pattern="dense")
        if name.endswith("-wide"):
            return dense
        narrow = self.spec.narrow
        return width_for(dense, parameter_count(config)) if narrow is None else replace(dense, width=narrow)

    def model(self, name: str) -> CharLM:
        if name.startswith("torch") and self.spec.config.cell != "lstm":
            raise NotImplementedError(f"torch.nn has no such cell as {self.spec.config.cell}")
        kind = _TorchCharLM if name.startswith("torch") else CharLM
        return kind(self.config(name)).to(self.device)

    def call(self, name: str) -> Call:
        """A whole step of our model or a peer's."""
        model, spec = self.model(name), self.spec
        if spec.pass_ == "inference":

            def scores() -> Tensor:
                with torch.no_grad(), self.autocast():
                    return model(self.text[:-1])[0]

            return scores
        return train_step(model, lambda: self.backward(model))

    def loss(self, model: CharLM) -> Tensor:
        with self.autocast():
            scores, _ = model(self.text[:-1])
            return F.cross_entropy(scores.flatten(0, 1), self.text[1:].flatten())

    def backward(self, model: CharLM) -> Tensor:
        """The loss, after its backward pass."""
        loss = self.loss(model)
        loss.backward()
        return loss.detach()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.dtype == "bfloat16")

    def check(self) -> dict[str, float]:
        """The relative L2 errors of a small model's scores and gradients, against the reference in float64.

        Raises:
            BlockSparseError: an error beyond the bound of the dtype.
        """
        small = LstmProblem(self.spec.small(), self.seed, self.device)
        model = small.model(OURS)
        exact = deepcopy(model).double()
        found = small._results(model)
        with use_backend("reference"), _exact(small):
            expected = small._results(exact)
        each = {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in found}
        scores, (worst, gradient) = each.pop("scores"), max(each.items(), key=lambda item: item[1])
        kinks = KINKS if self.spec.config.cell == "smallworld" else 1
        bound = BOUNDS[self.spec.dtype]
        for name, error, limit in (("scores", scores, bound), (f"gradient of {worst}", gradient, kinks * bound)):
            if not error <= limit:
                said = f"a relative L2 error of at most {limit:g} against float64"
                raise BlockSparseError.expected(f"{name} of {small.spec!r}", said, f"{error:g}")
        return {"scores": scores, "gradients": gradient}

    def _results(self, model: CharLM) -> dict[str, Tensor]:
        """Scores and gradients in float64."""
        with torch.no_grad(), self.autocast():
            scores = model(self.text[:-1])[0]
        self.backward(model)
        gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        return {"scores": scores.double(), **gradients}


@contextmanager
def _exact(problem: LstmProblem) -> Iterator[None]:
    spec = problem.spec
    problem.spec = replace(spec, dtype="float32")  # without autocast
    try:
        yield
    finally:
        problem.spec = spec


class _TorchCharLM(CharLM):
    """A CharLM whose recurrent layers are PyTorch's."""

    def __init__(self, config: CharLMConfig):
        super().__init__(config)
        ours = self.recurrent.state_dict()
        self.recurrent = nn.LSTM(config.embedding, config.width, config.layers)
        self.recurrent.load_state_dict(ours)

    def _hidden(self, text, state):
        return self.recurrent(self.embedding(text), state)


def train_step(model: nn.Module, gradients: Call) -> Call:
    """A step of training as one call: `gradients()`, clipping, AdamW. It can be captured as a CUDA graph."""
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


# -- for people ----------------------------------------------------------------------------------------------------


def table(results: Sequence[LstmResult], title: str = "") -> Table:
    """One row per result: our time, bytes per second, and the speed-up over each peer with its quartiles."""
    peers = list(dict.fromkeys(name for result in results for name in (*result.peers, *result.refused)))
    worst = max((error for result in results for error in result.errors.values()), default=0)
    bound = max((result.bound for result in results), default=0)
    caption = (
        f"speed-up: median of the rounds (quartiles); the peer's width below\nrelative error in small: {worst:.1e}"
    )
    out = Table(
        title=title,
        caption=f"{caption}, bound {bound:g}",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("", "density", "time", "bytes/s"):
        out.add_column(name, justify="right", no_wrap=True)
    for name in peers:
        out.add_column(f"over\n{name}", justify="right", min_width=11)
    for result in results:
        cells = [
            result.spec.pattern.partition(" ")[2],
            f"{result.density:.3g}",
            duration(result.time().median),
            f"{result.bytes_per_second():.0f}",
        ]
        for name in peers:
            refused = name not in result.peers
            cells.append(
                "[dim]refused[/]" if refused else f"{ratio(result.speedup(name))}\n{result.facts['widths'][name]}"
            )
        out.add_row(*cells)
    return out


_STYLES = {
    "dense": ("#0072b2", "o"),
    "dense-wide": ("#d55e00", "s"),
    "torch": ("#009e73", "^"),
    "torch-wide": ("#e69f00", "v"),
}


def write_chart(path: Path, results: Sequence[LstmResult], title: str) -> None:
    """A PNG of the speed-up over each peer against density; the bands are the quartiles.

    Raises:
        BlockSparseError: matplotlib is not installed.
    """
    figure, axes = figure_and_axes((7.5, 5.2))
    ordered = sorted(results, key=lambda result: result.density)
    densities = [result.density for result in ordered]
    if any(name.endswith("-wide") for result in results for name in result.peers):
        axes.plot(densities, [1 / density for density in densities], "--", color="0.45", lw=1.2, label="1 / density")
    axes.axhline(1, color="0.2", lw=1)
    for peer, (color, marker) in _STYLES.items():
        points = [result for result in ordered if peer in result.peers]
        if not points:
            continue
        x, spreads = [result.density for result in points], [result.speedup(peer) for result in points]
        axes.plot(x, [s.median for s in spreads], color=color, marker=marker, ms=5, lw=1.8, label=f"over {peer}")
        axes.fill_between(x, [s.low for s in spreads], [s.high for s in spreads], color=color, alpha=0.18, lw=0)
        for result, spread in zip(points, spreads, strict=True):
            # Peers of one width are close to each other: the slower has its number above.
            alike = [p for p in result.peers if p.endswith("-wide") == peer.endswith("-wide")]
            above = spread.median == max(result.speedup(p).median for p in alike)
            place: dict[str, Any] = {"xytext": (0, 6 if above else -13), "textcoords": "offset points", "ha": "center"}
            axes.annotate(short(spread.median), (result.density, spread.median), color=color, size=8.5, **place)
    axes.set(xscale="log", yscale="log", xlabel="density of the recurrent weights", ylabel="speed-up of a step")
    axes.set_title(title, loc="left", size=10)
    plain_ticks(axes)
    axes.minorticks_off()
    axes.set_xticks(densities, [f"{r.density:.3g}\n{r.spec.pattern.partition(' ')[2]}" for r in ordered])
    device = next((result.facts["device"] for result in results), "cpu")
    figure.supxlabel(where(machine(device)), size=7.5, color="0.4", x=0.01, ha="left")
    axes.grid(which="major", color="0.9", lw=0.8)
    axes.margins(x=0.08, y=0.12)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)
