"""Compile the kernels that the GPU benchmark times, for a GPU that need not be present; print what each launch does as
JSON.

    python benchmarks/prediction/compile.py sm90
    python benchmarks/prediction/compile.py sm90 "few tokens, bf16, density 0.1"        some of the rows
    python benchmarks/prediction/compile.py sm90 '{"out_features": 96, "in_features": 64, "tokens": 8}'       a layer

`python benchmarks/gpu.py --predict` uses it. Launches are those of the real layouts; counts are from the compiled loop.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

# `compile_kernels` of the tests compiles the kernels.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
import torch

import blocksparse as bs
import compile_kernels
from blocksparse.ops.conv.triton import InputSharing
from blocksparse_lab.bench.conv_specs import GPU_REACH as CONV_REACH
from blocksparse_lab.bench.conv_specs import ConvSpec
from blocksparse_lab.bench.linear_specs import GPU_BLOCKS, GPU_HUBS, GPU_REACH, LinearSpec
from blocksparse_lab.bench.lstm import LstmSpec
from blocksparse_lab.models.char_lm import parameter_count
from compile_kernels import GPUS, Device, Launch
from targets.lstm import GPU_REACH as LSTM_REACH
from targets.transformer import TRANSFORMER, MlpSpec

# A launch, or None for a pass of PyTorch's over memory, and its counts.
Done = tuple[Launch | None, dict[str, Any]]

# Wavefronts of 128 bytes per load of a warp from shared memory, by the suffix of the instruction.
WAVEFRONTS = {"128": 4, "64": 2, "4": 4, "2": 2}
PRODUCT = r"(?:FFMA|HMMA|HGMMA|DMMA|DFMA|UTC\w*MMA|v_mfma_\w+)"


def rows() -> dict[str, list[Any]]:
    """Return the specs of each row, by name."""
    found = {name: [target.spec] for name, target in GPU_REACH.items()}
    for block in GPU_BLOCKS:
        spec = GPU_REACH[f"many tokens, block {block}"].spec
        passes = ("forward", "dgrad", "wgrad")
        found[f"training step, many tokens, block {block}"] = [replace(spec, pass_=pass_) for pass_ in passes]
    found |= {f"layout with hubs, {name}": [spec] for name, spec in GPU_HUBS.items()}
    for target in CONV_REACH[:1]:
        specs = [replace(target.spec, pass_=pass_) for pass_ in ("forward", "dgrad", "wgrad")]
        found |= {f"{spec!r}": [spec] for spec in specs}
    for recurrent in LSTM_REACH:
        narrow = None if recurrent.peer == "torch-wide" else recurrent.spec.narrow
        found[recurrent.work] = [replace(recurrent.spec, narrow=narrow)]
    found |= {f"{part}": [part] for _, part, _ in TRANSFORMER if isinstance(part, MlpSpec)}
    return found


def of_layer(spec: LinearSpec) -> dict[str, list[Any]]:
    """Return the specs of a layer's products and of a step, which has all three."""
    passes = {pass_: [replace(spec, pass_=pass_)] for pass_ in ("forward", "dgrad", "wgrad")}
    return passes | {"step": [spec for specs in passes.values() for spec in specs]}


