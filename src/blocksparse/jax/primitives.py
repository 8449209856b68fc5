"""The two products as primitives of JAX: `linear` and `linear_wgrad`, each the derivative of the other.

Both are linear in each of their two operands, and their derivatives are calls of the same two. So every order of
derivative exists, forward and reverse. Operands have the number of products, `batch`, as their first axis:

- x `[batch, tokens, in]`, values `[batch, nnz, block_out, block_in]`, bias `[out]`, or `[0]` for none;
- indices int32: row starts `[batch, out_blocks + 1]`, block columns `[batch, nnz]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import compiled_core
from ..errors import BlockSparseError

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda y: y,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}

linear_p = Primitive("blocksparse_linear")
linear_wgrad_p = Primitive("blocksparse_linear_wgrad")

Operands = Sequence[Any]


def linear(
    x: jax.Array, values: jax.Array, bias: jax.Array | None, indices: tuple[jax.Array, jax.Array], in_blocks: int,
    transposed: bool, activation: str = "none",
) -> jax.Array:  # fmt: skip
    """Return activation(x W^T + bias) of each product, `[batch, tokens, out]`, or x W if `transposed`."""
    bias = jnp.zeros(0, x.dtype) if bias is None else bias
    return _bind(linear_p, x, values, bias, *indices, in_blocks=in_blocks, transposed=transposed, activation=activation)


def linear_wgrad(grad: jax.Array, x: jax.Array, indices: tuple[jax.Array, jax.Array], in_blocks: int) -> jax.Array:
    """Return the stored blocks of grad^T x of each product, `[batch, nnz, block_out, block_in]`."""
    return _bind(linear_wgrad_p, grad, x, *indices, in_blocks=in_blocks)


def _bind(primitive: Primitive, *operands: jax.Array, **params: Any) -> jax.Array:
    """Bind a primitive with the instruction set in use, and operands that vary over the same axes of `shard_map`."""
    axes = [_varying(jax.typeof(operand)) for operand in operands]
    every = frozenset().union(*axes)
    operands = tuple(_vary(operand, tuple(every - own)) for operand, own in zip(operands, axes, strict=True))
    return primitive.bind(*operands, isa=compiled_core.isa(), **params)


# -- shapes --------------------------------------------------------------------------------------------------------


def _linear_shape(x: Any, values: Any, bias: Any, start: Any, col: Any, *, in_blocks: int, transposed: bool,
                  **params: Any) -> Any:  # fmt: skip
    blocks, size = (in_blocks, values.shape[3]) if transposed else (start.shape[1] - 1, values.shape[2])
    return _aval(x, (*x.shape[:2], blocks * size))


def _linear_wgrad_shape(grad: Any, x: Any, start: Any, col: Any, *, in_blocks: int, **params: Any) -> Any:
    block = grad.shape[2] // (start.shape[1] - 1), x.shape[2] // in_blocks
    return _aval(x, (x.shape[0], col.shape[1], *block))


def _aval(like: Any, shape: tuple[int, ...]) -> Any:
    """Return an abstract array with the dtype and the varying axes of another."""
    spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
    return like.update(shape=shape, sharding=like.sharding.update(spec=spec), weak_type=False)


def _varying(aval: Any) -> frozenset[Any]:
    """Return the axes of `shard_map` over which an array varies."""
    axes = aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", frozenset())
    return frozenset(axes)


def _vary(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Return x as an array that varies over these axes too; the gradient is then summed over them."""
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


linear_p.def_abstract_eval(_linear_shape)
linear_wgrad_p.def_abstract_eval(_linear_wgrad_shape)

# -- calls of the core ---------------------------------------------------------------------------------------------


def _lower(target: str, context: Any, *operands: Any, in_blocks: int, **attributes: Any) -> Any:
    _check_unsharded(context.module_context.axis_context)
    return jax.ffi.ffi_lowering(target)(context, *operands, in_blocks=np.int64(in_blocks), **attributes)


