"""Targets of whole models from `sparsify`, built with the transformers library and torch.nn.

Weights are random, since speed does not depend on them. Each model is checked against its densified form.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse as bs
from blocksparse.nn.module import BlockSparseModule
from blocksparse_lab.bench.case import OURS, check_errors, relative_error
from targets.rows import RowIterator, format_minimum, race, timing_options, unmeasured_row

# Largest relative L2 error against the dense model of the same weights; 16-bit layers round after each product.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


Made = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class ModelTarget:
    """A model with a number of layers, a density, and the target speed-up over the dense model, if any.

    With `force`, every layer becomes block-sparse; otherwise `sparsify` may leave layers dense that would get slower.
    """

    work: str
    make: Callable[[int, torch.dtype], Made]
    layers: int
    density: float
    least: float | None
    dtype: torch.dtype = torch.float32
    force: bool = True
    needs: str | None = "transformers"


def bert(layers: int, dtype: torch.dtype) -> Made:
    """Return an encoder as wide as BERT-base, and 8 texts of 128 tokens."""
    from transformers import BertConfig, BertModel

    model: nn.Module = BertModel(BertConfig(num_hidden_layers=layers, vocab_size=1000))
    return model.to(dtype), (torch.randint(1000, (8, 128)),)


def llama(layers: int, dtype: torch.dtype) -> Made:
    """Return a decoder with 1,024 features, and one token."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16)
    config.vocab_size = 1000
    model: nn.Module = LlamaModel(config)
    return model.to(dtype), (torch.randint(1000, (1, 1)),)


def lstm(batch: int) -> Callable[[int, torch.dtype], Made]:
    """Return a maker of an LSTM of 256 units with 40 inputs and 160 steps."""

    def make(layers: int, dtype: torch.dtype) -> Made:
        return nn.LSTM(40, 256, layers, batch_first=True).to(dtype), (torch.randn(batch, 160, 40, dtype=dtype),)

    return make


BERT, LLAMA = "BERT-base width, 8 x 128 tokens", "Llama of 1,024 features, one token"
REACH = (
    ModelTarget(BERT, bert, 4, 0.5, None),
    ModelTarget(BERT, bert, 4, 0.25, 4.5),
    ModelTarget(BERT, bert, 4, 0.1, None),
    ModelTarget(BERT, bert, 4, 0.25, None, torch.bfloat16),
    ModelTarget(BERT, bert, 4, 0.1, 4.0, torch.bfloat16),
    ModelTarget(LLAMA, llama, 4, 0.5, None),
    ModelTarget(LLAMA, llama, 4, 0.25, None),
    ModelTarget(LLAMA, llama, 4, 0.1, 5.0),
    ModelTarget("LSTM of 3 x 256, batch 1", lstm(1), 3, 0.5, 1.0, force=False, needs=None),
    ModelTarget("LSTM of 3 x 256, batch 16", lstm(16), 3, 0.5, 1.0, force=False, needs=None),
)


def rows(budget: float, quick: bool = False) -> RowIterator:
    """Measure all targets; `quick` builds one layer and times little, to try the program."""
    for target in REACH:
        dtype = str(target.dtype).removeprefix("torch.")
        work = f"{dtype} inference, {target.work}, density {target.density:g}" + (", forced" if target.force else "")
        if target.needs and find_spec(target.needs) is None:
            yield unmeasured_row(work, format_minimum(target.least, "dense"), f"{target.needs} is not installed")
            continue
        torch.manual_seed(0)
        model, inputs = target.make(1 if quick else target.layers, target.dtype)
        with torch.no_grad():
            model = model.eval()
            sparse = _sparsify(target, model, inputs)
            error = relative_error(_first_tensor(sparse(*inputs)), _first_tensor(bs.densify(sparse)(*inputs)).double())
            check_errors(BOUNDS[target.dtype], {"output": error}, work, against="the densified model")
            calls = {"dense": partial(model, *inputs), OURS: partial(sparse, *inputs)}
            timed = race(calls, **timing_options(budget, quick))
        count = sum(isinstance(module, BlockSparseModule) for module in sparse.modules())
        more = f", {count} weights block-sparse"
        yield timed.row(work, "dense", OURS, "dense", least=target.least, more=more, details={"error": error})


def _sparsify(target: ModelTarget, model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    if target.force:
        return bs.sparsify(model, target.density, scope="layer", force=True)
    with warnings.catch_warnings():  # the row says how many weights are left dense
        warnings.simplefilter("ignore")
        return bs.sparsify(model, target.density, example=inputs)


def _first_tensor(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]