class RecordingDevice(Device):
    """A GPU that records launches with their grids."""

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        super().launch(kernel, *args, grid=grid, warmup=warmup, **options)
        self.grids.append(grid)

    def launches_of(self, spec: Any) -> list[Done]:
        """Return the launches of a spec, with their counts."""
        of_kind = {ConvSpec: self.of_conv, MlpSpec: self.of_mlp, LstmSpec: self.of_lstm}
        return of_kind.get(type(spec), self.of_linear)(spec)

    def of_conv(self, spec: ConvSpec) -> list[Done]:
        """Return the launches of a convolution."""
        from blocksparse.ops.conv import triton as convolutions
        from blocksparse.ops.conv.plan import Axis

        convolutions.gpu_of = lambda device: self.gpu
        layout = bs.patterns.random((spec.out_channels, spec.in_channels), spec.block, density=spec.density, seed=0)
        axes = [Axis(spec.size, spec.out_size, spec.kernel, spec.stride, spec.padding, 1)] * 2
        kind: dict[str, Any] = {"dtype": spec.torch_dtype, "device": "meta"}
        x = torch.empty(spec.images, spec.size, spec.size, spec.in_channels, **kind)
        grad = torch.empty(spec.images, spec.out_size, spec.out_size, spec.out_channels, **kind)
        values = torch.empty(*layout.values_shape, spec.kernel, spec.kernel, **kind)
        self._begin()
        if spec.pass_ == "wgrad":
            convolutions.conv_wgrad(grad, x, layout, False, axes)
        elif spec.pass_ == "dgrad":
            convolutions.conv(grad, values, None, layout, True, True, axes, None)
        else:
            convolutions.conv(x, values, None, layout, False, False, axes, None)
        moved = sum(tensor.numel() * tensor.itemsize for tensor in (x, grad, values))
        products = [math.prod(grid) if "task_ptr" in launch.kernel.arg_names else 0 for launch, grid in self.recorded()]
        done = []
        for (launch, grid), part in zip(self.recorded(), products, strict=True):
            share = part / sum(products)
            macs = share * layout.nnz * spec.block**2 * spec.tokens
            does = {"programs": math.prod(grid), "longest": 0, "memory": share * moved, "tensor": True}
            done.append((launch, does | _count_position_programs(launch, macs, spec)))
        return done

    def of_mlp(self, spec: MlpSpec) -> list[Done]:
        """Return the launches of the gated pair of products and of the product down."""
        from blocksparse.ops.gated_linear.triton import gated_linear

        shape = spec.hidden, spec.features
        layouts = [bs.patterns.random(shape, spec.block, density=spec.density, seed=seed) for seed in range(2)]
        kind: dict[str, Any] = {"dtype": spec.torch_dtype, "device": "meta"}
        # Operands on the CPU, so that the schedule can be read.
        gate, up = ((torch.empty(layout.values_shape, dtype=spec.torch_dtype), layout) for layout in layouts)
        self._begin()
        gated_linear(torch.empty(spec.tokens, spec.features, dtype=spec.torch_dtype), *gate, *up, None, None, "silu")
        ((launch, grid),) = self.recorded()
        given, values = _arguments(launch), sum(layout.nnz for layout in layouts) * spec.block**2
        # A row has three loops: over blocks that both layouts have, and over those of each one.
        does = _count_row_programs(given, grid, given["task_ptr"][:, [1, 4]], spec.tokens, spec.block, values, loops=3)
        does |= {"memory": kind["dtype"].itemsize * (values + spec.tokens * sum(shape)), "tensor": True}
        down = LinearSpec(spec.features, spec.hidden, spec.tokens, spec.block, spec.density, spec.dtype)
        return [(launch, does), *self.of_linear(down)]

    def of_lstm(self, spec: LstmSpec) -> list[Done]:
        """Return the products of all steps in both directions, the weight's gradient, and passes over memory for the
        rest.
        """
        from blocksparse.ops.recurrent.fused_gates import FusedGates

        gate, batch, rows = spec.config.layout, spec.batch, spec.tokens
        assert gate is not None
        hidden, block = gate.shape[0], gate.block_shape[0]
        count = gate.grid[0]
        row = np.concatenate([gate.row_of_block + nth * count for nth in range(4)])
        layout = bs.BlockLayout.from_indices(row, np.tile(gate.col_of_block, 4), (4 * count, count), block)
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
        sizes = (batch, 1), (rows, 1), (256, 4), (batch, 4), (rows, 4)
        h, all_h, pre, gates, grad = (torch.empty(n, wide * hidden, **kind) for n, wide in sizes)
        c, index = torch.empty(batch, hidden, device="meta"), torch.empty(batch, dtype=torch.int64, device="meta")
        fused_gates = FusedGates(torch.empty(layout.values_shape, dtype=torch.bfloat16), layout, gate)
        values = layout.nnz * block**2

        self._begin()
        fused_gates.forward(h, pre, index, c, h_out=h, c_out=c, gates_out=gates)
        fused_gates.wgrad(grad, all_h)
        (step, grid), (weights, grid_of_weights) = self.recorded()
        given = _arguments(step)
        forward = _count_row_programs(given, grid, given["task_ptr"][:, 1:3], batch, block, values)
        # Bytes of h and c (float32) before and after, of the inputs' part of the gates, and of the gates.
        forward |= {"memory": 2 * (values + batch * hidden * (2 + 4 + 4 + 4)), "tensor": True, "times": spec.seq}
        given = _arguments(weights)
        wgrad = _count_weight_programs(given, grid_of_weights, 4 * given["BLOCK_N"], rows, 2)
        wgrad |= {"memory": 2 * (values + 5 * rows * hidden), "tensor": True}
        of_inputs = LinearSpec(4 * hidden, hidden, batch, block, layout.density, "bfloat16", "dgrad")
        dgrad: list[Done] = [(of, does | {"times": spec.seq}) for of, does in self.of_linear(of_inputs, layout)]
        # Bytes of the gates' gradient: the gates, both c, gradients of y, h and c; gradients before the gates and of c.
        at_gates = {"memory": batch * hidden * (8 + 8 + 4 + 4 + 8 + 4), "times": spec.seq}
        # The gradient before the gates is read again to sum it per byte; the output layer reads and writes y.
        rest = {"memory": _optimizer_bytes(parameter_count(spec.config)) + rows * hidden * (8 + 6)}
        return [(step, forward), *dgrad, (weights, wgrad), (None, at_gates), (None, rest)]

    def _begin(self) -> None:
        self.launches.clear()
        self.grids: list[Any] = []

    def recorded(self) -> list[tuple[Launch, Any]]:
        """Return the launches with their grids."""
        return list(zip(self.launches, self.grids, strict=True))

    def of_linear(self, spec: LinearSpec, layout: bs.BlockLayout | None = None) -> list[Done]:
        """Return the launches of a linear product, and PyTorch's sums of its splits."""
        layout = layout or spec.layout()
        kind: dict[str, Any] = {"dtype": spec.torch_dtype, "device": "meta"}
        x, grad = (torch.empty(spec.tokens, size, **kind) for size in (spec.in_features, spec.out_features))
        values = torch.empty(layout.values_shape, **kind)
        self._begin()
        if spec.pass_ == "wgrad":
            self.products.linear_wgrad(grad, x, layout)
        else:
            self.products.linear(x, values, None, layout, spec.pass_ == "dgrad", None)
        done: list[Done] = [(of, _count_linear(of, grid, spec, layout)) for of, grid in self.recorded()]
        splits = self.grids[0][2]
        if spec.pass_ == "wgrad" and splits > 1:  # PyTorch sums the splits in float32 and rounds the sum
            count, itemsize = values.numel(), spec.torch_dtype.itemsize
            done[0][1]["memory"] += (4 * splits - itemsize) * count
            done.append((None, {"memory": 4 * (splits + 1) * count}))
            done += [(None, {"memory": (4 + itemsize) * count})] if itemsize < 4 else []
        return done


