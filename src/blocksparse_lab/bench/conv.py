"""Compare the 2-D convolutions with their peers: check the results, then time all in alternation.

The peers:
    dense       PyTorch's dense convolution in the same pass, channels-last, with a random dense weight: oneDNN on the
                CPU, cuDNN with its own search for the fastest algorithm on a GPU.
    grouped     PyTorch's grouped convolution, for a block-diagonal layout, with the same weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse import patterns
from blocksparse.convert import from_dense, to_dense
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call
from blocksparse.ops.conv import conv2d
from blocksparse.ops.conv.op import conv_op, conv_wgrad_op
from blocksparse.ops.gpu.tiles import tf32

from .case import OURS, Bench, Case, check_errors, relative_error
from .conv_specs import ConvSpec
from .linear import name_results

PEERS = ("dense", "grouped")


class ConvCase(Case):
    """A convolution; there are no rotating copies, since the images alone flush the caches."""

    peers = PEERS
    layout: BlockLayout

    def __init__(self, spec: ConvSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        shape = (spec.out_channels, spec.in_channels)
        if spec.pattern == "block-diagonal":
            self.layout = patterns.block_diagonal(shape, spec.block)
        elif spec.density == 1:
            self.layout = patterns.dense(shape, spec.block)
        else:
            self.layout = patterns.random(shape, spec.block, density=spec.density, seed=seed)
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=spec.torch_dtype).to(self.device)

        self.kernel = [spec.kernel] * 2
        self.x = randn(spec.images, spec.size, spec.size, spec.in_channels).movedim(-1, 1)
        self.grad = randn(spec.images, spec.out_size, spec.out_size, spec.out_channels).movedim(-1, 1)
        self.values = randn(*self.layout.values_shape, *self.kernel)
        if self.device.type == "cuda":  # in the memory format of our kernels, as the peers' weights are channels-last
            self.values = self.values.movedim((-2, -1), (1, 2)).contiguous().movedim((1, 2), (-2, -1))
        self.steps = [spec.stride] * 2, [spec.padding] * 2, [1, 1]

    # -- the calls -------------------------------------------------------------------------------------------------

    def call(self, name: str, copy: int = 0) -> Call:
        return self._our_call() if name == OURS else self._peer_call(name)

    def switches(self) -> AbstractContextManager[Any]:
        return torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32())

    def _our_call(self) -> Call:
        """Return a call of the spec's pass with this library."""
        x, grad, values, layout, steps = self.x, self.grad, self.values, self.layout, self.steps
        indices, in_blocks = layout.indices_on(x.device), layout.grid[1]
        if self.spec.pass_ == "dgrad":
            last, size = grad.movedim(1, -1), x.shape[2:]
            return lambda: conv_op(last, values, None, indices, in_blocks, True, True, size, *steps, None)
        if self.spec.pass_ == "wgrad":
            left, right, kernel = grad.movedim(1, -1), x.movedim(1, -1), self.kernel
            return lambda: conv_wgrad_op(left, right, indices, in_blocks, False, kernel, *steps)
        stride, padding, _ = steps
        return self.pass_call(lambda x, values: conv2d(x, values, layout, None, stride, padding), self.x, values)

    def _peer_call(self, name: str) -> Call:
        """Return a call of a peer: the dense convolution, or a grouped one for block-diagonal patterns."""
        spec = self.spec
        if name == "dense":
            weight = torch.randn(
                spec.out_channels, spec.in_channels, *self.kernel, dtype=spec.torch_dtype, device=self.device
            )
            return self._torch_call(weight, groups=1)
        if spec.pattern != "block-diagonal" or self.layout.grid[0] != self.layout.grid[1]:
            raise NotImplementedError("a grouped convolution is block-diagonal on a square grid")
        return self._torch_call(self.values.reshape(-1, spec.block, *self.kernel), groups=self.layout.grid[0])

    def _torch_call(self, weight: Tensor, groups: int) -> Call:
        """Return a call of the spec's pass with PyTorch and a dense or grouped weight."""
        weight = weight.contiguous(memory_format=torch.channels_last)
        stride, padding, _ = self.steps
        if self.spec.pass_ in ("dgrad", "wgrad"):
            mask = (self.spec.pass_ == "dgrad", self.spec.pass_ == "wgrad", False)
            return lambda: _torch_backward(self.grad, self.x, weight, stride, padding, groups, mask)
        return self.pass_call(
            lambda x, weight: F.conv2d(x, weight, None, stride, padding, groups=groups), self.x, weight
        )

    # -- the check -------------------------------------------------------------------------------------------------

    def check(self, seed: int) -> dict[str, float]:
        """Return errors by name against PyTorch's dense convolution in float64."""
        weight, x, grad = to_dense(self.values, self.layout).double(), self.x.double(), self.grad.double()
        stride, padding, _ = self.steps
        errors = {}
        for name, result in name_results(self.spec.pass_, self.call(OURS)()).items():
            if name == "y":
                expected = F.conv2d(x, weight, None, stride, padding)
            else:
                mask = (name == "grad_x", name == "grad_values", False)
                expected = next(g for g in _torch_backward(grad, x, weight, stride, padding, 1, mask) if g is not None)
            if name == "grad_values":
                expected = from_dense(expected, self.layout)
            elif self.spec.pass_ == "dgrad":  # the op's channels come last
                result = result.movedim(-1, 1)
            errors[name] = relative_error(result, expected)
        check_errors(self.bound, errors, self.spec)
        return errors


class ConvBench(Bench):
    """Measures convolutions.

    >>> result = ConvBench(rounds=3, budget=0.1).run(ConvSpec(32, 32, size=6, images=2, block=8, density=0.5))
    >>> result.peers, result.nnz
    (['dense'], 8)
    """

    kind = ConvCase


def _torch_backward(grad, x, weight, stride, padding, groups, mask) -> tuple[Tensor | None, ...]:
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, [1, 1], False, [0, 0], groups, mask
    )
