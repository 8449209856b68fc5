"""What FSDP2 keeps of a parameter that it shards: all use of torch's private names for it is in this file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError

# What `fully_shard` has kept in its record of a parameter, `FSDPParam`, from PyTorch 2.10 to 2.14.
_NEEDED = (
    "_module_info",
    "_orig_size",
    "_contiguous_orig_stride",
    "_post_load_hook_handle",
    "_sharded_param_data",
    "_sharding_spec",
    "all_gather_outputs",
    "contiguous_sharded_stride",
    "fsdp_placement",
    "padded_sharded_param_size",
    "sharded_param",
    "sharded_size",
    "sharded_state",
    "unsharded_accumulated_grad",
)


def is_dtensor(tensor: Any) -> bool:
    """Whether the tensor is a DTensor; does not import them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that may be sharded, in the same memory; without gradients only."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_wrapped(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module itself, not only to one that it is in."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of the module, before `fully_shard` put one of its own in front of it."""
    kind = type(module)
    return kind.__bases__[-1] if is_wrapped(module) else kind


def record_of(module: nn.Module, name: str) -> Any:
    """What `fully_shard` keeps for this parameter of this module; None where it does not shard it.

    A BlockSparseError for DTensors of other makers, other versions of PyTorch, and parameters that are gathered now.
    """
    record = _find(module, name)
    if record is not None:
        return _checked(record, name)
    if is_dtensor(module._parameters.get(name)):
        expected = "a plain tensor, or one that torch.distributed.fsdp.fully_shard has sharded"
        raise BlockSparseError.expected(name, expected, f"a DTensor of another maker (PyTorch {torch.__version__})")
    return None


def _find(module: nn.Module, name: str) -> Any:
    for hook in module._load_state_dict_post_hooks.values():
        # The only way from a module to the record: a hook after loading, which `fully_shard` gives each such module.
        for cell in getattr(hook, "__closure__", None) or ():
            record = cell.cell_contents
            info = getattr(record, "_module_info", None) if type(record).__name__ == "FSDPParam" else None
            if getattr(info, "module", None) is module and getattr(info, "param_name", None) == name:
                return record
    return None


def _checked(record: Any, name: str) -> Any:
    missing = [key for key in _NEEDED if not hasattr(record, key)]
    if missing:
        expected = f"what FSDP2 of PyTorch 2.10 to 2.14 keeps for a parameter: {', '.join(missing)}"
        raise BlockSparseError.expected(name, expected, f"PyTorch {torch.__version__} without")
    if record.sharded_state.name != "SHARDED":
        expected = "its shard (call `reshard()` of the module that fully_shard was applied to)"
        raise BlockSparseError.expected(name, expected, "the gathered parameter")
    return record


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters in a model, such as the root keeps after a forward pass without a backward pass."""
    for module in model.modules():
        if is_wrapped(module):
            module.reshard()  # type: ignore[operator]


def replace_shard(record: Any, local: Tensor, rows: int) -> None:
    """Gives a sharded parameter, which stays the same object, another shard and `rows` rows; clears its gradient."""
    parameter = record.sharded_param
    parameter.grad = None
    record.unsharded_accumulated_grad = None
    if rows == parameter.shape[0]:
        parameter.to_local().copy_(local)
    else:
        _resize(record, parameter, local, rows)


def _resize(record: Any, parameter: Any, local: Tensor, rows: int) -> None:
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    # All processes gather as many rows; those that have fewer fill up.
    padded = local.new_zeros(-(-rows // mesh.size(placements.index(record.fsdp_placement))), *local.shape[1:])
    padded[: len(local)] = local
    if getattr(record, "pin_memory", False):
        padded = padded.pin_memory()
    new = sharded_like(parameter, padded[: len(local)], rows)
    parameter.data = new  # the sizes; what follows are the attributes of a DTensor
    parameter._local_tensor, parameter._spec = new._local_tensor, new._spec
    record.sharded_param, record._sharding_spec = parameter, new._spec
    record._orig_size, record._contiguous_orig_stride = new.shape, new.stride()
    record.sharded_size, record.contiguous_sharded_stride = local.shape, padded.stride()
    record.padded_sharded_param_size = padded.shape
    record._sharded_param_data = padded.view(-1)
    # The gathered parameter is made again, with the new size, in the next forward pass.
    record.all_gather_outputs = []
    record.__dict__.pop("_unsharded_param", None)
    if getattr(record, "post_forward_mesh_info", None) is not None:
        record._init_sharded_post_forward_param_metadata(torch.empty(new.shape, device="meta"))


def sharded_like(tensor: Any, local: Tensor, rows: int) -> Any:
    """A DTensor on the mesh of another one, with `rows` rows in all, of which `local` are here."""
    shape = torch.Size([rows, *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def leave_out_if_empty(module: nn.Module) -> None:
    """Has FSDP2 reduce no gradient of values without a block, which PyTorch refuses; called in the forward pass."""
    values: Any = module._parameters["values"]
    if values.numel() or not values.requires_grad or hasattr(values, "left_out"):
        return
    if (record := _find(module, "values")) is not None:
        values.left_out = True
        values.register_post_accumulate_grad_hook(partial(_leave_out, record))


def _leave_out(record: Any, values: Tensor) -> None:
    values.grad = None
    # The optimizer counts the step all the same, as it does for the other parts of the weight.
    record.sharded_param.grad = torch.zeros_like(record.sharded_param)


def hand_over(old: nn.Module, new: nn.Module, parameters: Mapping[Tensor, nn.Parameter]) -> None:
    """Has FSDP2 gather a module's parameters, or those that take their places, for the module that takes its place."""
    places = {
        parameter: (module, name)
        for module in new.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    for key in list(old._parameters):
        record = record_of(old, key)
        if record is None:
            continue
        parameter: Any = parameters.get(record.sharded_param, record.sharded_param)
        if parameter is not record.sharded_param:
            _resize(record, parameter, parameter.to_local(), parameter.shape[0])
        info = record._module_info
        info.module, info.param_name = places[parameter]
        record._post_load_hook_handle.remove()
        record._post_load_hook_handle = info.module.register_load_state_dict_post_hook(_after_loading(record))


def _after_loading(record: Any) -> Callable[..., None]:
    return lambda *_: record.reset_sharded_param()
