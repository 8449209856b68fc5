"""A part of the op contract for one device: some ops and dtypes checked against float64, with nothing timed.

The whole contract is in the tests. These checks are short enough for a memory checker, a GPU that nobody has tried yet,
or a new driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from blocksparse_lab.bench.case import Bench
from blocksparse_lab.bench.conv import ConvBench
from blocksparse_lab.bench.conv_specs import ConvSpec
from blocksparse_lab.bench.device import Device
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import LinearSpec
from blocksparse_lab.bench.lstm import LstmBench, LstmSpec
from blocksparse_lab.models.char_lm import CharLMConfig
from targets.layers import ExpertsBench, ExpertsSpec, GruBench, GruSpec
from targets.transformer import AttentionBench, AttentionSpec, MlpBench, MlpSpec

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Few tokens and many; neither is a multiple of a tile.
TOKENS = (37, 300)
BLOCKS = (8, 32, 64, 128)


def checks(device: Device) -> Iterator[tuple[str, Callable[[], dict[str, tuple[float, float]]]]]:
    """Yield descriptions and calls; a call returns relative errors with their bounds, or raises if one is beyond its
    bound.
    """
    for kind, spec in _cases_to_check():
        yield f"{spec}", partial(_check_case, kind(device=device), spec)


def _cases_to_check() -> Iterator[tuple[type[Bench], object]]:
    """Yield the bench and the spec of each check."""
    for pass_, dtype in itertools.product(("forward", "dgrad", "wgrad"), DTYPES):
        for block, tokens in zip(BLOCKS, itertools.cycle(TOKENS)):
            yield LinearBench, LinearSpec(512, 384, tokens, block, 0.5, dtype, pass_)
    yield LinearBench, LinearSpec(1024, 1024, 40, 32, 0.1, "bfloat16", "train", "barabasi-albert")
    for pass_, dtype in itertools.product(("forward", "dgrad", "wgrad"), ("float32", "bfloat16")):
        for stride in (1, 2, 3):  # dgrad: one launch, one per phase, with a table
            yield ConvBench, ConvSpec(64, 96, 9, 3, stride=stride, density=0.5, dtype=dtype, pass_=pass_)
    for cell, dtype in itertools.product(("lstm", "mlstm", "smallworld"), ("float32", "bfloat16")):
        config = CharLMConfig(cell=cell, width=288, embedding=32, pattern="barabasi_albert", m=3)
        yield LstmBench, LstmSpec(config, 5, 4, dtype)
    yield MlpBench, MlpSpec(40, 0.25, 32, 256, hidden=384)
    for pass_ in ("forward", "train"):
        yield AttentionBench, AttentionSpec(256, 0.4, 32, 32, heads=2, pass_=pass_)
    yield ExpertsBench, ExpertsSpec(40, 0.25, 32, 256, hidden=384, experts=4, chosen=2)
    yield GruBench, GruSpec(40, 0.25, 32, 256, steps=8)


def _check_case(bench: Bench, spec: object) -> dict[str, tuple[float, float]]:
    """Return the errors of a case with their bounds."""
    case = bench.case(spec)
    with case.switches():
        return {name: (error, case.bound_for(name)) for name, error in case.check(bench.seed).items()}
