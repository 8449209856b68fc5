"""Compiles the products of the GPU benchmark for a GPU that is not here; prints what each launch does, as JSON.

    python tests/compile_reach.py sm90
    python tests/compile_reach.py sm90 "few tokens, bf16, density 0.1"        some of the rows

For `python benchmarks/gpu.py --predict`. Launches are those of the real layouts; counts are of the compiled loop.
"""

from __future__ import annotations

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

import torch

import blocksparse as bs
import compile_kernels
from blocksparse.ops.conv.specs import GPU_REACH as CONV_REACH
from blocksparse.ops.conv.specs import ConvSpec
from blocksparse.ops.gpu.plan import LinearPlan
from blocksparse.ops.linear.specs import GPU_BLOCKS, GPU_HUBS, GPU_REACH, LinearSpec
from compile_kernels import GPUS, Device, Launch

# Of a warp's load from shared memory, 128 bytes each.
WAVEFRONTS = {"128": 4, "64": 2, "4": 4, "2": 2}
PRODUCT = r"(?:FFMA|HMMA|HGMMA|DMMA|DFMA|UTC\w*MMA|v_mfma_\w+)"


def rows() -> dict[str, list[Any]]:
    """The products of each row, by name."""
    found = {name: [target.spec] for name, target in GPU_REACH.items()}
    for block in GPU_BLOCKS:
        spec = GPU_REACH[f"many tokens, block {block}"].spec
        passes = ("forward", "dgrad", "wgrad")
        found[f"training step, many tokens, block {block}"] = [replace(spec, pass_=pass_) for pass_ in passes]
    found |= {f"layout with hubs, {name}": [spec] for name, spec in GPU_HUBS.items()}
    for target in CONV_REACH[:1]:
        specs = [replace(target.spec, pass_=pass_) for pass_ in ("forward", "dgrad", "wgrad")]
        found |= {f"{spec!r}": [spec] for spec in specs}
    return found


class Reach(Device):
    """Launches that are recorded with their grids."""

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        super().launch(kernel, *args, grid=grid, warmup=warmup, **options)
        self.grids.append(grid)

    def of(self, spec: Any) -> list[tuple[Launch, dict[str, Any]]]:
        """The launches of a product, and what they do."""
        return self.of_conv(spec) if isinstance(spec, ConvSpec) else self.of_linear(spec)

    def of_conv(self, spec: ConvSpec) -> list[tuple[Launch, dict[str, Any]]]:
        """The same of a convolution, without what its loop does in each step: that is counted in the compiled one."""
        from blocksparse.ops.conv import triton as convolutions
        from blocksparse.ops.conv.plan import Axis

        convolutions.gpu_of = lambda device: self.gpu
        layout = bs.patterns.random((spec.out_channels, spec.in_channels), spec.block, density=spec.density, seed=0)
        axes = [Axis(spec.size, spec.out_size, spec.kernel, spec.stride, spec.padding, 1)] * 2
        kind: dict[str, Any] = {"dtype": spec.torch_dtype, "device": "meta"}
        x = torch.empty(spec.images, spec.size, spec.size, spec.in_channels, **kind)
        grad = torch.empty(spec.images, spec.out_size, spec.out_size, spec.out_channels, **kind)
        values = torch.empty(*layout.values_shape, spec.kernel, spec.kernel, **kind)
        self.launches.clear()
        self.grids = []
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
            does = {"programs": math.prod(grid), "longest": 0, "macs": macs, "memory": share * moved, "tensor": True}
            done.append((launch, does))
        return done

    def recorded(self) -> list[tuple[Launch, Any]]:
        return list(zip(self.launches, self.grids, strict=True))

    def of_linear(self, spec: LinearSpec) -> list[tuple[Launch, dict[str, Any]]]:
        layout = spec.layout()
        kind: dict[str, Any] = {"dtype": spec.torch_dtype, "device": "meta"}
        x, grad = (torch.empty(spec.tokens, size, **kind) for size in (spec.in_features, spec.out_features))
        values = torch.empty(layout.values_shape, **kind)
        self.launches.clear()
        self.grids: list[Any] = []
        if spec.pass_ == "wgrad":
            self.products.linear_wgrad(grad, x, layout)
        else:
            self.products.linear(x, values, None, layout, spec.pass_ == "dgrad", None)
        plans = [plan for plan in layout._derived.values() if isinstance(plan, LinearPlan)]
        longest = max(int((plan.tasks[:, 2] - plan.tasks[:, 1]).max()) for plan in plans)
        return [(launch, _does(launch, grid, spec, layout.nnz, longest)) for launch, grid in self.recorded()]


