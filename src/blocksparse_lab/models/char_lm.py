"""A language model over bytes: an embedding, dense or block-sparse recurrent layers, scores of the next byte."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from blocksparse import patterns
from blocksparse.checked import integer, number
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.nn import LSTM, MultiplicativeLSTM, SmallWorldLSTM
from blocksparse.nn.recurrent import State
from blocksparse.ops.recurrent import linear_of

from ..option import option
from .bytes import check_bytes

CELLS = ("lstm", "mlstm", "smallworld")
PATTERNS = ("dense", "barabasi_albert", "watts_strogatz", "random", "random_diagonal", "block_diagonal")
# The patterns that an option acts on.
USED_BY = {
    "m": ("barabasi_albert",),
    "neighbors": ("watts_strogatz",),
    "rewire": ("watts_strogatz",),
    "density": ("random", "random_diagonal", "block_diagonal"),
}
LAYOUTS = ("shared", "separate")
INITS = ("uniform", "identity")


@dataclass(frozen=True)
class CharLMConfig:
    """Configuration of a CharLM."""

    cell: str = option("lstm", "lstm, mlstm (multiplicative) or smallworld (deep transition).")
    width: int = 1024  # hidden units of a layer
    projection: int = option(0, "lstm: features of a projected hidden state; 0: no projection.")
    embedding: int = option(64, "Features of a byte's embedding.")
    layers: int = option(1, "Recurrent layers.")
    depth: int = option(4, "smallworld: internal steps per time step.")
    pattern: str = option(
        "dense",
        "Recurrent weights: dense, barabasi_albert, watts_strogatz, random, random_diagonal (with the blocks on the "
        "diagonal) or block_diagonal.",
    )
    block_size: int = option(32, "Rows and columns of a block.")
    m: int = option(8, "barabasi_albert: edges of each new node.")
    neighbors: int = option(8, "watts_strogatz: neighbors of each node.")
    rewire: float = option(0.2, "watts_strogatz: fraction of rewired edges.")
    density: float = option(
        0.1, "random, random_diagonal and block_diagonal: fraction of blocks; for block_diagonal the nearest 1 / n."
    )
    layouts: str = option("shared", "smallworld: shared by all internal steps, or separate for each.")
    stride: int = option(1, "smallworld: only every stride-th unit connects to inputs and outputs.")
    weight_norm: bool = option(False, "Weight norm of the embedding and the output layer.")
    init: str = option("uniform", "smallworld: initial recurrent weights: uniform, or identity, as in 2017.")
    seed: int = option(0, "Random seed.")

    def __post_init__(self) -> None:
        for name, known in (("cell", CELLS), ("pattern", PATTERNS), ("layouts", LAYOUTS), ("init", INITS)):
            if getattr(self, name) not in known:
                raise BlockSparseError.expected(name, f"one of {', '.join(known)}", repr(getattr(self, name)))
        # Also options that this cell and pattern ignore: they are saved and compared in the run's files.
        for name in ("width", "embedding", "layers", "stride", "block_size", "m", "neighbors"):
            integer(name, getattr(self, name), 1)
        integer("depth", self.depth, 2)
        for name in ("rewire", "density"):
            number(name, getattr(self, name), 0, 1)
        if self.projection and (self.cell, self.pattern) != ("lstm", "dense"):
            given = f"{self.projection} of {self.cell}, {self.pattern}"
            raise BlockSparseError.expected("projection", "0 unless lstm and dense", given)
        if not isinstance(self.weight_norm, bool):
            raise BlockSparseError.expected("weight_norm", "True or False", repr(self.weight_norm))
        integer("projection", self.projection, 0, self.width, "the width")
        if self.stride > 1 and (self.cell != "smallworld" or self.width % self.stride):
            given = f"{self.stride} of {self.cell}, {self.width} wide"
            raise BlockSparseError.expected("stride", "1 unless smallworld and a divisor of the width", given)
        integer("seed", self.seed, 0, 2**32)
        if self.init == "identity" and self.cell != "smallworld":
            raise BlockSparseError.expected("init", "uniform but of a smallworld, which has norms", repr(self.init))
        drawn = self.pattern not in ("dense", "block_diagonal")  # drawn by a seed
        if self.layouts == "separate" and (self.cell != "smallworld" or not drawn):
            given = f"{self.layouts} of {self.cell}, {self.pattern}"
            raise BlockSparseError.expected("layouts", "shared unless smallworld and of a pattern that is drawn", given)
        if self.pattern != "dense" and self.width % self.block_size:
            raise BlockSparseError.expected("width", f"a multiple of the block, {self.block_size}", self.width)

    @property
    def layout(self) -> BlockLayout | None:
        """Blocks of each `[width, width]` weight; None for dense weights."""
        return self._drawn(0)

    @property
    def layouts_by_name(self) -> dict[str, BlockLayout]:
        """Layouts by the name of the weight, for weights with a layout of their own (internal steps without gates)."""
        steps = range(1, self.depth + 1) if self.layouts == "separate" else ()
        drawn = {step: layout for step in steps if (layout := self._drawn(step)) is not None}
        return {f"weight_step{step}_l{k}": layout for step, layout in drawn.items() for k in range(self.layers)}

    @property
    def hidden(self) -> int:
        """Features of the hidden state."""
        return self.projection or self.width

    @property
    def groups(self) -> int:
        """Number of squares of block_diagonal."""
        blocks = max(1, self.width // self.block_size)
        return min(blocks, round(1 / max(self.density, 1 / blocks)))

    def _drawn(self, nth: int) -> BlockLayout | None:
        """Draw the layout of an internal step, or the shared one."""
        width, block, seed = self.width, self.block_size, self.seed + 1_000_003 * nth
        if self.pattern == "barabasi_albert":
            return patterns.barabasi_albert(width, block, m=self.m, seed=seed)
        if self.pattern == "watts_strogatz":
            return patterns.watts_strogatz(width, block, neighbors=self.neighbors, rewire=self.rewire, seed=seed)
        if self.pattern == "random":
            return patterns.random((width, width), block, density=self.density, seed=seed)
        if self.pattern == "random_diagonal":
            diagonal = patterns.block_diagonal((width, width), block)
            rest = max(0.0, self.density - diagonal.density)
            return diagonal | patterns.random((width, width), block, density=rest, seed=seed)
        if self.pattern == "block_diagonal":  # 1 / density squares, unconnected
            blocks = width // block
            group = torch.arange(blocks, device="cpu") * self.groups // blocks
            return BlockLayout(group[:, None] == group, block)
        return None


class CharLM(nn.Module):
    """Scores of the next byte after each byte of a text: embedding, recurrent layers, a dense linear layer.

    The configuration's seed draws the weights, without use of the global generator.

    Shapes: integer bytes `[steps, batch]` to logits `[steps, batch, 256]` and the final state: h
    `[layers, batch, width]`, or smaller with a projection, and c `[layers, batch, width]`.

    Example:
        >>> import torch
        >>> from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
        >>> model = CharLM(CharLMConfig(width=512, pattern="barabasi_albert", m=2))
        >>> logits, (h, c) = model(torch.randint(256, (20, 3)))
        >>> logits.shape, c.shape
        (torch.Size([20, 3, 256]), torch.Size([1, 3, 512]))

    Source: Radford, Jozefowicz, Sutskever, Learning to generate reviews and discovering sentiment (2017); Gray,
    Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """

    def __init__(self, config: CharLMConfig):
        super().__init__()
        self.config = config
        sizes = config.embedding, config.width, config.layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.embedding = nn.Embedding(256, config.embedding)
            if config.cell == "lstm":
                self.recurrent: nn.Module = LSTM(*sizes, proj_size=config.projection, layout=config.layout)
            elif config.cell == "mlstm":
                self.recurrent = MultiplicativeLSTM(*sizes, layout=config.layout)
            else:
                self.recurrent = SmallWorldLSTM(
                    *sizes,
                    depth=config.depth,
                    stride=config.stride,
                    layout=config.layout,
                    layouts=config.layouts_by_name,
                )
            self.outlet = nn.Linear(config.hidden // config.stride, 256)
            if config.weight_norm:
                self._normalize_weights()
        if config.init == "identity":
            self._draw_identities()

    def initial_state(self, batch: int) -> State:
        """Return zero h `[layers, batch, hidden]` and c `[layers, batch, width]`; c is always float32."""
        weight = self.embedding.weight
        sizes = self.config.layers, batch
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        # Not weight.new_zeros, which would be sharded like the weight.
        h = torch.zeros(*sizes, self.config.hidden, dtype=weight.dtype, device=weight.device)
        return h, torch.zeros(*sizes, self.config.width, dtype=wide, device=weight.device)

    @torch.no_grad()
    def _normalize_weights(self) -> None:
        """Apply weight norm, with one norm per byte, initially 1."""
        for part in (self.embedding, self.outlet):
            weight_norm(part)
            part.get_parameter("parametrizations.weight.original0").fill_(1)

    @torch.no_grad()
    def _draw_identities(self) -> None:
        """Make the products from units to units the identity, where there are blocks; norms set their scale."""
        width = self.config.width
        for name, parameter in self.recurrent.named_parameters():
            if "weight_step" in name or "weight_gates" in name:
                parameter.zero_()
                layout = getattr(self.recurrent.get_submodule(name.rpartition(".")[0]), "layout", None)
                if layout is None:
                    for square in parameter.split(width):
                        square.fill_diagonal_(1)
                else:
                    on = layout.row_of_block % layout.grid[1] == layout.col_of_block
                    parameter[torch.from_numpy(on)] = torch.eye(layout.block_shape[0])

    def outputs(self, text: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the hidden state after each byte, `[time, batch, hidden]`, and the final state, without scores."""
        check_bytes("text", text)
        state = state or self.initial_state(text.shape[1])
        return self.recurrent(text.long(), state, table=self.embedding.weight)

    def forward(self, text: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return (scores `[steps, batch, 256]` of the next bytes, new state) for bytes `[steps, batch]`."""
        y, state = self.outputs(text, state)
        y = y[..., :: self.config.stride]
        if type(self.outlet) is not nn.Linear:  # block-sparse, or with weight norm
            return self.outlet(y), state
        return linear_of(y.flatten(0, 1), self.outlet.weight, None, self.outlet.bias).unflatten(0, y.shape[:2]), state


def parameter_count(config: CharLMConfig) -> int:
    """Count the parameters of a CharLM with this configuration, such as the published sentiment neuron's:

    >>> from blocksparse_lab.models.char_lm import CharLMConfig, parameter_count
    >>> parameter_count(CharLMConfig(cell="mlstm", width=4096))
    86319360
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in CharLM(config).parameters())


