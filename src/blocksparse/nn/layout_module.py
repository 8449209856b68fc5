"""The base of modules with a layout, whose index buffers are compared with the layout."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.graph_layout import DynamicLayout, is_exporting, register_indices
from ..state_indices import has_indices

CHANGED_INDICES = (
    "others, written to this buffer. The values may be mixed up: load values and indices again. Possible causes: a "
    "running mean of a model whose layout has changed (take the mean along by blocksparse.sparsity.sync_ema); "
    "DistributedDataParallel, where layouts of the ranks differ (draw them with one seed, or load one state first); or "
    "your own code"
)


INDICES_REQUIRED = "crow_indices and col_indices, the positions of the values (or copy values without load_state_dict)"


class LayoutModule(nn.Module):
    """A module with `values` on a layout, whose indices are buffers, and so plain tensors in its state dict.

    If these buffers are overwritten with other indices, the positions of the values are unknown, so the next use of the
    module raises a BlockSparseError.
    """

    _state_names: tuple[str, ...] = "crow_indices", "col_indices", "values"  # the weight's tensors in a state dict
    values: Tensor
    crow_indices: Tensor
    col_indices: Tensor
    # The buffers as last compared with the layout, with their version counters, which take half a microsecond to check.
    # In-place operations increase the counters, also through `detach()` (as running means write), and so does the
    # broadcast when DistributedDataParallel wraps a model. Its broadcast before each forward pass does not, so with
    # several processes on CPUs each call compares the contents. Writes through `.data` or numpy, or by that broadcast
    # on a GPU, are detected when the state is saved. Compiled code is checked only when it is compiled.
    _checked: tuple[Tensor, int, Tensor, int] | None = None
    # Whether the layout, and the number of its blocks, have changed since a graph was compiled. If so, graphs compiled
    # from now on take the layout as an input.
    _layout_is_dynamic = _size_is_dynamic = False
    _grid = _block_shape = (0, 0)

    def __init__(self, layout: BlockLayout):
        super().__init__()
        self._layout = layout
        self._id = _assign_id(self)

    def reset_layout_buffers(self, device: torch.device | None = None) -> None:
        """Register new index buffers of the module's layout, by default on the device of the old ones."""
        with torch.inference_mode(False):
            for name in ("crow_indices", "col_indices"):
                # New tensors, because safetensors does not save tensors that two modules share.
                target = device or getattr(self._buffers.get(name), "device", self.values.device)
                self.register_buffer(name, getattr(self._layout, name)().to(target))
        self._record_versions()

    def _record_versions(self) -> None:
        """Record that the index buffers, in their present versions, match the layout.

        If the layout is dynamic, register the buffers for torch.compile, and mark a varying number of blocks.
        """
        crow, col = self.crow_indices, self.col_indices
        self._checked = crow, crow._version, col, col._version
        if self._layout_is_dynamic:
            register_indices(self._layout, crow, col)
            if self._size_is_dynamic:
                for tensor in (col, self.values):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @property
    def _layout_repr(self) -> str:
        """The layout as `repr` of the module shows it."""
        layout = self._layout
        return f"block_size={layout.block_shape}, nnz={layout.nnz}, density={layout.density:.4g}"

    @property
    def layout(self) -> BlockLayout:
        """The positions of the blocks in `values`.

        Raises:
            BlockSparseError: other indices were written to the module's buffers.
        """
        if is_dynamo_compiling():
            return self._layout_in_graph()
        attributes = self.__dict__  # faster than torch.nn.Module's attribute access
        checked, buffers = attributes.get("_checked"), attributes["_buffers"]
        if (
            checked is None
            or buffers.get("crow_indices") is not checked[0]
            or buffers.get("col_indices") is not checked[2]
            or checked[0]._version != checked[1]
            or checked[2]._version != checked[3]
            or (_has_several_processes() and checked[0].device.type == "cpu")
        ):
            self._check_buffers()
        return self._layout

    def _layout_in_graph(self) -> BlockLayout:
        """Return the layout while a graph is compiled: a constant, or an input once the layout has changed."""
        changed = _check_in_graph(self._id)
        if changed:
            raise self._changed_error(changed)
        if self._layout_is_dynamic and not is_exporting():
            return DynamicLayout(self.crow_indices, self.col_indices, self._grid, self._block_shape)
        return self._layout

    def _make_layout_dynamic(self, layout: BlockLayout) -> None:
        """Make the layout an input of graphs that are compiled from now on, because it changes from `layout`'s size."""
        self._layout_is_dynamic, self._grid, self._block_shape = True, layout.grid, layout.block_shape
        if layout.nnz != self._layout.nnz:
            # By default PyTorch compiles the sizes of parameters as constants, even if they are marked as dynamic.
            torch._dynamo.config.force_parameter_static_shapes = False
            self._size_is_dynamic = True

    def _check_buffers(self) -> None:
        """Raise a BlockSparseError unless the buffers have the layout's indices; meta tensors are not checked.

        Indices that a running mean has rounded are restored.
        """
        changed, is_average = compare_buffers(self)
        if changed and not is_average:
            raise self._changed_error(changed)
        indices = self.crow_indices, self.col_indices
        if all(type(index) is Tensor and not _is_wrapped(index) for index in indices):
            if changed or any(index.is_inference() for index in indices):  # inference tensors have no version counter
                self.reset_layout_buffers()
            else:
                self._record_versions()

    def _changed_error(self, changed: str) -> BlockSparseError:
        """Return the error for an index buffer of this name that was overwritten."""
        return BlockSparseError.expected(changed, f"those of {self._layout!r}", CHANGED_INDICES)

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which calls this before it compiles a model."""
        expected = "torch.export.export(model, args) to deploy the model, or torch.compile(model) to run it faster"
        raise BlockSparseError.expected(
            "torch.jit.script", expected, f"a model with a block-sparse {type(self).__name__}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._id = _assign_id(self)  # a copy needs an id of its own
        self._checked = None  # the buffers of a copy made in inference mode have no version counters

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A move to another device and `to_empty` make new buffers. A cast to a float dtype must not change the indices.
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
        """Adopt the layout in the state, then load the tensors; errors are collected as PyTorch does."""
        try:
            entries = {name: state_dict.get(prefix + name) for name in self._state_names}
            loaded = {name: tensor for name, tensor in entries.items() if tensor is not None}
            for name, tensor in loaded.items():
                if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                    got = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
                    raise BlockSparseError.expected(name, "a dense tensor", got)
            self._load_layout(loaded)
        except BlockSparseError as error:
            errors.append(f"{prefix or type(self).__name__}: {error}")
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
            if "crow_indices" in loaded and name_of_changed_buffer(self):  # the state is a running mean
                self.reset_layout_buffers()

    def _load_layout(self, loaded: dict[str, Any]) -> None:
        """Set the layout from the tensors of a state dict, after checking all of them: an error changes nothing."""
        raise NotImplementedError

    def _check_blocks(self, values: Any) -> None:
        """Raise a BlockSparseError if the blocks of `values` have another size than the module's."""
        own = self.values.shape[1:]
        if values is not None and values.dim() == self.values.dim() and values.shape[1:] != own:
            expected, got = (" x ".join(map(str, sizes)) for sizes in (own, values.shape[1:]))
            raise BlockSparseError.expected("values", f"blocks of {expected}, as the module has them", got)