def _count_linear(launch: Launch, grid: Any, spec: LinearSpec, layout: bs.BlockLayout) -> dict[str, Any]:
    """Count the work of a launch of a linear product."""
    given, itemsize, values = _arguments(launch), spec.torch_dtype.itemsize, layout.nnz * spec.block**2
    moved = itemsize * (values + spec.tokens * (spec.in_features + spec.out_features))
    done = {"memory": moved, "tensor": spec.dtype != "float32"}
    if "task_ptr" not in given:  # this kernel sums splits
        programs, m, n = math.prod(grid), given["BLOCK_M"], given["BLOCK_N"]
        nothing = {"programs": programs, "longest": 0, "steps": 0, "macs": 0, "cache": 0}
        return done | nothing | {"memory": itemsize * programs * m * n}
    if spec.pass_ == "wgrad":
        return done | _count_weight_programs(given, grid, given["BLOCK_N"], given["tokens_per_split"], itemsize)
    tasks = next(
        plan.tasks
        for (kind, *of), plan in layout._derived.items()
        if kind in ("tasks", "pairs") and of[0] == given["TRANSPOSE"] and plan.tasks.shape == given["task_ptr"].shape
    )
    longest = int((tasks[:, 2] - tasks[:, 1]).max())
    return done | _count_row_programs(given, grid, None, spec.tokens, spec.block, values, itemsize, longest=longest)