def least_parameters(config: CharLMConfig) -> float:
    """Return a lower bound on a CharLM's parameters, without building it."""
    nodes = max(1, config.width // config.block_size)
    # Each node of a graph adds this many edges, some of which may exist.
    fraction = {
        "barabasi_albert": config.m / nodes,
        "watts_strogatz": config.neighbors / nodes,
        "random": config.density,
        "random_diagonal": max(config.density / 2, 1 / nodes),
        "block_diagonal": 1 / config.groups,
    }.get(config.pattern, 1)
    squares = {"lstm": 4, "mlstm": 5, "smallworld": config.depth + 3}[config.cell]
    recurrent = squares * config.width * config.hidden * max(0, min(1, fraction))
    return config.layers * (recurrent + config.width) + 256 * (config.embedding + config.hidden // config.stride)


def multiply_adds(config: CharLMConfig) -> int:
    """Count multiply-adds per byte: one per weight of a product; the embedding is a look-up."""
    with torch.device("meta"):
        model = CharLM(config)
    weights = (p.numel() for name, p in model.recurrent.named_parameters() if "weight_" in name)
    return sum(weights) + model.outlet.weight.numel()


def width_for(config: CharLMConfig, params: int) -> CharLMConfig:
    """Return the configuration whose width makes parameter_count nearest to `params`.

    Widths are multiples of the block (8 for dense weights) and of the stride.

    >>> from blocksparse_lab.models.char_lm import CharLMConfig, width_for
    >>> width_for(CharLMConfig(cell="mlstm"), 86_319_360).width
    4096
    """
    step = math.lcm(8 if config.pattern == "dense" else config.block_size, config.stride)
    # A graph needs more blocks than a node has edges.
    least = {"barabasi_albert": config.m + 1, "watts_strogatz": config.neighbors + 1}.get(config.pattern, 1)
    least = max(least, config.projection // step + 1, math.ceil(2 * config.stride / step) if config.stride > 1 else 1)

    def count(steps: int) -> int:
        return parameter_count(replace(config, width=steps * step))

    low, high = least, max(2 * least, math.ceil(math.sqrt(max(params, 1)) / step))
    if count(low) > params:
        raise BlockSparseError.expected("params", f"{count(low):,} or more for {config}", f"{params:,}")
    while count(high) < params:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= params else (low, middle)
    best = min(low, high, key=lambda steps: abs(count(steps) - params))
    return replace(config, width=best * step)
