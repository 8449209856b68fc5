"""Steps of an LSTM on a GPU whose four gates have one layout, by kernels that compute product and gates together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import SUM_DTYPES
from ..gpu.plan import linear_plan, wgrad_tasks
from ..gpu.runtime import Launch, cdiv, check_fits, check_layout_fits, common, keep_for_stream, stream_of
from ..gpu.tiles import Tile, Work, bucket, fit, forced, gpu_of, power_of_two
from ..linear import LINEAR

# Tensor cores have no tile of four gates for other dtypes.
DTYPES = (torch.bfloat16, torch.float16)
# Launches cached per layout: steps differ in their rows, and in their addresses modulo 16.
MAX_LAUNCHES = 256

# The tensor arguments of each kernel.
TENSORS = {
    "forward": ("x", "values", "pre", "index", "c", "h", "c_out", "gates", "partial", "counter"),
    "wgrad": ("grad", "x", "values"),
}


class FusedGates:
    """Products with a weight `[4 hidden, in]` together with the gates, in one kernel; `fused_gates_for` makes it.

    Features of a row are contiguous, rows may have any stride. Outputs are the caller's memory, as in `lstm_gates`.
    """

    def __init__(self, values: Tensor, layout: BlockLayout, gate: BlockLayout) -> None:
        self._values, self._gate, self._gpu = values.contiguous(), gate, gpu_of(values.device)
        key = "step launches", values.device, values.dtype, forced(values.dtype)
        self._launches: dict[Any, tuple[Launch, int]] = layout.derived(key, dict)
        # Sums of parts of block rows, and the number of parts that were written.
        self._partial = values.new_empty(0)
        self._counter = torch.empty(0, dtype=torch.int32, device=values.device)

    def forward(
        self, x: Tensor, pre: Tensor, index: Tensor | None, c: Tensor,
        *, h_out: Tensor, c_out: Tensor, gates_out: Tensor | None,
    ) -> None:  # fmt: skip
        """Compute the states behind a step, and its gates, from x W^T + pre; an index selects the rows of pre."""
        if len(x) == 0:
            return
        tensors = x, self._values, pre, index, c, h_out, c_out, gates_out
        launch, numbers = self._prepared("forward", *tensors)
        if launch.slots * numbers > len(self._partial) or launch.slots > len(self._counter):
            self._partial = torch.empty(launch.slots * numbers, dtype=SUM_DTYPES[x.dtype], device=x.device)
            self._counter = torch.zeros(launch.slots, dtype=torch.int32, device=x.device)
        launch(*tensors, self._partial, self._counter)

    def wgrad(self, grad: Tensor, x: Tensor) -> Tensor | None:
        """Return the weight's gradient of all rows; None if there are too few programs to use the GPU."""
        gate, tile = self._gate, self._tile("wgrad", len(x))
        programs = cdiv(gate.nnz * gate.block_shape[1], tile.block_k) * cdiv(gate.block_shape[0], tile.block_n // 4)
        if len(x) == 0 or programs < self._gpu.multiprocessors:
            return None
        values = torch.empty_like(self._values)
        self._prepared("wgrad", grad, x, values)[0](grad, x, values)
        return values

    def _prepared(self, pass_: str, *tensors: Tensor | None) -> tuple[Launch, int]:
        """Return the cached launch of a call, and the number of sums of each of its programs."""
        memory = [None if each is None else (each.stride(0), each.data_ptr() % 16 == 0) for each in tensors]
        x: Any = tensors[0]
        key = pass_, stream_of(x), x.shape[0], *memory
        entry = self._launches.get(key)
        if entry is None:
            if len(self._launches) >= MAX_LAUNCHES:
                self._launches.clear()
            entry = self._launches[key] = self._plan_launch(pass_, *tensors)
            keep_for_stream(x.device, *entry[0].arguments)
        return entry

    def _plan_launch(self, pass_: str, *tensors: Any) -> tuple[Launch, int]:
        """Plan the launch of a pass on these tensors; return it with the number of sums of each program."""
        from . import kernels

        n, gate, names = len(tensors[0]), self._gate, TENSORS[pass_]
        check_fits("x", "rows", n)
        check_layout_fits(gate)
        check_fits("weight", "features of the four gates", 4 * gate.shape[0])
        tile = self._tile(pass_, n)
        block_n = tile.block_n // 4
        slices, tiles = cdiv(gate.block_shape[0], block_n), cdiv(n, tile.block_m)
        tables, parts = self._tables(pass_, tile, slices * tiles)
        tasks = len(tables["task_ptr"])
        arguments = {
            **{f"{name}_stride": 0 if t is None else t.stride(0) for name, t in zip(names, tensors, strict=False)},
            **tables,
            "n": n, "tasks": tasks, "nnz": gate.nnz, "hidden": gate.shape[0], "block_out": gate.block_shape[0],
            "block_in": gate.block_shape[1], **common(self._values.dtype, tile),
            "BLOCK_N": block_n, "PARTS": parts > 0,
        }  # fmt: skip
        kernel = kernels.step_wgrad_kernel if pass_ == "wgrad" else kernels.step_forward_kernel
        grid = (tasks, slices, 1) if pass_ == "wgrad" else (tasks * slices * tiles, 1, 1)
        launch = Launch(kernel, grid, len(names), arguments, tile, slots=parts * slices * tiles)
        return launch, tile.block_m * tile.block_n

    def _tables(self, pass_: str, tile: Tile, programs: int) -> tuple[dict[str, Tensor], int]:
        """Return the index tensors of a pass on the device, and the number of parts of all block rows that are cut."""
        gate, device = self._gate, self._values.device
        if pass_ == "wgrad":
            key, parts, tasks = tile.block_k, 0, wgrad_tasks(gate, tile.block_k)
        else:
            # Block rows are cut at half of a multiprocessor's share, so that none ends last; shorter parts cost more
            # than they gain.
            mean = gate.nnz * programs / self._gpu.multiprocessors
            key = max(int(mean / 2), 4 * max(tile.block_k // gate.block_shape[1], 1))
            plan = linear_plan(gate, transpose=False, longest=key)
            parts, tasks = len(plan.slots), _with_parts(plan.tasks, plan.slots)

        def on_device() -> dict[str, Tensor]:
            arrays = {"task_ptr": tasks, "col_ptr": gate.col_of_block}
            with torch.inference_mode(False):
                return {name: torch.from_numpy(array.astype(np.int32)).to(device) for name, array in arrays.items()}

        return gate.derived(("step tables", pass_, key, device), on_device), parts

    def _tile(self, pass_: str, n: int) -> Tile:
        """Return the tile of a pass; its `block_n` counts the features of all four gates."""
        rows, columns = min(max(power_of_two(n), 16), 64), 4 * min(max(power_of_two(self._gate.block_shape[0]), 4), 32)
        tile = Tile(rows, columns, block_k=64, warps=4, stages=5)
        if pass_ == "wgrad":
            tile = Tile(rows, columns, block_k=256, warps=8, stages=3)
        if self._gpu.kind.startswith("gfx"):
            tile = Tile(rows, columns, min(tile.block_k, 128), tile.warps, stages=2)
        return fit(
            tile, Work(pass_, self._values.dtype, self._gate.block_shape, bucket(n), self._gate.density), self._gpu
        )


def fused_gates_for(values: Tensor, layout: BlockLayout | None) -> FusedGates | None:
    """Return `FusedGates` for a weight; None if its gates have different layouts, or no kernel serves it."""
    if layout is None or values.dtype not in DTYPES:
        return None
    if LINEAR.on(values.device, values.dtype) is not LINEAR.backends["triton"]:
        return None
    gate = layout.derived("one gate", lambda: _one_gate(layout))
    return None if gate is None else FusedGates(values, layout, gate)


def _one_gate(layout: BlockLayout) -> BlockLayout | None:
    """Return the layout that all four gates have, or None if they differ."""
    rows, count = layout.grid[0] // 4, layout.nnz // 4
    if layout.grid[0] % 4 or layout.nnz % 4 or layout.nnz == 0:
        return None
    row, col = (each.reshape(4, count) for each in (layout.row_of_block, layout.col_of_block))
    if any((row[i] - i * rows != row[0]).any() or (col[i] != col[0]).any() for i in range(1, 4)):
        return None
    return BlockLayout.from_indices(row[0], col[0], (rows, layout.grid[1]), layout.block_shape)


def _with_parts(tasks: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the tasks of a `LinearPlan`, each followed by the first slot of its row and the slot behind the last one.

    >>> _with_parts(np.array([[0, 0, 2, 0], [0, 2, 4, 1], [1, 4, 5, -1]]), np.array([[0, 2], [0, -1]]))
    array([[ 0,  0,  2,  0,  0,  2],
           [ 0,  2,  4,  1,  0,  2],
           [ 1,  4,  5, -1, -1, -1]])
    """
    begin = np.maximum.accumulate(np.where(slots[:, 1] >= 0, np.arange(len(slots)), -1))
    ends = np.stack([begin, slots[begin, 1]], axis=1) if len(slots) else slots
    ends = np.concatenate([ends, [[-1, -1]]])  # of slot -1
    return np.concatenate([tasks, ends[tasks[:, 3]]], axis=1)
