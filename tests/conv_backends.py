"""The convolution ops as plain calls on `[n, *space, channels]` images, and dense convolutions to compare with."""

from __future__ import annotations

import torch.nn.functional as F

import blocksparse as bs
from blocksparse.ops.conv.op import conv_op, conv_wgrad_op
from linear_backends import FAST as LINEAR_FAST
from linear_backends import SLOW as LINEAR_SLOW

# Tiles, cut and paired rows are the linear op's concern: one set of tiles is enough here, and slow enough.
FAST, SLOW = (
    [name for name in names if not name.endswith(("-small", "-pairs"))] for names in (LINEAR_FAST, LINEAR_SLOW)
)
BACKENDS = FAST + SLOW

CONV = {1: bs.conv1d, 2: bs.conv2d, 3: bs.conv3d}
CONV_TRANSPOSE = {1: bs.conv_transpose1d, 2: bs.conv_transpose2d, 3: bs.conv_transpose3d}
DENSE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DENSE_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def indices(layout):
    return [layout.crow_indices(), layout.col_indices()], layout.grid[1]


def dense(dims, transposed, x, values, layout, bias=None, **steps):
    """The dense convolution with zeros where the layout stores nothing."""
    weight = bs.to_dense(values, layout)
    if not transposed:
        return DENSE[dims](x, weight, bias, **steps)
    return DENSE_TRANSPOSE[dims](x, weight.transpose(0, 1), bias, **steps)


def sparse(dims, transposed, x, values, layout, bias=None, activation=None, **steps):
    function = (CONV_TRANSPOSE if transposed else CONV)[dims]
    return function(x, values, layout, bias, activation=activation, **steps)


def conv(x, values, layout, size, stride, padding, dilation, transpose=False, transposed=False, bias=None, act=None):
    return conv_op(x, values, bias, *indices(layout), transpose, transposed, size, stride, padding, dilation, act)


def wgrad(grad, x, layout, kernel, stride, padding, dilation, transposed=False):
    return conv_wgrad_op(grad, x, *indices(layout), transposed, kernel, stride, padding, dilation)
