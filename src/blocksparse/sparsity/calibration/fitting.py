"""Block-sparse weights fitted to the outputs of dense ones by least squares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from .activations import MIN_FRACTION

# Above this number of inputs, the Hessian of 170 MB, of which several copies exist, is not formed.
MAX_INPUTS = 4608

# Stages in which blocks are dropped, and the most rows for it.
STAGES, MAX_ROWS_SELECTION = 4, 1024
# With fewer rows than inputs, the damping is increased by these factors, as long as that reduces the error of the last
# eighth of the rows, if some rows of blocks are fitted without it.
FACTORS, HELD_OUT, MAX_GROUPS = (1.0, 10.0, 100.0, 1000.0), 8, 2
# Kernels of columns of blocks are stored if they have at most this number of values.
MAX_KERNELS = 2**26
CHUNK = 2**24  # values of a matrix that are processed at a time


class Group(NamedTuple):
    """Rows of blocks of a weight that store the same columns of blocks, with inputs S."""

    rows: Tensor
    columns: Tensor
    x: Tensor
    """X_S, `[rows of X, inputs]`."""
    dense: Tensor
    """W_S of these rows, `[out, inputs]`."""
    kernel: Tensor
    """X_S X_S^T, in float64."""
    missing: Tensor
    """T - X_S W_S^T of these rows, in float64."""


@dataclass
class Problem:
    """The least-squares problem of one layer: its inputs X in the pruned model and the outputs T of the dense layer.

    A weight V has the error |X V^T - T|^2 + damping |V - W|^2. If the layer has a bias, X and T are centered.

    Args:
        dense: W, `[out, in]`, in whole blocks.
        x: inputs X, `[rows, in]`.
        y: outputs T, `[rows, out]`.
        block: (rows, columns) of a block, columns times the taps of a convolution.
        damping: relative to the mean of the diagonal of X^T X.
        noise: what the diagonal is at least damped with, unless damping is 0. Inputs that are constant but for rounding
            would otherwise get weights of millions.
    """

    dense: Tensor
    x: Tensor
    y: Tensor
    block: tuple[int, int]
    damping: float
    noise: float = 0.0

    def __post_init__(self) -> None:
        sums = [chunk.double().square().sum(0) for chunk in self._chunks(self.x)]
        self.diagonal = torch.stack(sums).sum(0)
        self._nonzero = self.diagonal > 0
        least = self.noise if self.damping else 0.0
        self._damping = max(self.damping * self.diagonal.mean().item(), least) or self.damping
        self.grid = self.dense.shape[0] // self.block[0], self.dense.shape[1] // self.block[1]

    def choose(self, total: int, parts: int = 1) -> Tensor:
        """Select `total` blocks greedily, to change the outputs on X little; bool `[out_blocks, in_blocks]`.

        Each of several equal `parts` of the outputs gets at least half of an equal share of the blocks.
        """
        if self.dense.shape[1] > MAX_INPUTS:
            every = math.ceil(len(self.x) / MAX_ROWS_SELECTION)
            problem = self if every == 1 else replace(self, x=self.x[::every].contiguous(), y=self.y[::every])
            return problem._select_in_stages(total)
        height = self.block[0]
        hessian, target = self._normal_equations()
        mask = torch.zeros(self.grid, dtype=torch.bool, device=target.device)
        # Scores of the target W H, not of W, so that inputs with much energy count more.
        counts = block_counts(target, hessian, self.block, total, parts if self.grid[0] % parts == 0 else 1)
        for row, count in enumerate(counts.tolist()):
            rows = slice(row * height, (row + 1) * height)
            mask[row, best_columns(target[rows], hessian, self.block[1], count)] = True
        return mask

    def values(self, mask: Tensor) -> Tensor:
        """Return the best weight with these blocks, `[out, in]`, in float64; in X's dtype if X has few rows."""
        if self.dense.shape[1] > min(MAX_INPUTS, len(self.x)):
            return self._by_kernels(mask)
        (height, width), (hessian, target) = self.block, self._normal_equations()
        fitted = torch.zeros_like(target)
        for row, stored in enumerate(mask):
            rows = slice(row * height, (row + 1) * height)
            inputs = stored.repeat_interleave(width).nonzero().squeeze(1)
            if len(inputs):
                fitted[rows, inputs] = least_squares(target[rows], hessian, inputs)
        return fitted

    def error(self, fitted: Tensor) -> float:
        """Return |X V^T - T|^2."""
        fitted = fitted.to(self.x.dtype)
        pairs = zip(self._chunks(self.x), self._chunks(self.y, self.x), strict=True)
        return sum((y - x @ fitted.T).double().square().sum().item() for x, y in pairs)

    # -- by the Hessian -----------------------------------------------------------------------------------------

    def _normal_equations(self) -> tuple[Tensor, Tensor]:
        """Return the Hessian X^T X + damping and the target T^T X + damping W, float64; cached."""
        if not hasattr(self, "_cached"):
            size = self.dense.shape[1]
            hessian = torch.zeros(size, size, dtype=torch.float64, device=self.x.device)
            target = self._damping * self.dense.double()
            for x, y in zip(self._chunks(self.x), self._chunks(self.y, self.x), strict=True):
                x = x.double()
                hessian.addmm_(x.T, x)
                target.addmm_(y.double().T, x)
            hessian.diagonal().add_(self._damping)
            self._cached = hessian, target
        return self._cached

    # -- with fewer rows than inputs ----------------------------------------------------------------------------

    def _select_in_stages(self, total: int) -> Tensor:
        """Drop in stages the blocks that add least to the outputs, |X_b V_b^T|^2; fit the others after each stage."""
        mask = torch.ones(self.grid, dtype=torch.bool, device=self.x.device)
        fitted, all_blocks = self.dense.to(self.x.dtype), mask.numel()
        for stage in range(1, STAGES + 1):
            count = total if stage == STAGES else round(all_blocks * (total / all_blocks) ** (stage / STAGES))
            scores = self._output_energy(fitted).masked_fill(~mask, -1)
            order = scores.flatten().argsort(descending=True, stable=True)
            mask = torch.zeros_like(mask).view(-1).index_fill(0, order[:count], True).view(self.grid)
            if stage < STAGES:
                fitted = self._by_kernels(mask)
        return mask

    def _output_energy(self, fitted: Tensor) -> Tensor:
        """Return |X_b V_b^T|^2 of each block b, `[out_blocks, in_blocks]`."""
        (height, width), energies = self.block, []
        for column in range(self.grid[1]):
            inputs = column * width + self._nonzero[column * width : (column + 1) * width].nonzero().squeeze(1)
            x, weight = self.x[:, inputs], fitted[:, inputs]
            # The cheaper way, by the sizes: outputs of all rows, or moments of the inputs.
            if len(weight) <= len(inputs):
                energy = sum((part @ weight.T).square().sum(0, dtype=torch.float64) for part in self._chunks(x))
            else:
                energy = ((weight @ (x.T @ x)) * weight).sum(1, dtype=torch.float64)
            energies.append(torch.as_tensor(energy).view(-1, height).sum(1))
        return torch.stack(energies, 1)

    def _by_kernels(self, mask: Tensor) -> Tensor:
        """Minimize the error with these blocks, for each row of blocks separately; `[out, in]` in X's dtype.

        With the stored inputs S, the weights are W_S + A^T X_S with (X_S X_S^T + damping) A = T - X_S W_S^T, a system
        of as many equations as X has rows. Inputs that are always 0 keep their dense weights.
        """
        fitted = torch.zeros_like(self.dense, dtype=self.x.dtype)
        (height, width), blocks = self.block, self._blocks_of(fitted)
        groups = self._groups(mask)
        first = list(islice(groups, MAX_GROUPS))
        damping = self._damping * self._best_factor(first)
        for group in chain(first, groups):
            change = cholesky_solve(group.kernel, damping, group.missing).to(fitted.dtype).T @ group.x
            values = (group.dense + change).view(-1, height, len(group.columns), width)
            blocks[group.rows[:, None], :, group.columns] = values.transpose(1, 2)
        return fitted

    def _best_factor(self, groups: list[Group]) -> float:
        """Return the factor of the damping with the least error on the last rows of X, if it is fitted on the others.

        With fewer rows than inputs, the weights could fit the rows exactly, and others badly.
        """
        count = len(self.x) - len(self.x) // HELD_OUT
        best, least = FACTORS[0], math.inf
        for factor in FACTORS:
            error = 0.0
            for _, _, _, _, kernel, missing in groups:
                change = cholesky_solve(kernel[:count, :count], factor * self._damping, missing[:count])
                error += float((missing[count:] - kernel[count:, :count] @ change).square().sum())
            if not error < least:
                break
            best, least = factor, error
        return best

    def _groups(self, mask: Tensor) -> Iterator[Group]:
        """Yield the rows of blocks that store the same columns."""
        patterns, group_of_row = mask.unique(dim=0, return_inverse=True)
        weight, dtype = self._blocks_of(self.dense), self.x.dtype
        x_blocks, y_blocks = self.x.unflatten(1, (-1, self.block[1])), self.y.unflatten(1, (-1, self.block[0]))
        at_a_time = max(1, CHUNK // len(self.x) ** 2)
        sums = self.x.new_empty(0)
        for number, stored in enumerate(patterns):
            if self._kernels is not None and number % at_a_time == 0:
                sums = torch.tensordot(patterns[number : number + at_a_time].to(dtype), self._kernels, 1)
            rows, columns = (group_of_row == number).nonzero().squeeze(1), stored.nonzero().squeeze(1)
            if not len(columns):
                continue
            x = x_blocks[:, columns].flatten(1)
            dense = weight[rows][:, :, columns].flatten(0, 1).flatten(1).to(dtype)
            kernel = x @ x.T if self._kernels is None else sums[number % at_a_time]
            missing = y_blocks[:, rows].flatten(1) - x @ dense.T
            yield Group(rows, columns, x, dense, kernel.double(), missing.double())

    def _blocks_of(self, matrix: Tensor) -> Tensor:
        """Return a view of a matrix as W, `[out_blocks, rows, in_blocks, columns]`."""
        return matrix.unflatten(0, (-1, self.block[0])).unflatten(2, (-1, self.block[1]))

    @cached_property
    def _kernels(self) -> Tensor | None:
        """X_b X_b^T of each column of blocks b, `[in_blocks, rows, rows]`, or None if they need too much memory."""
        if self.grid[1] * len(self.x) ** 2 > MAX_KERNELS:
            return None
        return torch.stack([x @ x.T for x in self.x.split(self.block[1], 1)])

    def _chunks(self, matrix: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return chunks of rows of a matrix, small enough to copy; the width of `like` sets their size."""
        return matrix.split(max(1, CHUNK // (matrix if like is None else like).shape[1]))


# -- least squares -----------------------------------------------------------------------------------------------


def block_counts(weight: Tensor, hessian: Tensor, block: tuple[int, int], total: int, parts: int = 1) -> Tensor:
    """Return how many of `total` blocks each row gets by the optimal brain surgeon's scores, int64 `[out_blocks]`.

    Each row, and each of several equal `parts` of the rows, gets at least half of an equal share, rounded down. The
    scores do not know that one block of a row may replace the others, so they could leave a row without any.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    scores = weight.square() / inverse.diagonal()
    scores = scores.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).sum((1, 3))
    for groups in (len(scores), parts):
        of_groups = scores.view(groups, -1)
        of_groups.scatter_(1, of_groups.topk(int(MIN_FRACTION * total / groups), 1).indices, torch.inf)
    best = scores.flatten().argsort(descending=True, stable=True)[:total]
    return torch.bincount(best // scores.shape[1], minlength=scores.shape[0])


def best_columns(target: Tensor, hessian: Tensor, width: int, count: int) -> Tensor:
    """Choose the columns of blocks that a row of blocks keeps, int64, rising: each time the most useful one.

    This is orthogonal least squares by blocks. Given the chosen columns, another one reduces the error by
    tr(c D^-1 c^T). D is its diagonal block of the Schur complement of the Hessian `[in, in]`, c its columns of what
    remains of the target `[rows, in]`, which is W H for the dense rows W.
    """
    size = len(hessian)
    columns = size // width
    taken = torch.zeros(columns, dtype=torch.bool, device=target.device)
    at = torch.arange(columns, device=target.device)
    pivots = hessian.view(columns, width, columns, width)[at, :, at]  # [columns, width, width]
    remaining = target.clone()
    factor = target.new_empty(size, count * width)  # Cholesky factor of the eliminated inputs
    identity = torch.eye(width, dtype=target.dtype, device=target.device)
    for step in range(count):
        inner = remaining.view(-1, columns, width).permute(1, 2, 0)
        gain = torch.linalg.solve_triangular(torch.linalg.cholesky(pivots), inner, upper=False).square().sum((1, 2))
        column = int(gain.masked_fill(taken, -1).argmax())
        inputs, done = slice(column * width, (column + 1) * width), factor[:, : step * width]
        schur = hessian[:, inputs] - done @ done[inputs].T
        root = torch.linalg.cholesky(schur[inputs])
        new = torch.linalg.solve_triangular(root, schur.T, upper=False).T
        factor[:, step * width : (step + 1) * width] = new
        remaining -= torch.linalg.solve_triangular(root, remaining[:, inputs].T, upper=False).T @ new.T
        new = new.view(columns, width, width)
        pivots = pivots - new @ new.transpose(1, 2)
        taken[column] = True
        pivots[taken] = identity  # those of eliminated columns are singular
    return taken.nonzero().squeeze(1)


def least_squares(target: Tensor, hessian: Tensor, inputs: Tensor) -> Tensor:
    """Return the weights of these inputs S with the least error, (W H)_S (H_SS)^-1, `[rows, len(inputs)]`."""
    root = torch.linalg.cholesky(hessian[inputs][:, inputs])
    return torch.cholesky_solve(target[:, inputs].T, root).T


def cholesky_solve(matrix: Tensor, damping: float, target: Tensor) -> Tensor:
    """Return (matrix + damping)^-1 target."""
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    return torch.cholesky_solve(target, torch.linalg.cholesky(damped))
