"""Compiles the kernels for GPUs that are not here, every launch as it would be there; prints the results as JSON.

    python tests/compile_kernels.py sm90          a set that covers the rule, and all tuned tiles shipped for sm90
    python tests/compile_kernels.py sm90 --few    each kernel and each dtype once or twice
    python tests/compile_kernels.py sm90 --all    every dtype, block and bucket of tokens

A script and not a test: where kernels are interpreted, none is compiled in the same process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import blocksparse as bs
from blocksparse.ops.checks import SUM_DTYPES
from blocksparse.ops.gpu import tiles
from blocksparse.ops.gpu.tiles import Gpu
from compile_cases import (
    GPUS,
    AttentionCase,
    Case,
    ConvCase,
    GatedCase,
    GatesCase,
    StepCase,
    attention_cases,
    cases,
    chosen,
    conv_cases,
    gated_cases,
    gates_cases,
    step_cases,
)

# -- compiling ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A kernel with what it was launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def key(self) -> str:
        """The key under which Triton compiles once."""
        *_, bind = self.kernel.device_caches[0]
        _, specialization, options = bind(*self.arguments, **self.options, debug=False)
        return f"{self.kernel.__name__} {specialization} {options}"


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Device:
    """A GPU that is not here: launches on it are recorded, to be compiled."""

    def __init__(self, gpu: Gpu):
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver
        from triton.runtime.jit import JITFunction

        from blocksparse.ops.attention import triton as attention
        from blocksparse.ops.conv import triton as convolutions
        from blocksparse.ops.gated_linear import triton as gated
        from blocksparse.ops.linear import triton as products
        from blocksparse.ops.recurrent import fused_gates

        amd = gpu.kind.startswith("gfx")
        torch.version.hip = "as if" if amd else None
        self.gpu, self.products, self.launches = gpu, products, []
        self.target = GPUTarget("hip", gpu.kind, 64) if amd else GPUTarget("cuda", int(gpu.kind[2:]), 32)
        self.compile = JITFunction.run
        driver.set_active(self)  # type: ignore[arg-type]
        for ops in (products, fused_gates, convolutions, gated, attention):
            ops.gpu_of = lambda device: gpu  # type: ignore[attr-defined]
        JITFunction.run = lambda *args, **options: self.launch(*args, **options)

    # Triton's questions to a driver before it compiles.
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        self.launches.append(Launch(kernel, args, options))

    def run(self, case: Case) -> list[Launch]:
        """All launches of this case's products."""
        # Features are multiples of 128, as nearly all are; rows of 64 blocks against 8 ask for a cut.
        rows, cols = (1, 256) if case.split else (8 * self.gpu.multiprocessors, 16)
        if case.pass_ == "dgrad":
            rows, cols = cols, rows
        layout = bs.patterns.dense((rows * case.block[0], cols * case.block[1]), case.block)
        x, grad = (torch.empty(case.tokens, size, dtype=case.torch_dtype, device="meta") for size in layout.shape[::-1])
        values = torch.empty(layout.values_shape, dtype=case.torch_dtype, device="meta")
        bias = torch.empty(layout.shape[0], dtype=case.torch_dtype, device="meta") if case.activation else None
        self.launches.clear()
        with chosen(case, self.gpu):
            if case.pass_ == "wgrad":
                self.products.linear_wgrad(grad, x, layout)
            elif case.pass_ == "dgrad":
                self.products.linear(grad, values, None, layout, True, None)
            else:
                self.products.linear(x, values, bias, layout, False, case.activation)
        return list(self.launches)

    def run_gates(self, case: GatesCase) -> list[Launch]:
        """The forward and the backward step of this case."""
        from blocksparse.ops.lstm_gates import triton as gates

        dtype = getattr(torch, case.dtype)

        made = partial(_meta, case.rows, dtype=dtype)
        one, all_four, c = made(case.hidden), made(4 * case.hidden), made(case.hidden, dtype=SUM_DTYPES[dtype])
        add, gain, grad, grad_c = (all_four, all_four[0], one, c) if case.everything else (None, None, None, None)
        self.launches.clear()
        gates.forward(all_four, add, gain, c, h_out=one, c_out=c, gates_out=add)
        gates.backward(all_four, c, c, grad, one, grad_c, grad_pre_out=all_four, grad_c_out=c)
        return list(self.launches)

    def run_step(self, case: StepCase) -> list[Launch]:
        """The step of this case, and the weight's gradient."""
        from blocksparse.ops.recurrent.fused_gates import FusedGates

        blocks = np.eye(8 * self.gpu.multiprocessors, dtype=bool)
        blocks[0] = case.split  # a row of these is cut
        gate = bs.BlockLayout(blocks, case.block)
        layout = bs.BlockLayout(np.tile(blocks, (4, 1)), case.block)
        dtype = getattr(torch, case.dtype)

        made = partial(_meta, case.rows, dtype=dtype)
        (hidden, inputs), wide = gate.shape, SUM_DTYPES[dtype]
        x, h, z, c = made(inputs), made(hidden), made(4 * hidden), made(hidden, dtype=wide)
        index = torch.empty(case.rows, dtype=torch.int64, device="meta") if case.split else None
        step = FusedGates(torch.empty(layout.values_shape, dtype=dtype, device="meta"), layout, gate)
        self.launches.clear()
        step.forward(x, z, index, c, h_out=h, c_out=c, gates_out=z if case.split else None)
        step.wgrad(z, x)
        return list(self.launches)

    def run_gated(self, case: GatedCase) -> list[Launch]:
        """Both products of this case."""
        from blocksparse.ops.gated_linear.triton import gated_linear

        shape = 8 * case.block[0], 16 * case.block[1]
        layouts = [bs.patterns.random(shape, case.block, density=0.5, seed=seed) for seed in range(2)]
        kind: dict[str, Any] = {"dtype": case.torch_dtype, "device": "meta"}
        x, bias = torch.empty(case.tokens, shape[1], **kind), torch.empty(shape[0], **kind) if case.activation else None
        gate, up = ((torch.empty(layout.values_shape, **kind), layout) for layout in layouts)
        self.launches.clear()
        torch.backends.cuda.matmul.fp32_precision = "tf32" if case.dtype == "tf32" else "ieee"
        gated_linear(x, *gate, *up, bias, bias, case.activation)
        return list(self.launches)

    def run_conv(self, case: ConvCase) -> list[Launch]:
        """The launches of this case: of a transposed convolution with a stride one for each phase."""
        from blocksparse.ops.conv import triton as convolutions
        from blocksparse.ops.conv.plan import Axis

        layout = bs.patterns.dense((8 * case.block[0], 8 * case.block[1]), case.block)
        dtype = torch.float32 if case.dtype == "tf32" else getattr(torch, case.dtype)
        padding = case.kernel // 2
        out = (28 + 2 * padding - case.kernel) // case.stride + 1
        axes = (Axis(28, out, case.kernel, case.stride, padding, 1),) * 2
        x, grad = _meta(64, 28, 28, layout.shape[1], dtype=dtype), _meta(64, out, out, layout.shape[0], dtype=dtype)
        values = torch.empty(*layout.values_shape, case.kernel, case.kernel, dtype=dtype, device="meta")
        bias = torch.empty(layout.shape[0], dtype=dtype, device="meta") if case.activation else None
        self.launches.clear()
        torch.backends.cudnn.conv.fp32_precision = "tf32" if case.dtype == "tf32" else "ieee"
        if case.pass_ == "wgrad":
            convolutions.conv_wgrad(grad, x, layout, False, axes)
        elif case.pass_ == "dgrad":
            convolutions.conv(grad, values, None, layout, True, True, axes, None)
        else:
            convolutions.conv(x, values, bias, layout, False, False, axes, case.activation)
        return list(self.launches)

    def run_attention(self, case: AttentionCase) -> list[Launch]:
        """The forward pass of this case, and its gradients."""
        from blocksparse.ops.attention import triton as attention
        from blocksparse.ops.attention.rules import Rules

        torch.backends.cuda.matmul.fp32_precision = "tf32" if case.dtype == "tf32" else "ieee"
        dtype = torch.float32 if case.dtype == "tf32" else getattr(torch, case.dtype)
        heads, tokens = 2 * case.heads, 8 * case.block
        layouts = [
            bs.patterns.random((tokens, tokens), case.block, density=0.5, seed=seed)
            for seed in range(heads if case.per_head else 1)
        ]
        q, k = (_meta(1, count, tokens, case.features, dtype=dtype) for count in (heads, 2))
        rules = Rules(right=0 if case.window else None, softcap=case.softcap)
        self.launches.clear()
        y, lse = attention.forward(q, k, k, layouts, rules)
        attention.backward(q, k, k, y, lse, y, None, layouts, rules)
        return list(self.launches)

    def compiled(self, launch: Launch, with_loop: bool = False) -> dict[str, Any]:
        """Return the compiler's figures for a launch; those of the loop take half a second."""
        kernel = self.compile(launch.kernel, *launch.arguments, grid=(1,), warmup=True, **launch.options)
        # LLVM compiles undefined code, and code that exceeds tensor memory, to a trap and nothing else.
        code = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
        traps = bool(re.search(r"^\s+(trap;|s_trap\b)", code, re.MULTILINE))
        facts = {"shared": kernel.metadata.shared, "traps": traps}
        return facts | (_amd(kernel.asm) if self.target.backend == "hip" else _nvidia(kernel.asm, with_loop))


