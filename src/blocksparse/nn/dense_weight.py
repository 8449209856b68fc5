"""The dense weight of a block-sparse module, for code that reads the `weight` of torch.nn's modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from ..errors import BlockSparseError

# Properties of a tensor that are tensors. All other properties are known without the elements.
_TENSORS = {"T", "mT", "H", "mH", "real", "imag", "data", "grad", "_base"}
_FREE = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "get_device", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "dim_order", "is_shared", "is_pinned"),
}
_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
_has_no_memory: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_WRITES = {"__setitem__", "__set__", "__delete__", *(f"__i{name}__" for name in _OPERATORS)}
_MEMORY = "a tensor with memory of its own, not one made of `values`: weight.detach().clone()"
_HOOKS = "hooks on the parameter that it is made of, `values`"
_REFUSED = {
    **dict.fromkeys(("data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__"), _MEMORY),
    **dict.fromkeys(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"), _HOOKS),
}


class DenseWeight(Tensor):
    """A read-only tensor that each operation on its elements computes from the values; dtype and shape cost nothing.

    Operations get a dense tensor, through which gradients reach the values. Views are read-only too, because writes to
    them would be lost.
    """

    _make: Callable[[], Tensor]
    _make_grad: Callable[[], Tensor | None]

    @staticmethod
    def of(
        make: Callable[[], Tensor], shape: Sequence[int], like: Tensor, grad: Callable[[], Tensor | None]
    ) -> DenseWeight:
        """Return a weight with the elements `make()`, the gradient `grad()`, and the dtype and device of `like`."""
        self: DenseWeight = Tensor._make_wrapper_subclass(
            DenseWeight, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        _has_no_memory(self)
        self._make, self._make_grad = make, grad
        return self

    @staticmethod
    def over(tensor: Tensor) -> Tensor:
        """Return a read-only tensor on the memory of another, or that tensor itself inside transforms and modes."""
        if not _is_plain(tensor):
            return tensor
        self = Tensor._make_subclass(DenseWeight, tensor, tensor.requires_grad)
        self._make, self._make_grad = lambda: tensor, lambda: None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, DenseWeight):
            of = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__get__" and of == "grad":
                return tree_map_only(Tensor, DenseWeight.over, first._make_grad())
            if name == "__get__" and of == "is_leaf":
                return False
            if name in _FREE or (name == "__get__" and of not in _TENSORS):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in _REFUSED and not kwargs.get("copy"):
                raise BlockSparseError.expected("weight", _REFUSED[name], name)
        in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        written = (args, kwargs) if kwargs.get("inplace") or kwargs.get("max_norm") is not None else kwargs.get("out")
        if any(isinstance(tensor, DenseWeight) for tensor in tree_iter(first if in_place else written)):
            raise _read_only_error(name)
        made: list[Tensor] = []

        def dense(weight: DenseWeight) -> Tensor:
            made.append(weight._make())
            return made[-1]

        args, kwargs = tree_map_only(DenseWeight, dense, (args, kwargs))
        if name == "__deepcopy__":  # PyTorch refuses to copy a tensor that has a graph
            return args[0].detach().requires_grad_(args[0].requires_grad)
        return tree_map_only((Tensor, np.ndarray), lambda result: _protect(result, made), func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Calls from C++, or with __torch_function__ disabled.
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and any(isinstance(each, DenseWeight) for each in tree_iter(value)):
                raise _read_only_error(func)
        args, kwargs = tree_map_only(DenseWeight, lambda weight: weight._make().detach(), (args, kwargs))
        return func(*args, **kwargs)


def _protect(result: Any, made: list[Tensor]) -> Any:
    """Return the result, made read-only if it shares the memory of one of the tensors made."""
    if isinstance(result, np.ndarray):
        if any(tensor.device.type == "cpu" and result.ctypes.data == tensor.data_ptr() for tensor in made):
            result.flags.writeable = False
        return result
    if _is_plain(result) and any(_is_plain(tensor) and _is_alias_of(result, tensor) for tensor in made):
        return DenseWeight.over(result)
    return result


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is neither of a subclass nor inside a transform."""
    return type(tensor) is Tensor and not _is_wrapped(tensor)


def _read_only_error(what: Any) -> BlockSparseError:
    """Return the error for a write to `weight`, which is computed from `values`."""
    expected = (
        "no write to it or its gradient, which are computed from `values` and their gradient: "
        "write to that parameter (blocksparse.from_dense makes its values); to merge adapters, "
        "call blocksparse.densify(model) first"
    )
    return BlockSparseError.expected("weight", expected, what)


def refuse_weight(name: str, parameter: Any) -> None:
    """Raise a BlockSparseError for a parameter made from a block-sparse weight, as torch.nn.utils.prune registers."""
    if isinstance(parameter, DenseWeight) or hasattr(parameter, "set_layout"):
        weight = name.removesuffix("_orig")
        expected = (
            "a parameter, not a tensor computed from `values`: to prune elements of the stored blocks, call "
            'torch.nn.utils.prune.l1_unstructured(layer, "values", amount); to prune blocks, use '
            "blocksparse.sparsity.GradualBlockPruning or blocksparse.sparsity.rewire"
        )
        raise BlockSparseError.expected(weight, expected, type(parameter).__name__)


def not_assigned(weight: Any) -> BlockSparseError:
    """Make the error for an assignment to a module's weight."""
    expected = (
        "`values` and a layout instead: layer.set_layout(layout, blocksparse.from_dense(weight, layout)), "
        "or layer.values.data.copy_(blocksparse.from_dense(weight, layer.layout))"
    )
    return BlockSparseError.expected("weight", expected, type(weight).__name__)