def _has_several_processes() -> bool:
    distributed = torch.distributed
    return _has_distributed and distributed.is_initialized() and distributed.get_world_size() > 1


_has_distributed = torch.distributed.is_available()


def name_of_changed_buffer(module: Any) -> str | None:
    """Return the name of an index buffer that differs from the layout, or None; meta and fake tensors never differ."""
    return compare_buffers(module)[0]


def compare_buffers(module: Any) -> tuple[str | None, bool]:
    """Compare a module's index buffers with its layout.

    Returns:
        The name of a buffer that differs, or None; and whether it is a running mean of the layout's indices, up to
        rounding.
    """
    # Read once, because another thread may change the layout meanwhile.
    layout, buffers = module._layout, dict(module._buffers)
    crow = _read_indices(buffers.get("crow_indices"), layout.row_start)
    col = _read_indices(buffers.get("col_indices"), layout.col_of_block)
    if crow is not None and (crow == layout.row_start).all():
        if col is not None and (col == layout.col_of_block).all():
            return None, False
        changed = "col_indices"
    else:
        changed = "crow_indices"
    return changed, crow is not None and col is not None and has_indices(layout, crow, col)


def _read_indices(index: Any, own: np.ndarray) -> np.ndarray | None:
    """Read an index buffer as an array; return `own` for a tensor without data, None if the shape differs."""
    if not isinstance(index, Tensor):
        return None
    batched = _is_wrapped(index)
    while _is_wrapped(index):
        index = torch._C._functorch.get_unwrapped(index)
    if type(index) is not Tensor or index.is_meta:
        return own
    if index.is_quantized or index.layout != torch.strided:
        return None
    # Reads the data also inside tracing, fake modes and transforms.
    with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
        index = index.detach().cpu()
        array: np.ndarray = (index.double() if index.is_floating_point() else index).numpy()
    return array if (array.shape[-1:] if batched else array.shape) == own.shape else None


# Modules that graphs were compiled for.
_compiled: weakref.WeakSet[LayoutModule] = weakref.WeakSet()
# All modules by id, because before PyTorch 2.13 a constant function of a traced graph cannot have a module argument.
_modules_by_id: weakref.WeakValueDictionary[int, LayoutModule] = weakref.WeakValueDictionary()
_ids = itertools.count()


def _assign_id(module: LayoutModule) -> int:
    """Register a module under a new id, and return the id."""
    number = next(_ids)
    _modules_by_id[number] = module
    return number


def _check_in_graph(module_id: int) -> str | None:
    """Record that a graph is compiled for a module; return the name of an index buffer that differs, or None."""
    module = _modules_by_id[module_id]
    _compiled.add(module)
    changed, is_average = compare_buffers(module)
    if is_average:
        changed = None
    if module._layout_is_dynamic and changed is None:
        module._check_buffers()  # registers the index tensors of a copied module
    return changed


def was_compiled(module: LayoutModule) -> bool:
    """Return whether a graph was compiled for the module."""
    return module in _compiled


# The attribute that torch.compiler.assume_constant_result sets. Calling that function would import the compiler.
_check_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
