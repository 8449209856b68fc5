"""Exports models to ONNX, with dense weights or with gathers of stored blocks, as it has no block-sparse product."""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import check_model, is_int
from ..conversion.densify import densify
from ..errors import MAX_NAMED, BlockSparseError, warn_user
from ..files import path_of
from ..nn.lstm import LSTM
from ..nn.module import BlockSparseModule
from ..nn.quantized import QuantizedModule
from ..nn.recurrent import Recurrent
from ..surgery.model_tools import copy_model, evaluation_mode
from ..surgery.replace import replace_modules
from .onnx_gather import with_gathers

# An ONNX file holds at most 2 GiB; if the weights have more bytes than this, they go into a second file.
MAX_IN_FILE = 3 << 29
# The operator set versions that PyTorch's exporter can write.
OPSETS = range(18, 24)

# The ONNX operator of each module, the order of its gates, and the attributes that make it compute the same.
RECURRENT: dict[type[nn.Module], tuple[str, tuple[int, ...], dict[str, Any]]] = {
    nn.LSTM: ("LSTM", (0, 3, 1, 2), {}),
    nn.GRU: ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    nn.RNN: ("RNN", (0,), {}),
}


def export_onnx(
    model: nn.Module,
    args: Any,
    file: str | Path,
    *,
    dynamic_shapes: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    opset: int | None = None,
    check: bool = True,
    sparse: str | None = None,
) -> Path:
    """Write a model, block-sparse or not, as an ONNX file that any ONNX runtime can run.

    By default the file has the weights of `densify`: it computes the same as the model in evaluation mode, at the cost
    of a dense model. `sparse="gather"` writes stored blocks only: a block-sparse linear layer becomes a Gather of its
    inputs and a batched MatMul for each class of rows with similarly many blocks. Recurrent layers become ONNX's LSTM,
    GRU and RNN, for any number of time steps. The model stays as it is.

    Args:
        model: any module that `torch.onnx.export` accepts once it is dense.
        args: inputs to trace it with: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        file: the path to write. Weights above 1.5 GiB go into a second file, `file.data`.
        dynamic_shapes: the sizes that may change, as for `torch.export.export`; `({0: "batch", 1: "time"},)` names two
            axes of the first argument. By default the sizes are those of `args`.
        input_names, output_names: names in the file.
        opset: the version of ONNX's operators in the file, 18 to 23 (default: the one that PyTorch writes).
        check: whether to run the file on `args` and compare it with the model, if onnxruntime is installed (default
            True). bfloat16 is not compared, as onnxruntime does not run it on CPUs.
        sparse: "gather" for linear layers and 1 x 1 convolutions with blocks of at least 8 x 8: their size and time in
            the file follow the density. Other block-sparse layers stay dense there. None, the default, for all dense.

    Returns:
        The path. A SparsityWarning reports the file's size and the layers if block-sparse weights are dense in it.

    Raises:
        BlockSparseError: onnx or onnxscript is not installed; a module without a counterpart in ONNX
            (MultiplicativeLSTM, SmallWorldLSTM, LSTMs with projections, packed sequences, layers in 8 bits); a model
            that PyTorch cannot export; a file that cannot be written, or one that computes something else, which is
            then removed.

    Example:
        x, batch = torch.randn(1, 256), ({0: "batch"},)
        bs.export_onnx(model, x, "model.onnx", dynamic_shapes=batch, sparse="gather")
    """
    check_model(model)
    for name in ("onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise BlockSparseError(f"ONNX files need {name}: pip install onnx onnxscript ({error})") from error
    path = path_of("file", file)
    if opset is not None and not (is_int(opset) and opset in OPSETS):
        expected = f"an int from {OPSETS.start} to {OPSETS.stop - 1}, or None for the one that PyTorch writes"
        raise BlockSparseError.expected("opset", expected, repr(opset))
    if sparse not in (None, "gather"):
        raise BlockSparseError.expected("sparse", '"gather", or None for dense weights', repr(sparse))
    if quantized := [name or "it" for name, module in model.named_modules() if isinstance(module, QuantizedModule)]:
        raise BlockSparseError(
            f"model: layers in 8 bits cannot be exported to ONNX ({', '.join(quantized[:3])}): export the model before "
            "blocksparse.quantize"
        )
    positional = () if isinstance(args, Mapping) else args if isinstance(args, tuple) else (args,)
    named = dict(args) if isinstance(args, Mapping) else {}
    # The exporter would merge two arguments that are the same tensor into one input.
    positional, named = torch.utils._pytree.tree_map_only(Tensor, torch.clone, (positional, named))
    changed = with_gathers(copy_model(model)) if sparse else model
    left = {name or "it": module for name, module in changed.named_modules() if isinstance(module, BlockSparseModule)}
    dense = _exportable(densify(changed, inplace=changed is not model).eval())
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*dense.parameters(), *dense.buffers()))
    try:
        with _quiet(), torch.no_grad():
            torch.onnx.export(
                dense, positional, str(path), kwargs=named, dynamo=True, dynamic_shapes=dynamic_shapes,
                input_names=input_names, output_names=output_names, external_data=size > MAX_IN_FILE, verbose=False,
                opset_version=opset,
            )  # fmt: skip
    except BlockSparseError:
        raise
    except Exception as error:  # the exporter and the model may raise anything
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, BlockSparseError):
            raise cause from error
        if isinstance(cause, OSError):
            raise BlockSparseError.expected("file", "a file that can be written", f"{path} ({cause})") from error
        got = f"{type(cause).__name__}: {str(cause).strip()}"
        raise BlockSparseError.expected("model", "a model that torch.onnx.export accepts", got[:500]) from error
    if check:
        try:
            _check(path, model, positional, named)
        except BlockSparseError:
            for written in (path, path.with_name(path.name + ".data")):
                written.unlink(missing_ok=True)
            raise
    _warn_of_dense_weights(left, path, sparse)
    return path