def _arguments(launch: Launch) -> dict[str, Any]:
    """Return the arguments of a launch by name."""
    given = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    return given | {name: value for name, value in launch.options.items() if name.isupper()}


def _count_row_programs(
    given: dict[str, Any], grid: Any, entries_of: Any, tokens: int, block: int, values: int, itemsize: int = 2,
    *, loops: int = 1, longest: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Count the work of programs that each sum the blocks of a row for a tile of tokens.

    `entries_of` has the begin and end of each row's entries, unless `longest` is known. Each loop ends with a step that
    is half full.
    """
    programs, m, k, tasks = math.prod(grid), given["BLOCK_M"], given["BLOCK_K"], given["task_ptr"].shape[0]
    tiles = -(-tokens // m)
    slices = programs // (tasks * tiles)
    # Inputs that several rows share are loaded once, so that there are fewer entries than blocks.
    entries = given["col_ptr"].shape[0]
    if entries_of is not None:
        longest = int((entries_of[:, 1] - entries_of[:, 0]).max())
    return {
        "programs": programs, "longest": longest * block / k, "macs": values * tiles * m,
        "saved": 1 - entries * block**2 / values,  # fraction of the loads of inputs
        "steps": tiles * slices * (entries * block / k + loops * tasks / 2),
        "cache": itemsize * tiles * (slices * entries * block * m + values),
    }  # fmt: skip


def _count_weight_programs(given: dict[str, Any], grid: Any, n: int, tokens: int, itemsize: int) -> dict[str, Any]:
    """Count the work of programs that each sum products over tokens, for n outputs and some inputs."""
    programs, m, k = math.prod(grid), given["BLOCK_M"], given["BLOCK_K"]
    steps = programs * -(-tokens // m)
    work = {"steps": steps, "macs": steps * m * n * k, "cache": steps * m * (n + k) * itemsize}
    return {"programs": programs, "longest": 0, **work}


def _count_position_programs(launch: Launch, macs: float, spec: ConvSpec) -> dict[str, Any]:
    """Count the work of programs that multiply the inputs of a few positions and taps in each step."""
    given = _arguments(launch)
    if not macs:
        return {"macs": 0, "steps": 0, "cache": 0}
    m, n, k = (given[f"BLOCK_{axis}"] for axis in "MNK")
    shared = InputSharing(*(given[name] for name in ("POSITIONS", "TAPS", "IN_STEP", "SHIFT_STEP")))
    steps = macs / (shared.positions * shared.taps * m * n * k)
    loaded = shared.inputs * m * k + (shared.positions * m * n if spec.pass_ == "wgrad" else shared.taps * n * k)
    return {"macs": macs, "steps": steps, "cache": steps * loaded * spec.torch_dtype.itemsize}


# -- the dense peers -----------------------------------------------------------------------------------------------


def _dense_peers(spec: Any) -> list[dict[str, Any]]:
    """Return the dense products that compute the same."""
    if isinstance(spec, MlpSpec):
        product = _product(spec.hidden * spec.features, spec.tokens, spec.tokens * (spec.hidden + spec.features), spec)
        return [*3 * [product], _product(0, 0, 3 * spec.tokens * spec.hidden, spec)]
    if isinstance(spec, LstmSpec):
        return _cudnn(spec)
    if isinstance(spec, ConvSpec):
        pixels = spec.images * (spec.size**2 * spec.in_channels + spec.out_size**2 * spec.out_channels)
        weights = spec.out_channels * spec.in_channels
        return [_product(weights, spec.tokens, pixels + weights * (spec.kernel**2 - 1), spec)]
    others = spec.tokens * (spec.out_features + spec.in_features)
    return [_product(spec.out_features * spec.in_features, spec.tokens, others, spec)]


def _cudnn(spec: LstmSpec) -> list[dict[str, Any]]:
    """Return a training step with torch.nn.LSTM: two launches for each time step in both directions."""
    config = replace(spec.config, pattern="dense", width=spec.narrow or spec.config.width)
    width, rows = config.width, spec.tokens
    weights = 4 * width**2
    step = _product(weights, spec.batch, spec.batch * 5 * width, spec) | {"launches": 2, "times": 2 * spec.seq}
    passes = {"operations": 0, "moved": _optimizer_bytes(parameter_count(config)) + rows * width * (24 + 14)}
    return [step, _product(weights, rows, 5 * rows * width, spec), passes | {"dtype": spec.dtype, "few": False}]


def _optimizer_bytes(parameters: int) -> int:
    """Return the bytes of a training step for a number of float32 parameters, besides products.

    AdamW reads four elements and writes three; the norm of the gradient and its scaling take three; casts to 16 bits
    and of the gradient back take 12 bytes.
    """
    return parameters * (7 * 4 + 3 * 4 + 12)


def _product(weights: int, tokens: int, others: int, spec: Any) -> dict[str, Any]:
    """Return a product of a number of weights and tokens; it moves the weights and `others` more elements."""
    moved = (weights + others) * getattr(torch, spec.dtype).itemsize
    return {"operations": 2 * weights * tokens, "moved": moved, "dtype": spec.dtype, "few": tokens <= 64}


# -- the compiled loop ---------------------------------------------------------------------------------------------


def _analyze_loop(asm: Any, launch: Launch) -> dict[str, Any]:
    """Return counts of the loop with most products, per warp and step.

    These are instructions, plain multiply-adds, wavefronts of shared memory, how many threads meet in a bank, and the
    outputs of a product that reads shared memory (or None). For a gated pair, it is the loop with fewest products, as
    few blocks are in both layouts.
    """
    most = min if launch.kernel.__name__ == "gated_linear_kernel" else max
    if "cubin" not in asm:
        parts = [part for part in re.split(r"\n\.LBB\w+:", asm["amdgcn"]) if re.search(PRODUCT, part)]
        body = most(parts or [""], key=lambda part: len(re.findall(PRODUCT, part)))
        instructions = re.findall(r"^\t([vsdgb]\w+)", body, re.MULTILINE)
        plain = sum(name.startswith(("v_fma", "v_pk_fma")) for name in instructions)
        return {"instructions": len(instructions), "plain": plain, "wavefronts": 0, "ways": 1, "narrow": None}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(compile_kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", text)
    lines = [(int(address, 16), name, rest) for address, name, rest in code]
    bodies = []
    for end, name, rest in lines:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and int(target[1], 16) < end:
            body = Counter(name for at, name, _ in lines if int(target[1], 16) <= at <= end)
            bodies += [body] if _count_products(body) else []
    best = most(bodies, key=_count_products, default=Counter[str]())
    narrow = re.search(r"HGMMA\.64x(\d+)x", " ".join(best))
    loads = sum(count * WAVEFRONTS.get(name.rpartition(".")[2], 1) for name, count in best.items() if "LDS" in name)
    plain = sum(count for name, count in best.items() if name.startswith("FFMA"))
    found = {"instructions": best.total(), "plain": plain, "ways": _bank_conflict_ways(asm["ttgir"])}
    # In multiply-adds several threads read the same elements, which halves the wavefronts.
    wavefronts = loads / 2 + _conflict_wavefronts(asm["ttgir"]) if plain else loads
    return found | {"wavefronts": wavefronts, "narrow": int(narrow[1]) if narrow else None}


def _count_products(body: Counter[str]) -> int:
    """Count the products in a loop."""
    return sum(count for name, count in body.items() if re.match(PRODUCT, name))


def _conflict_wavefronts(ttgir: str) -> float:
    """Return the wavefronts per warp and step that bank conflicts cost when weights are loaded for multiply-adds.

    If a row of the buffer is a multiple of 128 bytes and not swizzled, threads at different outputs meet in one bank:
    in a load of 16 bytes, each of the four groups of eight threads takes as many wavefronts as it has outputs.
    """
    dot = re.search(r"tt\.dot .*?tensor<(\d+)x(\d+)xf32, #ttg\.dot_op<{opIdx = 1, parent = #(blocked\d*)}", ttgir)
    if dot is None:
        return 0
    inner, outputs, parent = int(dot[1]), int(dot[2]), dot[3]
    layout = re.search(rf"#{parent} = .*?threadsPerWarp = \[\d+, (\d+)\], warpsPerCTA = \[\d+, (\d+)\]", ttgir)
    source = re.search(r"local_load .*memdesc<\w+xf32, #(shared\d*),.*-> tensor<.*dot_op<{opIdx = 1,", ttgir)
    if layout is None or source is None:
        return 0
    shared = re.search(rf"#{source[1]} = .*?maxPhase = (\d+), order = \[0, 1\]", ttgir)
    if shared is None or int(shared[1]) > 1 or inner * 4 % 128:
        return 0
    threads, warps = int(layout[1]), int(layout[2])
    loads = outputs / (threads * warps) * inner / 4
    return loads * (4 * min(threads, 8) - 2)


def _bank_conflict_ways(ttgir: str) -> int:
    """Return the largest number of threads of a warp that meet in one bank when float32 operands are loaded for the
    tensor cores.

    A load covers eight rows, with 16 bytes for each of four threads.
    """
    operand = r"local_load .*memdesc<(\d+)x(\d+)xf32, #(shared\d*),.*dot_op<{opIdx = (\d), parent = #mma"
    worst = 1
    for *sizes, name, side in re.findall(operand, ttgir):
        shared = re.search(rf"#{name} = .*?vec = (\d+), perPhase = (\d+), maxPhase = (\d+), order = \[(\d)", ttgir)
        if shared is None or shared[4] != "10"[int(side)]:
            continue
        vec, per, most = map(int, shared.groups()[:3])
        places = (row * int(sizes[side == "0"]) + row // per % most * vec for row in range(8))
        worst = max(worst, *Counter(place // 4 % 8 for place in places).values())
    return worst


# -- all of them ---------------------------------------------------------------------------------------------------


def main(kind: str, *names: str) -> dict[str, Any]:
    """Return the dense peers and the launches of the named rows, by default of all."""
    device = RecordingDevice(GPUS[kind])
    result, unique = {}, {}
    layers = [of_layer(LinearSpec(**json.loads(name))) for name in names if name.startswith("{")]
    chosen = {name: specs for name, specs in rows().items() if name in names or not names}
    for name, specs in (chosen | dict(itertools.chain(*(layer.items() for layer in layers)))).items():
        launches = [pair for spec in specs for pair in device.launches_of(spec)]
        unique |= {launch.key(): launch for launch, _ in launches if launch}
        result[name] = {
            "dense": [dense for spec in specs for dense in _dense_peers(spec)],
            "launches": [does | ({"kernel": launch.key()} if launch else {}) for launch, does in launches],
        }
    _todo[:] = [(device, launch) for launch in unique.values()]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        kernels = dict(zip(unique, pool.map(_compile, range(len(_todo)), chunksize=1), strict=True))
    for row in result.values():
        for does in row["launches"]:
            if "kernel" in does:
                does["kernel"] = kernels[does["kernel"]]
    return result


_todo: list[tuple[RecordingDevice, Launch]] = []  # inherited by forked workers, as launches cannot be pickled


def _compile(nth: int) -> dict[str, Any]:
    """Compile one of the launches in a worker; return figures of its kernel."""
    device, launch = _todo[nth]
    kernel = device.compile(launch.kernel, *launch.arguments, grid=(1,), warmup=True, **launch.options)
    facts = {
        "name": launch.kernel.__name__,
        "warps": launch.options["num_warps"],
        "loop": _analyze_loop(kernel.asm, launch),
    }
    return device.compiled(launch) | facts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        import triton

        compile_kernels.triton = triton
        json.dump(main(*sys.argv[1:]), sys.stdout, default=str)
