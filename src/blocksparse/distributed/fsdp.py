"""FSDP2's records of the parameters that it shards; only this file uses torch's private names for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..surgery.sharding import is_dtensor

# The attributes that we use of `FSDPParam`, the record of a parameter, in PyTorch 2.10 to 2.15.
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


def record_of(module: nn.Module, name: str) -> Any:
    """Return the record that `fully_shard` has for a parameter of this module; None if it does not shard it.

    Raises:
        BlockSparseError: a DTensor that `fully_shard` did not make, an unsupported version of PyTorch, or a parameter
            that is gathered now.
    """
    record = _find_record(module, name)
    if record is not None:
        return _check_record(record, name)
    if is_dtensor(module._parameters.get(name)):
        expected = "a plain tensor, or one that torch.distributed.fsdp.fully_shard has sharded"
        raise BlockSparseError.expected(name, expected, f"another DTensor (PyTorch {torch.__version__})")
    return None


def _find_record(module: nn.Module, name: str) -> Any:
    """Return FSDP2's record of a parameter of this module, or None."""
    for hook in module._load_state_dict_post_hooks.values():
        # The only way from a module to the record is the hook after loading that `fully_shard` gives each such module.
        for cell in getattr(hook, "__closure__", None) or ():
            record = cell.cell_contents
            info = getattr(record, "_module_info", None) if type(record).__name__ == "FSDPParam" else None
            if getattr(info, "module", None) is module and getattr(info, "param_name", None) == name:
                return record
    return None


def _check_record(record: Any, name: str) -> Any:
    """Return FSDP2's record after a check that it has the attributes used here and that its parameter is sharded."""
    missing = [key for key in _NEEDED if not hasattr(record, key)]
    if missing:
        raise BlockSparseError(
            f"{name} is sharded by FSDP2 of PyTorch {torch.__version__}, whose records have no {', '.join(missing)}: "
            "use PyTorch 2.10 to 2.15"
        )
    if record.sharded_state.name != "SHARDED":
        raise BlockSparseError(
            f"{name} is gathered from all processes: call `reshard()` of the module that fully_shard was applied to"
        )
    return record


def replace_shard(record: Any, local: Tensor, rows: int) -> None:
    """Set a sharded parameter's shard and number of rows in place; clear its gradient."""
    parameter = record.sharded_param
    parameter.grad = None
    _clear_unreduced_gradient(record)
    if rows == parameter.shape[0]:
        parameter.to_local().copy_(local)
    else:
        _resize(record, parameter, local, rows)


def _clear_unreduced_gradient(record: Any) -> None:
    """Clear a gradient that FSDP2 accumulated without reducing it."""
    if isinstance(getattr(type(record), "unsharded_accumulated_grad", None), property):  # PyTorch 2.15 and newer
        gathered = getattr(record, "_unsharded_param", None)
        if gathered is not None:
            gathered.grad = None
    else:
        record.unsharded_accumulated_grad = None


def _resize(record: Any, parameter: Any, local: Tensor, rows: int) -> None:
    """Make FSDP2 use `local` as this rank's shard of the parameter, which now has `rows` rows in all."""
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    # An all-gather needs equal sizes, so shorter shards are padded.
    padded = local.new_zeros(-(-rows // mesh.size(placements.index(record.fsdp_placement))), *local.shape[1:])
    padded[: len(local)] = local
    if getattr(record, "pin_memory", False):
        padded = padded.pin_memory()
    new = sharded_like(parameter, padded[: len(local)], rows)
    parameter.data = new  # sets the sizes only; a DTensor's attributes follow
    parameter._local_tensor, parameter._spec = new._local_tensor, new._spec
    record.sharded_param, record._sharding_spec = parameter, new._spec
    getattr(record, "_sharding_spec_by_dtype", {}).clear()  # a cache of PyTorch 2.15
    record._orig_size, record._contiguous_orig_stride = new.shape, new.stride()
    record.sharded_size, record.contiguous_sharded_stride = local.shape, padded.stride()
    record.padded_sharded_param_size = padded.shape
    record._sharded_param_data = padded.view(-1)
    # The next forward pass allocates the gathered parameter again, with the new size.
    record.all_gather_outputs = []
    record.__dict__.pop("_unsharded_param", None)
    if getattr(record, "post_forward_mesh_info", None) is not None:
        record._init_sharded_post_forward_param_metadata(torch.empty(new.shape, device="meta"))


def sharded_like(tensor: Any, local: Tensor, rows: int) -> Any:
    """Return a DTensor placed like another one, with `rows` rows in all and the shard `local`."""
    shape = torch.Size([rows, *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def leave_out_if_empty(module: nn.Module) -> None:
    """Keep FSDP2 from reducing the gradient of values without a block, which PyTorch rejects.

    Call it in the forward pass.
    """
    values: Any = module._parameters["values"]
    if values.numel() or not values.requires_grad or hasattr(values, "left_out"):
        return
    if (record := _find_record(module, "values")) is not None:
        values.left_out = True
        values.register_post_accumulate_grad_hook(partial(_leave_out, record))


def _leave_out(record: Any, values: Tensor) -> None:
    """Give FSDP2's shard a gradient of zeros on a process without blocks of the weight."""
    values.grad = None
    # With a gradient the optimizer counts this step, as it does on processes that have blocks of the weight.
    record.sharded_param.grad = torch.zeros_like(record.sharded_param)


def hand_over(old: nn.Module, new: nn.Module, parameters: Mapping[Tensor, nn.Parameter]) -> None:
    """Make FSDP2 gather the parameters of `old`, or their replacements, for `new`."""
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
