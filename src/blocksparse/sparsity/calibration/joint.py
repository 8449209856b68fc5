"""Blocks of several layers fitted together, so that their layers make up for each other's errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...errors import BlockSparseError
from ...surgery.model_tools import evaluation_mode, uncompiled
from ..distillation import compare
from .calibrate import byte_count, observe, parts_of
from .passes import MAX_BYTES
from .sequences import train_by_adam

# Steps of Adam and the samples of each. Fewer steps if all of them would take more floating-point operations; none if
# that leaves too few to gain much, as for large convolutions.
STEPS, SAMPLES, MAX_FLOPS, MIN_STEPS = 300, 8, 3e12, 100
# This fraction of the samples is left out, to find out whether the fit reduces the error.
HELD_OUT = 1 / 8

# Arguments that calls do not change. Others may have a state, so blocks with such arguments are not fitted.
PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)

Record = tuple[tuple[Any, ...], dict[str, Any], Tensor]
"""The arguments of a block's call, by position and by name, and its output."""


def find_blocks(model: nn.Module, layers: Collection[str]) -> list[str]:
    """Return the names of repeated modules, such as the blocks of a transformer, that contain several of these layers.

    >>> import torch
    >>> from blocksparse.sparsity.calibration.joint import find_blocks
    >>> block = torch.nn.TransformerEncoderLayer(8, 2, 16)
    >>> model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    >>> find_blocks(model, ["layers.0.linear1", "layers.0.linear2", "layers.1.linear1", "layers.1.linear2"])
    ['layers.0', 'layers.1']
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or name.startswith(
            tuple(f"{each}." for each in found)
        ):
            continue
        children = [f"{name}.{key}".lstrip(".") for key, _ in module.named_children()]
        several = [each for each in children if sum(layer.startswith(f"{each}.") for layer in layers) > 1]
        found += several if len(several) > 1 else []
    return found


def fit_block(
    model: nn.Module,
    dense: nn.Module,
    name: str,
    batches: list[Any],
    trained: Mapping[str, Tensor | None],
    multiplications: float,
) -> None:
    """Change parameters of a block such that its outputs come close to those of the dense block.

    Its inputs are those of the pruned model. The parameters stay as they are if that does not reduce the error on
    samples that were left out, if a batch does not call the block once, and in 16 bits.

    Args:
        model, dense: the pruned and the dense model.
        name: the name of the block, "" for the whole model.
        batches: inputs of the models.
        trained: the parameters to change, by name in the block, with a mask of the stored weights, or None for all.
        multiplications: the average number per sample in the block's products.
    """
    block = model.get_submodule(name)
    parameters = {key: block.get_parameter(key) for key in trained}
    if not all(p.dtype in (torch.float32, torch.float64) and not p.is_inference() for p in parameters.values()):
        return
    steps = min(STEPS, int(MAX_FLOPS / (6 * SAMPLES * multiplications + 1)))  # forward, and twice as many backward
    if steps < MIN_STEPS:
        return
    try:
        records, targets = _record_pairs(model, dense, name, list(parts_of(batches, SAMPLES)))
    except BlockSparseError:  # not all arguments have an axis of samples
        records, targets = _record_pairs(model, dense, name, batches)
    if not records or len(records) != len(targets):
        return
    if any(output.shape != target.shape for (*_, output), (*_, target) in zip(records, targets, strict=True)):
        return  # a router sends other rows to the block
    records = [(args, kwargs, target[2]) for (args, kwargs, _), target in zip(records, targets, strict=True)]
    old = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    modes = {parameter: parameter.requires_grad for parameter in block.parameters()}
    try:
        with torch.inference_mode(False), torch.enable_grad(), evaluation_mode(block), uncompiled():
            for parameter in modes:
                parameter.requires_grad_(False)
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            if not _call(block, records[0]).requires_grad:  # the outputs do not depend on the parameters
                return
            fitted, left_out = _divide(records)
            before = _error(block, left_out, not name)
            _train(block, fitted, parameters, trained, steps, not name)
            improved = _error(block, left_out, not name) < before
    finally:
        for parameter, mode in modes.items():
            parameter.requires_grad_(mode)
    if not improved:
        for key, parameter in parameters.items():
            parameter.detach().copy_(old[key])


def _record_pairs(model: nn.Module, dense: nn.Module, name: str, chunks: list[Any]) -> list[list[Record]]:
    """Return what `_record` does for both models, of as many chunks as take 256 MiB."""
    first = _record(dense, name, chunks[:1])
    chunks = chunks[: max(1, MAX_BYTES // max(1, byte_count(tree_leaves(first))))]
    return [_record(each, name, chunks) for each in (model, dense)]


def _divide(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """Return the calls to fit to, and those to test on; the same if there is only one."""
    count = max(1, int(HELD_OUT * len(records)))
    return (records, records) if len(records) == 1 else (records[:-count], records[-count:])


def _record(model: nn.Module, name: str, chunks: list[Any]) -> list[Record]:
    """Return the arguments and outputs of a block; nothing if a chunk does not call it once and get a tensor."""
    records: list[Record] = []
    calls = 0

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal calls
        calls += 1
        args, kwargs = tree_map(lambda leaf: None if _is_cache(leaf) else leaf, (args, kwargs), is_leaf=_is_cache)
        is_plain = all(isinstance(leaf, PLAIN) for leaf in tree_leaves((args, kwargs)))
        if is_plain and (first := _first_tensor(output)) is not None:
            records.append((args, kwargs, first.detach()))

    handle = model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    try:
        observe(model, chunks, [], lambda module, args: None)
    finally:
        handle.remove()
    return records if calls == len(records) == len(chunks) else []


def _is_cache(leaf: Any) -> bool:
    """Return whether an argument is a cache of keys and values, as of transformers: calls would add to it again."""
    return type(leaf).__name__.endswith("Cache")


def _first_tensor(output: Any) -> Tensor | None:
    """Return the first floating-point tensor of an output that is no loss, or None."""
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next((leaf for leaf in leaves if leaf.dim() > 1), None)


def _call(block: nn.Module, record: Record) -> Tensor:
    """Call a block on recorded arguments; it may change the tensors in place."""
    args, kwargs = tree_map_only(Tensor, torch.clone, record[:2])
    output = _first_tensor(block(*args, **kwargs))
    if output is None:  # the recorded call returned one
        raise BlockSparseError(
            f"data: {type(block).__name__} returned no tensor when it was called on its inputs again."
        )
    return output


def _train(
    block: nn.Module,
    records: list[Record],
    parameters: Mapping[str, nn.Parameter],
    masks: Mapping[str, Tensor | None],
    steps: int,
    is_model: bool,
) -> None:
    """Train parameters of a block or model by Adam to give the dense outputs; masked values stay 0."""
    generator = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        record = records[int(torch.randint(len(records), (), generator=generator, device="cpu"))]
        return _loss(block, record, is_model)

    train_by_adam(parameters, masks, steps, loss)


def _loss(block: nn.Module, record: Record, is_model: bool) -> Tensor:
    """Return the normalised squared error of a block's output.

    The output of a model may be logits, of which some differences matter more: the divergence of their softmax counts
    too.
    """
    output, target = _call(block, record), record[2]
    loss = compare(output, target, "mse")
    is_vector = is_model and target.dim() < 4 and target.shape[-1] > 1
    return loss + compare(output, target, "kl") if is_vector else loss


@torch.no_grad()
def _error(block: nn.Module, records: list[Record], is_model: bool) -> float:
    """Return the summed loss of a block's outputs."""
    return sum(float(_loss(block, record, is_model)) for record in records)
