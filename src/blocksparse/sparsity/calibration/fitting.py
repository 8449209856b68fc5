"""Fits block-sparse weights to what the dense ones gave: exactly, or for many inputs by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# With more inputs, the matrix of their products is not formed; it would have 170 MB, and there are several like it.
MAX_INPUTS = 4608

# Of the conjugate gradients: how often blocks are dropped on the way to the density, and steps after each time.
STAGES, STEPS = 4, 100
CHUNK = 2**24  # numbers of a part of a matrix that is looked at


@dataclass
class Problem:
    """Outputs T of a dense layer, and the inputs X of its weights in the pruned model: rows that belong together.

    The error of a weight V is |X V^T - T|^2 + damping |V - W|^2; where there is a bias, both have mean 0.

    Args:
        dense: W, `[out, in]`, whole blocks.
        x, y: `[rows, in]` and `[rows, out]`.
        block: (rows, columns) of a block, the columns times the taps of a convolution.
        damping: times the mean of the diagonal of X^T X.
    """

    dense: Tensor
    x: Tensor
    y: Tensor
    block: tuple[int, int]
    damping: float

    def __post_init__(self) -> None:
        sums = [part.double().square().sum(0) for part in self._parts(self.x)]
        self.diagonal = torch.stack(sums).sum(0)
        self.damping *= self.diagonal.mean().item() or 1.0
        self.grid = self.dense.shape[0] // self.block[0], self.dense.shape[1] // self.block[1]

    def choose(self, total: int) -> Tensor:
        """Bool `[out_blocks, in_blocks]`, `total` of them."""
        if self.dense.shape[1] > MAX_INPUTS:
            return self._dropped(total)
        height = self.block[0]
        hessian, target = self._normal()
        mask = torch.zeros(self.grid, dtype=torch.bool, device=target.device)
        counts = block_counts(target, hessian, self.block, total)
        for row, count in enumerate(counts.tolist()):
            here = slice(row * height, (row + 1) * height)
            mask[row, best_columns(target[here], hessian, self.block[1], count)] = True
        return mask

    def values(self, mask: Tensor) -> Tensor:
        """The best weight on these blocks, `[out, in]` with zeros elsewhere; float64, or of X's dtype."""
        if self.dense.shape[1] > MAX_INPUTS:
            return self._descended(self.dense, mask)
        (height, width), (hessian, target) = self.block, self._normal()
        fitted = torch.zeros_like(target)
        for row, kept in enumerate(mask):
            here, inputs = slice(row * height, (row + 1) * height), kept.repeat_interleave(width).nonzero().squeeze(1)
            if len(inputs):
                fitted[here, inputs] = least_squares(target[here], hessian, inputs)
        return fitted

    def energy(self) -> Tensor:
        """Of each block of W the sum of w_ij^2 |x_j|^2, float64 `[out_blocks, in_blocks]`."""
        squares = self.dense.double().square() * self.diagonal
        return squares.unflatten(0, (-1, self.block[0])).unflatten(2, (-1, self.block[1])).sum((1, 3))

    def lost(self, fitted: Tensor) -> float:
        """|X V^T - T|^2."""
        fitted = fitted.to(self.x.dtype)
        pairs = zip(self._parts(self.x), self._parts(self.y, self.x), strict=True)
        return sum((y - x @ fitted.T).double().square().sum().item() for x, y in pairs)

    # -- exactly ------------------------------------------------------------------------------------------------

    def _normal(self) -> tuple[Tensor, Tensor]:
        """H = X^T X + damping and T^T X + damping W, float64."""
        if not hasattr(self, "_kept"):
            size = self.dense.shape[1]
            hessian = torch.zeros(size, size, dtype=torch.float64, device=self.x.device)
            target = self.damping * self.dense.double()
            for x, y in zip(self._parts(self.x), self._parts(self.y, self.x), strict=True):
                x = x.double()
                hessian.addmm_(x.T, x)
                target.addmm_(y.double().T, x)
            hessian.diagonal().add_(self.damping)
            self._kept = hessian, target
        return self._kept

    # -- by conjugate gradients ---------------------------------------------------------------------------------

    def _dropped(self, total: int) -> Tensor:
        """In stages those blocks go that add least to the outputs, |X_b V_b^T|^2; the rest is fitted in between."""
        mask = torch.ones(self.grid, dtype=torch.bool, device=self.x.device)
        fitted, all_ = self.dense.to(self.x.dtype), mask.numel()
        for stage in range(1, STAGES + 1):
            left = total if stage == STAGES else round(all_ * (total / all_) ** (stage / STAGES))
            kept = self._parts_of_outputs(fitted).masked_fill(~mask, -1).flatten().argsort(descending=True, stable=True)
            mask = torch.zeros_like(mask).view(-1).index_fill(0, kept[:left], True).view(self.grid)
            if stage < STAGES:
                fitted = self._descended(fitted, mask, STEPS // 5)
        return mask

    def _parts_of_outputs(self, fitted: Tensor) -> Tensor:
        (height, width), found = self.block, []
        for column in range(self.grid[1]):
            here = slice(column * width, (column + 1) * width)
            moments = self.x[:, here].T @ self.x[:, here]
            weight = fitted[:, here]
            found.append(((weight @ moments) * weight).sum(1).view(-1, height).sum(1))
        return torch.stack(found, 1).double()

    def _descended(self, start: Tensor, mask: Tensor, steps: int = STEPS) -> Tensor:
        """The same minimum, each row of blocks by itself: a step costs two products with X, nothing is formed."""
        height, width = self.block
        scale = 1 / (self.diagonal + self.damping).to(self.x.dtype)
        found = start.to(self.x.dtype).clone()
        for row, kept in enumerate(mask):
            here = slice(row * height, (row + 1) * height)
            inside = kept.repeat_interleave(width).to(self.x.dtype)
            dense = self.dense[here].to(self.x.dtype)
            v = found[here] * inside
            residual = inside * ((self.y[:, here].T - v @ self.x.T) @ self.x + self.damping * (dense - v))
            along = direction = scale * residual
            size = (residual * along).sum(1, keepdim=True)
            least = size * torch.finfo(self.x.dtype).eps ** 1.5
            for _ in range(steps):
                going = size > least
                if not going.any():
                    break
                product = inside * ((direction @ self.x.T) @ self.x + self.damping * direction)
                step = torch.where(going, size / (direction * product).sum(1, keepdim=True), 0)
                v += step * direction
                residual = residual - step * product
                along = scale * residual
                before, size = size, (residual * along).sum(1, keepdim=True)
                direction = along + torch.where(going, size / before, 0) * direction
            found[here] = v
        return found

    def _parts(self, matrix: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
        """Rows of it, few enough for copies; as many as of another matrix."""
        return matrix.split(max(1, CHUNK // (matrix if like is None else like).shape[1]))


# -- least squares -----------------------------------------------------------------------------------------------


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
