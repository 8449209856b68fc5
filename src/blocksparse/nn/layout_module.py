"""Modules that hold a layout, and its indices as buffers, of which there must never be two that differ."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting

from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.graph_layout import DynamicLayout, register_indices
from ..state_indices import has_indices

OTHERS = (
    "others, written to this buffer: by DistributedDataParallel, where the layouts of the ranks differ (draw them with "
    "one seed, or load one state first); by a running mean of a model whose layout has changed (take the mean along by "
    "blocksparse.sparsity.sync_ema); or by hand. The values may be mixed up: load values and indices again"
)


INDICES_WANTED = "crow_indices and col_indices, which say where the values belong (or load values by hand)"


class LayoutModule(nn.Module):
    """A module with `values` on a layout, whose state dict has the layout's indices as plain tensors.

    Other indices than the layout's in these buffers, written there by whomever, make the next use of the module raise a
    BlockSparseError: which blocks the values belong to is unknown then.
    """

    _described: tuple[str, ...] = "crow_indices", "col_indices", "values"  # what describes the weight in a state dict
    values: Tensor
    crow_indices: Tensor
    col_indices: Tensor
    # The buffers that were found to hold the layout, and PyTorch's counters of what was written to them until then:
    # comparing these costs half a microsecond. In-place functions count, through `detach()` too, as running means use
    # it, and so does the broadcast with which DistributedDataParallel wraps a model. Its broadcast before each forward
    # pass does not: while several processes train on CPUs the contents are compared in each call. What is written
    # through `.data` or numpy, or by that broadcast on a GPU, is found when the state is saved. Compiled code was
    # checked when it was compiled.
    _written: tuple[Tensor, int, Tensor, int] | None = None
    # Whether the layout, and with it perhaps the number of blocks, has changed since a graph was compiled for it.
    _evolves = _resized = False
    _grid = _block_shape = (0, 0)

    def __init__(self, layout: BlockLayout):
        super().__init__()
        self._layout = layout
        self._number = _numbered(self)

    def reset_layout_buffers(self, device: torch.device | None = None) -> None:
        """Gives the module other buffers, with the indices of its layout, on their device or on another one."""
        with torch.inference_mode(False):
            for name in ("crow_indices", "col_indices"):
                # Copies: tensors that two modules share cannot be saved as safetensors.
                there = device or getattr(self._buffers.get(name), "device", self.values.device)
                self.register_buffer(name, getattr(self._layout, name)().to(there))
        self._trust()

    def _trust(self) -> None:
        crow, col = self.crow_indices, self.col_indices
        self._written = crow, crow._version, col, col._version
        if self._evolves:
            register_indices(self._layout, crow, col)
            if self._resized:
                for tensor in (col, self.values):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @property
    def _stored(self) -> str:
        """For the repr."""
        layout = self._layout
        return f"block_size={layout.block_shape}, nnz={layout.nnz}, density={layout.density:.4g}"

    @property
    def layout(self) -> BlockLayout:
        """The blocks of the weight that `values` holds.

        Raises:
            BlockSparseError: other indices were written to the module's buffers.
        """
        if is_dynamo_compiling():
            if _others_traced(self._number):
                self._check_buffers()
            if self._evolves and not is_exporting():
                crow, col = self.crow_indices, self.col_indices
                return DynamicLayout(crow, col, self._grid, self._block_shape)
            return self._layout
        mine = self.__dict__  # the way through Module is slow
        written, buffers = mine.get("_written"), mine["_buffers"]
        if (
            written is None
            or buffers.get("crow_indices") is not written[0]
            or buffers.get("col_indices") is not written[2]
            or written[0]._version != written[1]
            or written[2]._version != written[3]
            or (_several_processes() and written[0].device.type == "cpu")
        ):
            self._check_buffers()
        return self._layout

    def _become_operand(self, layout: BlockLayout) -> None:
        """Has graphs that are compiled from now on take the layout as an operand, as it has changed under one."""
        self._evolves, self._grid, self._block_shape = True, layout.grid, layout.block_shape
        if layout.nnz != self._layout.nnz:
            # PyTorch takes the sizes of parameters as constants otherwise, even those marked as dynamic.
            torch._dynamo.config.force_parameter_static_shapes = False
            self._resized = True

    def _check_buffers(self) -> None:
        """Raises a BlockSparseError unless the buffers hold the layout, as far as they hold anything.

        Buffers that a running mean has rounded get their indices back.
        """
        others = others_in_buffers(self)
        if others and not holds_mean(self):
            raise BlockSparseError.expected(others, f"those of {self._layout!r}", OTHERS)
        indices = self.crow_indices, self.col_indices
        if all(type(index) is Tensor and not _is_wrapped(index) for index in indices):
            if others or any(index.is_inference() for index in indices):  # these have no version counters
                self.reset_layout_buffers()
            else:
                self._trust()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = _numbered(self)  # a copy's is its own
        self._written = None  # a copy made in inference mode has buffers without counters

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving devices and `to_empty` make new buffers; casts to floating point must not change the indices.
        _, before = self.layout, self.crow_indices
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.crow_indices is not before and type(self.crow_indices) is Tensor:
            self.reset_layout_buffers()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._check_buffers()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        try:
            found = {name: state_dict.get(prefix + name) for name in self._described}
            given = {name: tensor for name, tensor in found.items() if tensor is not None}
            self._adopt(given)
        except BlockSparseError as error:
            errors.append(f"{prefix or type(self).__name__}: {error}")
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
            if "crow_indices" in given and others_in_buffers(self):  # those of an averaged state
                self.reset_layout_buffers()

    def _adopt(self, given: dict[str, Any]) -> None:
        """Takes over the layout of a state dict's tensors, after checking all of it: a refusal changes nothing."""
        raise NotImplementedError

    def _check_blocks(self, values: Any) -> None:
        """Raises a BlockSparseError for values in other blocks: for the module's, their indices would make no sense."""
        mine = self.values.shape[1:]
        if values is not None and values.dim() == self.values.dim() and values.shape[1:] != mine:
            wanted, got = (" x ".join(map(str, sizes)) for sizes in (mine, values.shape[1:]))
            raise BlockSparseError.expected("values", f"blocks of {wanted}, as the module has them", got)