def _does(launch: Launch, grid: Any, spec: LinearSpec, nnz: int, longest: int) -> dict[str, Any]:
    given = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    given |= {name: value for name, value in launch.options.items() if name.isupper()}
    programs, itemsize = math.prod(grid), spec.torch_dtype.itemsize
    m, n, k = (given.get(f"BLOCK_{axis}", 1) for axis in "MNK")
    values = nnz * spec.block**2
    moved = itemsize * (values + spec.tokens * (spec.in_features + spec.out_features))
    done = {"programs": programs, "longest": 0, "memory": moved, "tensor": spec.dtype != "float32"}
    if "task_ptr" not in given:  # sums up parts
        return done | {"steps": 0, "macs": 0, "cache": 0, "memory": itemsize * programs * m * n}
    tasks = given["task_ptr"].shape[0]
    if spec.pass_ == "wgrad":
        steps = programs * -(-given["tokens_per_split"] // m)
        return done | {"steps": steps, "macs": steps * m * n * k, "cache": steps * m * (n + k) * itemsize}
    tiles = -(-spec.tokens // m)
    slices = programs // (tasks * tiles)
    # Inputs that several rows have in common come once: there are fewer entries than blocks.
    entries = given["col_ptr"].shape[0]
    steps = tiles * slices * (entries * spec.block / k + tasks / 2)
    loaded = slices * entries * spec.block * m + values
    facts = {"longest": longest * spec.block / k, "macs": values * tiles * m, "cache": tiles * loaded * itemsize}
    return done | {"steps": steps, **facts}


def _dense(spec: Any) -> dict[str, Any]:
    """What the dense product does."""
    if isinstance(spec, ConvSpec):
        pixels = spec.images * (spec.size**2 * spec.in_channels + spec.out_size**2 * spec.out_channels)
        weights = spec.out_channels * spec.in_channels
        moved = pixels + weights * spec.kernel**2
    else:
        weights = spec.out_features * spec.in_features
        moved = weights + spec.tokens * (spec.out_features + spec.in_features)
    operations = 2 * weights * spec.tokens
    itemsize = spec.torch_dtype.itemsize
    return {"operations": operations, "moved": moved * itemsize, "dtype": spec.dtype, "few": spec.tokens <= 64}


# -- the compiled loop ---------------------------------------------------------------------------------------------


def _loop(asm: Any, launch: Launch) -> dict[str, Any]:
    """Of the loop with most products: instructions and shared memory's wavefronts per warp and step, and the outputs of
    a product that reads shared memory (else None)."""
    if "cubin" not in asm:
        body = max(re.split(r"\n\.LBB\w+:", asm["amdgcn"]), key=lambda part: len(re.findall(PRODUCT, part)))
        return {"instructions": len(re.findall(r"^\t[vsdgb]\w+", body, re.MULTILINE)), "wavefronts": 0, "narrow": None}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(compile_kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", text)
    lines = [(int(address, 16), name, rest) for address, name, rest in code]
    best: Counter[str] = Counter()
    for end, name, rest in lines:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and int(target[1], 16) < end:
            body = Counter(name for at, name, _ in lines if int(target[1], 16) <= at <= end)
            best = max(best, body, key=_products)
    narrow = re.search(r"HGMMA\.64x(\d+)x", " ".join(best))
    loads = sum(count * WAVEFRONTS.get(name.rpartition(".")[2], 1) for name, count in best.items() if "LDS" in name)
    plain = any(name.startswith("FFMA") for name in best)
    # Of multiply-adds several threads read the same numbers: half the wavefronts of numbers that all differ.
    wavefronts = loads / 2 + _conflicts(asm["ttgir"]) if plain else loads
    warps = launch.options["num_warps"]
    macs = sum(count * _macs(name) for name, count in best.items()) * warps
    copied = 16 * 32 * warps * sum(count for name, count in best.items() if re.match(r"LDGSTS.*128", name))
    sizes = {"macs": macs, "copied": copied, "narrow": int(narrow[1]) if narrow else None}
    return {"instructions": best.total(), "wavefronts": wavefronts, **sizes}


def _macs(name: str) -> float:
    """The multiply-adds of a warp in this instruction, of those in 16 bits: a quarter of a group's of four."""
    found = re.match(r"HGMMA\.64x(\d+)x(\d+)|HMMA\.(16)(8)(16)", name)
    if found is None:
        return 0
    n, k, *small = found.groups()
    return 16 * 8 * 16 if small[0] else 64 * int(n) * int(k) / 4


def _products(body: Counter[str]) -> int:
    return sum(count for name, count in body.items() if re.match(PRODUCT, name))


def _conflicts(ttgir: str) -> float:
    """The wavefronts per warp and step that bank conflicts cost in loads of weights for multiply-adds.

    Where a row of the buffer is a multiple of 128 bytes and not swizzled, threads at other outputs meet in one bank: of
    a load of 16 bytes each of the four groups of eight threads takes as many wavefronts as it has outputs.
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


# -- all of them ---------------------------------------------------------------------------------------------------


def main(kind: str, *names: str) -> dict[str, Any]:
    device = Reach(GPUS[kind])
    found, unique = {}, {}
    for name, specs in rows().items():
        if names and name not in names:
            continue
        launches = [pair for spec in specs for pair in device.of(spec)]
        unique |= {launch.key(): launch for launch, _ in launches}
        found[name] = {
            "dense": [_dense(spec) for spec in specs],
            "launches": [does | {"kernel": launch.key()} for launch, does in launches],
        }
    _todo[:] = [(device, launch) for launch in unique.values()]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        kernels = dict(zip(unique, pool.map(_compiled, range(len(_todo)), chunksize=1), strict=True))
    for row in found.values():
        row["launches"] = [_whole(launch, kernels[launch["kernel"]]) for launch in row["launches"]]
    return {name: row for name, row in found.items() if None not in row["launches"]}


def _whole(does: dict[str, Any], kernel: dict[str, Any]) -> dict[str, Any] | None:
    """A launch with its kernel; None for a convolution whose steps cannot be counted, on other kinds of GPU."""
    if "steps" not in does:
        loop = kernel["loop"]
        if does["macs"] and not loop.get("macs"):
            return None
        steps = does["macs"] / loop["macs"] if does["macs"] else 0
        does |= {"steps": steps, "cache": steps * loop.get("copied", 0)}
    return does | {"kernel": kernel}


_todo: list[tuple[Reach, Launch]] = []  # inherited by the forks: launches cannot be sent to them


def _compiled(nth: int) -> dict[str, Any]:
    device, launch = _todo[nth]
    kernel = device.compile(launch.kernel, *launch.arguments, grid=(1,), warmup=True, **launch.options)
    facts = {"name": launch.kernel.__name__, "warps": launch.options["num_warps"], "loop": _loop(kernel.asm, launch)}
    return device.compiled(launch) | facts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        import triton

        compile_kernels.triton = triton
        json.dump(main(*sys.argv[1:]), sys.stdout, default=str)