def _check_unsharded(axes: Any) -> None:
    """Raise a BlockSparseError if XLA would have to cut a product, which it cannot: it would gather all operands."""
    devices = getattr(axes, "num_devices", None) or 1
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:  # inside shard_map
        devices = 1 if set(axes.manual_axes) == set(mesh.axis_names) else mesh.size
    if devices > 1:
        raise BlockSparseError(
            f"jit would gather the sharded operands of a block-sparse product on each of {devices} devices: "
            "call it inside jax.shard_map over all axes of the mesh."
        )


def _refuse_platform(context: Any, *operands: Any, **params: Any) -> Any:
    raise BlockSparseError.expected(
        "the device", "a CPU (`with jax.default_device(jax.devices('cpu')[0])`)", context.module_context.platforms
    )


def _register(primitive: Primitive, target: str) -> None:
    core = compiled_core.core()
    try:
        jax.ffi.register_ffi_target(f"blocksparse_{target}", getattr(core, target), platform="cpu")
    except Exception as error:  # jaxlib chooses the class
        version = ".".join(map(str, core.XLA_FFI_VERSION))
        raise BlockSparseError(
            f"JAX {jax.__version__} does not accept handlers for version {version} of XLA's foreign function interface "
            f"({error}): install another version of JAX."
        ) from error
    mlir.register_lowering(primitive, partial(_lower, f"blocksparse_{target}"), platform="cpu")
    mlir.register_lowering(primitive, _refuse_platform)
    primitive.def_impl(partial(_run_eagerly, primitive))


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(primitive: Primitive, params: tuple[tuple[str, Any], ...], *operands: Any) -> Any:
    return primitive.bind(*operands, **dict(params))