def _several_processes() -> bool:
    distributed = torch.distributed
    return _may_be_several and distributed.is_initialized() and distributed.get_world_size() > 1


_may_be_several = torch.distributed.is_available()


def others_in_buffers(module: Any) -> str | None:
    """The name of a buffer that holds other indices than the layout's; meta and fake tensors hold none."""
    layout = module._layout
    for name, own in (("crow_indices", layout.row_start), ("col_indices", layout.col_of_block)):
        held = _numbers_in(module._buffers.get(name), own)
        if held is None or not (held == own).all():
            return name
    return None


def holds_mean(module: Any) -> bool:
    """Whether the buffers hold a running mean of the layout's indices, which rounding has changed."""
    layout, buffers = module._layout, module._buffers
    crow = _numbers_in(buffers.get("crow_indices"), layout.row_start)
    col = _numbers_in(buffers.get("col_indices"), layout.col_of_block)
    return crow is not None and col is not None and has_indices(layout, crow, col)


def _numbers_in(index: Any, own: np.ndarray) -> np.ndarray | None:
    """The numbers in an index buffer, `own` if it is a tensor without any; None where they cannot be of this shape."""
    if not isinstance(index, Tensor):
        return None
    batched = _is_wrapped(index)
    while _is_wrapped(index):
        index = torch._C._functorch.get_unwrapped(index)
    if type(index) is not Tensor or index.is_meta:
        return own
    if index.is_quantized or index.layout != torch.strided:
        return None
    # Also inside of tracing, fake modes and transforms.
    with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
        index = index.detach().cpu()
        held: np.ndarray = (index.double() if index.is_floating_point() else index).numpy()
    return held if (held.shape[-1:] if batched else held.shape) == own.shape else None


# Modules that graphs were compiled for.
_traced: weakref.WeakSet[LayoutModule] = weakref.WeakSet()
# Every module by its number: before PyTorch 2.13 functions that run while a graph is traced take no modules.
_by_number: weakref.WeakValueDictionary[int, LayoutModule] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _numbered(module: LayoutModule) -> int:
    number = next(_numbers)
    _by_number[number] = module
    return number


def _others_traced(number: int) -> str | None:
    """`others_in_buffers` of the module of this number, while a graph is compiled, which is noted."""
    module = _by_number[number]
    _traced.add(module)
    others = others_in_buffers(module)
    if others and holds_mean(module):
        others = None
    if module._evolves and others is None:
        module._check_buffers()  # whose operands are not known yet where it is a copy
    return others


def was_traced(module: LayoutModule) -> bool:
    """Whether a graph was compiled for the module."""
    return module in _traced


# What torch.compiler.assume_constant_result sets, for which it would load the whole compiler.
others_in_buffers._dynamo_marked_constant = _others_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
holds_mean._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