def _warn_of_dense_weights(left: Mapping[str, BlockSparseModule], path: Path, sparse: str | None) -> None:
    """Warn, with the file's size, if block-sparse weights are dense in it.

    Args:
        left: the block-sparse modules with dense weights in the file, by name.
        path: the file.
        sparse: the argument of `export_onnx`.
    """
    stored = sum(module.values.nbytes for module in left.values())
    dense = sum(module.weight.nbytes for module in left.values())
    if dense <= stored:
        return
    files = [each for each in (path, path.with_name(path.name + ".data")) if each.exists()]
    size = sum(each.stat().st_size for each in files)
    advice = 'To store linear layers sparse, pass sparse="gather". To run all layers sparse, deploy the model itself, '
    advice += "or its torch.export program"
    if sparse:
        names = f"{', '.join(list(left)[:MAX_NAMED])}{', ...' if len(left) > MAX_NAMED else ''}"
        advice = f"sparse={sparse!r} serves linear layers and 1 x 1 convolutions with blocks from 8 x 8, not {names}"
    warn_user(
        f"{path} stores dense weights, with zeros for absent blocks: {size / 1e6:.3g} MB. The block-sparse weights "
        f"take {dense / 1e6:.3g} MB of it instead of {stored / 1e6:.3g} MB, and run as slowly as dense ones. {advice}",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages about optional packages and its own deprecations."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)


def _exportable(model: nn.Module) -> nn.Module:
    """Replace recurrent layers of a dense model by ones that can be exported."""
    new: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        kind: Any = nn.LSTM if type(module) is LSTM else type(module)
        if kind in RECURRENT:
            if getattr(module, "proj_size", 0):
                raise BlockSparseError.expected(name or "model", "an LSTM without proj_size", module.proj_size)
            new[module] = _Recurrent(module, kind)
        elif isinstance(module, Recurrent):
            raise BlockSparseError.expected(name or "model", "an LSTM, GRU or RNN for ONNX", kind.__name__)
    return replace_modules(model, new)


class _Recurrent(nn.Module):
    """A recurrent layer as ONNX operators, for the export only."""

    def __init__(self, module: Any, kind: type[nn.Module]):
        super().__init__()
        self.operator, order, self.attributes = RECURRENT[kind]
        self.size, self.layers, self.batch_first = module.hidden_size, module.num_layers, module.batch_first
        self.suffixes = ("", "_reverse") if module.bidirectional else ("",)
        self.attributes = {**self.attributes, "hidden_size": self.size}
        self.attributes["direction"] = "bidirectional" if module.bidirectional else "forward"
        if kind is nn.RNN:
            self.attributes["activations"] = [module.nonlinearity.capitalize()] * len(self.suffixes)

        def gates(name: str) -> Tensor:
            tensor = getattr(module, name).detach()
            return torch.cat([tensor.chunk(len(order))[gate] for gate in order])

        for layer in range(self.layers):
            for letter, key in (("W", "weight_ih"), ("R", "weight_hh")):
                stacked = torch.stack([gates(f"{key}_l{layer}{suffix}") for suffix in self.suffixes])
                self.register_buffer(f"{letter}{layer}", stacked)
            bias = torch.zeros(len(self.suffixes), 2 * len(order) * self.size).to(stacked)
            if module.bias:
                names = [[f"{key}_l{layer}{suffix}" for key in ("bias_ih", "bias_hh")] for suffix in self.suffixes]
                bias = torch.stack([torch.cat([gates(name) for name in pair]) for pair in names])
            self.register_buffer(f"B{layer}", bias)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return (outputs, final states) as PyTorch's module does, by one ONNX operator per layer."""
        if not isinstance(input, Tensor):
            raise BlockSparseError.expected("input", "a tensor, for ONNX", type(input).__name__)
        single = input.dim() == 2
        x = input.unsqueeze(1) if single else input.transpose(0, 1) if self.batch_first else input
        steps, batch, directions = x.shape[0], x.shape[1], len(self.suffixes)
        has_cell = self.operator == "LSTM"
        shape = directions * self.layers, batch, self.size
        initial = hx if isinstance(hx, tuple) else (hx,)
        if hx is None:
            states = [x.new_zeros(shape) for _ in range(1 + has_cell)]
        else:
            states = [state.unsqueeze(1) if single else state for state in initial]
        finals: list[list[Tensor]] = []
        for layer in range(self.layers):
            weights = [getattr(self, f"{letter}{layer}") for letter in "WRB"]
            begin = [state[directions * layer : directions * (layer + 1)] for state in states]
            y, *last = torch.onnx.ops.symbolic_multi_out(
                self.operator,
                (x, *weights, None, *begin),
                self.attributes,
                dtypes=(x.dtype,) * (2 + has_cell),
                shapes=((steps, directions, batch, self.size), *((directions, batch, self.size),) * (1 + has_cell)),
                version=14,
            )
            x = y.transpose(1, 2).reshape(steps, batch, directions * self.size)
            finals.append(list(last))
        ends = [torch.cat(layers) for layers in zip(*finals, strict=True)]
        if single:
            x, ends = x.squeeze(1), [end.squeeze(1) for end in ends]
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, tuple(ends) if has_cell else ends[0]


def _check(path: Path, model: nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Compare the results of the file and of the model, if onnxruntime is installed."""
    leaves = torch.utils._pytree.tree_leaves
    inputs = [leaf for leaf in leaves((positional, dict(named))) if isinstance(leaf, Tensor)]
    tensors = (*inputs, *model.parameters())
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        return
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    if len(names) != len(inputs):
        expected_count = f"{len(inputs)} inputs, one for each tensor in args (or pass check=False)"
        raise BlockSparseError.expected(str(path), expected_count, len(names))
    results = session.run(None, {name: x.detach().cpu().numpy() for name, x in zip(names, inputs, strict=True)})
    with torch.no_grad(), evaluation_mode(model):
        expected = [leaf for leaf in leaves(model(*positional, **named)) if isinstance(leaf, Tensor)]
    limit = 2e-2 if any(tensor.dtype == torch.float16 for tensor in tensors) else 1e-3
    for at, (ours, theirs) in enumerate(zip(expected, map(torch.as_tensor, results), strict=False)):
        ours, theirs = ours.double().cpu(), theirs.double()
        error = float((ours - theirs).norm() / ours.norm().clamp(min=1e-9)) if ours.shape == theirs.shape else math.inf
        if not error <= limit:
            got = f"a relative error of {error:.2g} in output {at}"
            raise BlockSparseError.expected(str(path), f"the results of the model, within {limit:g}", got)