def _run_eagerly(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # a call of the core exists in compiled programs only
        return _compiled(primitive, tuple(params.items()), *operands)


_register(linear_p, "xla_linear")
_register(linear_wgrad_p, "xla_linear_wgrad")

# -- derivatives ---------------------------------------------------------------------------------------------------


def _linear_jvp(operands: Operands, tangents: Operands, **params: Any) -> tuple[Any, Any]:
    x, values, bias, start, col = operands
    if bias.size or params["activation"] != "none":
        primals, tangents = (x, values, bias), tuple(map(ad.instantiate_zeros, tangents[:3]))
        unfused = partial(_unfused, start=start, col=col, **params)
        return jax.jvp(unfused, primals, tangents)
    y = linear_p.bind(*operands, **params)
    terms = []
    if not isinstance(tangents[0], ad.Zero):
        terms.append(linear_p.bind(tangents[0], values, bias, start, col, **params))
    if not isinstance(tangents[1], ad.Zero):
        terms.append(linear_p.bind(x, tangents[1], bias, start, col, **params))
    return y, sum(terms[1:], terms[0]) if terms else ad.Zero.from_primal_value(y)


def _unfused(x: Any, values: Any, bias: Any, start: Any, col: Any, *, activation: str, **params: Any) -> Any:
    """Compute a product with its bias and activation as separate steps, which have derivatives of their own."""
    y = linear_p.bind(x, values, jnp.zeros(0, x.dtype), start, col, activation="none", **params)
    return ACTIVATIONS[activation](y + bias[None, None] if bias.size else y)


def _linear_transpose(grad: Any, x: Any, values: Any, bias: Any, start: Any, col: Any, **params: Any) -> Any:
    if isinstance(grad, ad.Zero):
        return None, None, None, None, None
    if params["activation"] != "none":
        raise BlockSparseError(
            f"A product with the activation {params['activation']!r} has no transpose: transpose one without it."
        )
    in_blocks, transposed = params["in_blocks"], params["transposed"]
    if ad.is_undefined_primal(x):
        grad_x = linear(grad, values, None, (start, col), in_blocks, not transposed)
        return grad_x, None, None, None, None
    pair = (x, grad) if transposed else (grad, x)
    return None, linear_wgrad(*pair, (start, col), in_blocks), None, None, None


def _linear_wgrad_transpose(grad_values: Any, grad: Any, x: Any, start: Any, col: Any, **params: Any) -> Any:
    if isinstance(grad_values, ad.Zero):
        return None, None, None, None
    product = partial(linear, values=grad_values, bias=None, indices=(start, col), in_blocks=params["in_blocks"])
    if ad.is_undefined_primal(grad):
        return product(x, transposed=False), None, None, None
    return None, product(grad, transposed=True), None, None


def _linear_wgrad_grad_jvp(tangent: Any, grad: Any, x: Any, start: Any, col: Any, **params: Any) -> Any:
    return linear_wgrad_p.bind(tangent, x, start, col, **params)


def _linear_wgrad_x_jvp(tangent: Any, grad: Any, x: Any, start: Any, col: Any, **params: Any) -> Any:
    return linear_wgrad_p.bind(grad, tangent, start, col, **params)


ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
ad.defjvp(linear_wgrad_p, _linear_wgrad_grad_jvp, _linear_wgrad_x_jvp, None, None)
ad.primitive_transposes[linear_wgrad_p] = _linear_wgrad_transpose

# -- vmap ----------------------------------------------------------------------------------------------------------


def _linear_batched(operands: Operands, axes: Sequence[int | None], **params: Any) -> tuple[Any, int]:
    x, values, bias, start, col = operands
    x_axis, values_axis, bias_axis, *index_axes = axes
    if bias_axis is not None:
        plain, plain_axes = (x, values, jnp.zeros(0, x.dtype), start, col), (x_axis, values_axis, None, *index_axes)
        product = params | {"activation": "none"}
        if all(axis is None for axis in plain_axes):
            y, axis = linear_p.bind(*plain, **product)[None], 0
        else:
            y, axis = _linear_batched(plain, plain_axes, **product)
        y = jnp.moveaxis(y, axis, 0) + jnp.moveaxis(bias, bias_axis, 0)[:, None, None]
        return ACTIVATIONS[params["activation"]](y), 0
    if x_axis is not None and all(axis is None for axis in axes[1:]):  # one weight: more tokens
        x = jnp.moveaxis(x, x_axis, 1)
        batch, size, tokens, features = x.shape
        y = linear_p.bind(x.reshape(batch, size * tokens, features), values, bias, start, col, **params)
        return y.reshape(batch, size, tokens, y.shape[2]), 1
    size = _vmap_size(operands, axes)
    pairs = zip((x, values, start, col), (x_axis, values_axis, *index_axes), strict=True)
    x, values, start, col = (_merge(size, *pair) for pair in pairs)
    y = linear_p.bind(x, values, bias, start, col, **params)
    return _split(y, size, operands[0], axes[0]), 0


def _linear_wgrad_batched(operands: Operands, axes: Sequence[int | None], **params: Any) -> tuple[Any, int]:
    size = _vmap_size(operands, axes)
    values = linear_wgrad_p.bind(*map(partial(_merge, size), operands, axes), **params)
    return _split(values, size, operands[0], axes[0]), 0


def _vmap_size(operands: Operands, axes: Sequence[int | None]) -> int:
    """Return the size of the axis that vmap maps over."""
    return next(int(each.shape[axis]) for each, axis in zip(operands, axes, strict=True) if axis is not None)


def _merge(size: int, operand: Any, axis: int | None) -> Any:
    """Return an operand of `size` batches of products as one of a batch that has all of them."""
    each = jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
    return each.reshape(size * each.shape[1], *each.shape[2:])


def _split(result: Any, size: int, operand: Any, axis: int | None) -> Any:
    """Return a result with the axis of vmap in front; `operand`, before `_merge`, shows the number of products."""
    products = next(length for i, length in enumerate(operand.shape) if i != axis)  # size may be 0
    return result.reshape(size, products, *result.shape[1:])


batching.primitive_batchers[linear_p] = _linear_batched
batching.primitive_batchers[linear_wgrad_p] = _linear_wgrad_batched
