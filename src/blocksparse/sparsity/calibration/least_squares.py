"""Chooses the blocks of a row that best reproduce a dense weight, and their values by least squares."""

from __future__ import annotations

import torch
from torch import Tensor


def block_counts(weight: Tensor, hessian: Tensor, block: tuple[int, int], total: int) -> Tensor:
    """How many of `total` blocks each row gets by the optimal brain surgeon's scores: int64 `[out_blocks]`."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    scores = weight.square() / inverse.diagonal()
    scores = scores.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).sum((1, 3))
    kept = scores.flatten().argsort(descending=True, stable=True)[:total]
    return torch.bincount(kept // scores.shape[1], minlength=scores.shape[0])


def best_columns(target: Tensor, hessian: Tensor, width: int, count: int) -> Tensor:
    """The block columns that a row of blocks is to keep, one after the other the one that helps most: int64, rising.

    This is orthogonal least squares by blocks. What a column adds, given those that are chosen, is
    tr(c D^-1 c^T): D is its part of the Schur complement of the Hessian `[in, in]`, c what the target `[rows, in]`,
    W H of the dense rows W, still has there.
    """
    size = len(hessian)
    columns = size // width
    taken = torch.zeros(columns, dtype=torch.bool, device=target.device)
    at = torch.arange(columns, device=target.device)
    pivots = hessian.view(columns, width, columns, width)[at, :, at]  # [columns, width, width]
    left = target.clone()
    factor = target.new_empty(size, count * width)  # of the rows of the Hessian that are eliminated
    one = torch.eye(width, dtype=target.dtype, device=target.device)
    for step in range(count):
        inner = left.view(-1, columns, width).permute(1, 2, 0)
        gain = torch.linalg.solve_triangular(torch.linalg.cholesky(pivots), inner, upper=False).square().sum((1, 2))
        column = int(gain.masked_fill(taken, -1).argmax())
        here, done = slice(column * width, (column + 1) * width), factor[:, : step * width]
        schur = hessian[:, here] - done @ done[here].T
        root = torch.linalg.cholesky(schur[here])
        new = torch.linalg.solve_triangular(root, schur.T, upper=False).T
        factor[:, step * width : (step + 1) * width] = new
        left -= torch.linalg.solve_triangular(root, left[:, here].T, upper=False).T @ new.T
        each = new.view(columns, width, width)
        pivots = pivots - each @ each.transpose(1, 2)
        taken[column] = True
        pivots[taken] = one  # eliminated: nothing is left of these
    return taken.nonzero().squeeze(1)


def least_squares(target: Tensor, hessian: Tensor, inputs: Tensor) -> Tensor:
    """The values of these inputs that leave the least error, (W H)_S (H_SS)^-1: `[rows, len(inputs)]`."""
    root = torch.linalg.cholesky(hessian[inputs][:, inputs])
    return torch.cholesky_solve(target[:, inputs].T, root).T