def _nvidia(asm: Any, with_loop: bool) -> dict[str, Any]:
    ptx = asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    registers, stack, local = map(int, found.groups())
    return {
        "registers": registers,
        "spilled": stack + local,  # bytes
        "products": _distinct(r"((?:wgmma|mma|tcgen05)\.(?:mma_async|sync|mma)\.[\w.:]*)", ptx),
        "copies": _distinct(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (\w+),", ptx),
        "loads": _distinct(r"ld\.global[\w.:]*", ptx),
        "bulk": "cp.async.bulk" in ptx,
        "loop": _loop(asm["cubin"]) if with_loop and "wgmma" in ptx else None,
    }


def _loop(cubin: bytes) -> tuple[int, int]:
    """The instructions of the shortest loop that has any `wgmma`, and how many of them these are."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    code, labels, loops = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction.group(1))
            back = re.search(r"BRA.*`\((\.L_\w+)\)", code[-1])
            if back and back.group(1) in labels:
                body = code[labels[back.group(1)] :]
                loops.append((len(body), sum("HGMMA" in each for each in body)))
    return min((loop for loop in loops if loop[1]), default=(0, 0))


def _amd(asm: Any) -> dict[str, Any]:
    code = asm["amdgcn"]
    spills = re.findall(r"\.[sv]gpr_spill_count: *(\d+)", code)
    registers = re.search(r"\.vgpr_count: *(\d+)", code)
    return {
        "registers": int(registers.group(1)),
        "spilled": sum(map(int, spills)),  # registers
        "products": _distinct(r"v_mfma_\w+", code),
        "loads": _distinct(r"(?:global|buffer)_load_\w+", code),
    }


def _distinct(pattern: str, text: str) -> dict[str, int]:
    """How often each occurs."""
    return dict(sorted(Counter(re.findall(pattern, text)).items()))


# -- all of them ----------------------------------------------------------------------------------------------------


def main(kind: str, extent: str) -> dict[str, list[dict[str, Any]]]:
    """The results of all kernels, by op."""
    gpu = GPUS[kind]
    device = Device(gpu)
    records: dict[str, list[tuple[dict[str, Any], str]]]
    records = {"linear": [], "lstm_gates": [], "recurrent": [], "conv": [], "gated_linear": [], "attention": []}
    unique = {}
    for case in cases(gpu, extent):
        with chosen(case, gpu):
            tile = tiles.tile_for(case.work, gpu)
        for launch in device.run(case):
            unique[launch.key()] = launch
            estimate = tiles.shared_memory(tile, case.work)
            record = {"case": str(case), "kernel": launch.kernel.__name__, "tile": asdict(tile), "estimate": estimate}
            records["linear"].append((asdict(case) | record, launch.key()))
    for op, op_cases, run in (
        ("lstm_gates", gates_cases, device.run_gates),
        ("recurrent", step_cases, device.run_step),
        ("gated_linear", gated_cases, device.run_gated),
        ("attention", attention_cases, device.run_attention),
    ):
        for case in op_cases(extent):
            for launch in run(case):
                unique[launch.key()] = launch
                constants = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
                record = asdict(case) | {"kernel": launch.kernel.__name__, "rows": constants.get("BLOCK_M")}
                records[op].append((record, launch.key()))
    for case in conv_cases(extent):
        for launch in device.run_conv(case):
            unique[launch.key()] = launch
            constants = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
            record = asdict(case) | {"kernel": launch.kernel.__name__, "together": constants.get("POSITIONS")}
            records["conv"].append((record, launch.key()))
    records["keys"] = [({"kernel": kernel, "keys": keys}, "") for kernel, keys in keys_of_tokens(device).items()]
    _todo[:] = [(device, launch) for launch in unique.values()]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        found = dict(zip(unique, pool.map(_compiled, range(len(_todo)), chunksize=1), strict=True))
    return {op: [record | found.get(key, {}) for record, key in of_op] for op, of_op in records.items()}


def keys_of_tokens(device: Device) -> dict[str, int]:
    """By kernel, how many are compiled for all kinds of token counts, or of a step's rows, that are of one bucket."""
    keys: dict[str, set[str]] = {}
    for n in (33, 47, 48, 63, 64):
        of = {pass_: device.run(Case(pass_, "bfloat16", (32, 32), 4096 + n)) for pass_ in tiles.PASSES}
        of["step"] = device.run_step(StepCase("bfloat16", (32, 32), n, True))
        of["gates"] = device.run_gates(GatesCase("bfloat16", n, 1024, True))
        for what, launches in of.items():
            for launch in launches:
                keys.setdefault(f"{what} {launch.kernel.__name__}", set()).add(launch.key())
    return {kernel: len(of_kernel) for kernel, of_kernel in keys.items()}


_todo: list[tuple[Device, Launch]] = []  # inherited by the forks: launches cannot be sent to them


def _compiled(nth: int) -> dict[str, Any]:
    device, launch = _todo[nth]
    try:
        return device.compiled(launch, with_loop=launch.kernel.__name__.startswith("conv"))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        import triton

        json.dump(main(sys.argv[1], "".join(sys.argv[2:]).removeprefix("--")), sys.stdout, default=str)
