"""Kernels as compiled for GPUs that need not be here: matrix instructions, pipelines, no spills.

A few kernels for one kind; `full`: a set that covers the rule, for all kinds, or with BLOCKSPARSE_COMPILE=all every
dtype, block and bucket of tokens.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse.ops.gpu import tiles
from blocksparse.ops.gpu.tiles import Gpu
from compile_cases import GPUS

pytestmark = pytest.mark.skipif(not triton_runtime._installed(), reason="Triton is not installed")

# The kinds of GPU that read the operands of products from shared memory, and by which instruction.
FROM_SHARED_MEMORY = {"sm90": r"wgmma\.mma_async.*m64n(16|32|64|128|256)k", "sm100": r"tcgen05\.mma"}
SIZES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
# Two registers may go to memory where that lets another program onto a multiprocessor, and some more once per program,
# in an activation of 128 sums per thread.
FEW, IN_ACTIVATION = 8, 192


def kinds(known, **gaps):
    """The names of GPUs, "few" behind the one that `make test` compiles a few kernels for; gaps are what fails."""

    def marks(kind):
        return [pytest.mark.full, *([pytest.mark.xfail(reason=gaps[kind], strict=True)] if kind in gaps else [])]

    return pytest.mark.parametrize("kind", ["sm90 few", *(pytest.param(kind, marks=marks(kind)) for kind in known)])


@lru_cache
def all_compiled(kind: str) -> dict[str, list[dict]]:
    """All kernels for this kind of GPU, by op."""
    kind, _, few = kind.partition(" ")
    extent = few or os.environ.get("BLOCKSPARSE_COMPILE", "cover")
    command = [sys.executable, str(Path(__file__).parents[1] / "compile_kernels.py"), kind, f"--{extent}"]
    # Not interpreted, and the package from where it is now.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(tiles.__file__).parents[3])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compiled(kind: str) -> list[dict]:
    """The linear products."""
    return all_compiled(kind)["linear"]


def gates(kind: str) -> list[dict]:
    return all_compiled(kind)["lstm_gates"]


def products(kind: str) -> list[dict]:
    return [record for record in compiled(kind) if record["kernel"] != "linear_reduce_kernel"]


def none_of(records: list[dict], wrong) -> None:
    for record in records:
        assert not wrong(record), record


def on_tensor_cores(record: dict) -> bool:
    return record["dtype"] in ("tf32", "float16", "bfloat16")


@kinds(GPUS)
def test_everything_compiles(kind):
    none_of(compiled(kind), lambda record: "error" in record)
    kernels = {f"linear_{name}kernel" for name in ("", "reduce_", "wgrad_")}
    assert {record["kernel"] for record in compiled(kind)} == kernels


@kinds(GPUS)
def test_no_kernel_of_any_op_is_a_trap(kind):
    of_ops = {op: records for op, records in all_compiled(kind).items() if op != "keys"}
    assert len(of_ops) == 6
    for records in of_ops.values():
        assert records
        none_of(records, lambda record: record["traps"])


@kinds(GPUS)
def test_new_numbers_of_tokens_compile_nothing(kind):
    none_of(all_compiled(kind)["keys"], lambda record: record["keys"] != 1)


def spills(record: dict) -> bool:
    return record["spilled"] > (IN_ACTIVATION if record["activation"] else FEW)


@kinds(GPUS, sm100="240 bytes in the gelu of 256 x 128 sums")
def test_nothing_spills(kind):
    none_of(compiled(kind), lambda record: record["pass_"] != "wgrad" and spills(record))


@kinds(GPUS)
def test_shared_memory_is_within_the_estimate_and_the_limit(kind):
    none_of(
        compiled(kind), lambda record: record["shared"] > min(record["estimate"], GPUS[kind.split()[0]].shared_memory)
    )


@kinds(GPUS)
def test_products_run_on_tensor_cores(kind):
    none_of(products(kind), lambda record: on_tensor_cores(record) and not record["products"])


@kinds(FROM_SHARED_MEMORY)
def test_many_tokens_run_on_tensor_cores_that_read_shared_memory(kind):
    large = [record for record in products(kind) if on_tensor_cores(record) and record["tokens"] == 8192]
    assert {record["pass_"] for record in large} == set(tiles.PASSES)
    none_of(
        large,
        lambda record: not all(re.search(FROM_SHARED_MEMORY[kind.split()[0]], name) for name in record["products"]),
    )
    if kind.startswith("sm90"):  # with all outputs of a tile in one instruction, or up to 256 tokens
        none_of(large, lambda record: f"m64n{instruction_n(record)}k" not in "".join(record["products"]))


def instruction_n(record: dict) -> int:
    """The N of its wgmma: the outputs, or where these are 64 and more, tokens, shared out among groups of 4 warps."""
    tile = record["tile"]
    outputs = tile["block_n"] * (1 + tile["pairs"])
    if record["pass_"] == "wgrad" or outputs < 64 or not (tile["pairs"] or tile["block_k"] <= width(record)):
        return outputs
    return min(tile["block_m"] // max(tile["warps"] // 4 // (outputs // 64), 1), 256)


def width(record: dict) -> int:
    return tiles.power_of_two(record["block"][record["pass_"] == "forward"])


def wide(record: dict) -> bool:
    """Whether the larger operand comes by 16 bytes per thread; on NVIDIA's, asynchronously."""
    tile = record["tile"]
    steps, across = ("block_m", "block_k") if record["pass_"] == "wgrad" else ("block_k", "block_m")
    step = min(tile[steps], width(record)) if tile["pairs"] else tile[steps]  # two rows take one entry at a time
    step *= max(tile[across], tile["block_n"]) * SIZES[record["dtype"]]
    copies = record.get("copies")
    if copies is None:  # on AMD's, into registers
        return step < 16 * 64 * tile["warps"] or any(name.endswith("dwordx4") for name in record["loads"])
    return copies.get("0x10", 0) >= step // (16 * 32 * tile["warps"])


@kinds(GPUS)
def test_loads_are_wide(kind):
    none_of(products(kind), lambda record: record["pass_"] != "wgrad" and not wide(record))


@kinds(GPUS)
def test_wgrad_does_not_spill_and_its_loads_are_wide(kind):
    def wrong(record: dict) -> bool:
        # In TF32 they need the tokens of an input side by side: they are gathered, by 4 bytes.
        gathered = record["dtype"] == "tf32" and kind.split()[0] in FROM_SHARED_MEMORY
        return spills(record) or not (record["copies"] if gathered else wide(record))

    none_of([record for record in products(kind) if record["pass_"] == "wgrad"], wrong)


# -- the gates of an LSTM ----------------------------------------------------------------------------------------


@kinds(GPUS)
def test_gates_compile_without_spills(kind):
    none_of(gates(kind), lambda record: "error" in record or record["spilled"] > FEW)
    kernels = {f"lstm_gates_{pass_}_kernel" for pass_ in ("forward", "backward")}
    assert {record["kernel"] for record in gates(kind)} == kernels


# -- gated pairs of products ---------------------------------------------------------------------------------------


@kinds(GPUS)
def test_gated_pairs_compile_without_spills_for_tensor_cores_and_fit(kind):
    records, most = all_compiled(kind)["gated_linear"], GPUS[kind.split()[0]].shared_memory
    assert {record["kernel"] for record in records} == {"gated_linear_kernel"}
    none_of(records, lambda record: "error" in record or spills(record) or record["shared"] > most)
    none_of(records, lambda record: on_tensor_cores(record) and not (record["products"] and record.get("copies", True)))


# -- attention -----------------------------------------------------------------------------------------------------

# Bytes once per program, where the compiler chose fewer registers for more programs; more in float32, whose products
# hold both halves of both operands.
OF_ATTENTION, OF_ATTENTION_IN_FLOAT32 = 48, 288


@kinds(GPUS)
def test_attention_compiles_for_tensor_cores_and_fits(kind):
    records, most = all_compiled(kind)["attention"], GPUS[kind.split()[0]].shared_memory
    assert {record["kernel"] for record in records} == {f"attention_{p}_kernel" for p in ("forward", "dq", "dkv")}
    none_of(records, lambda record: "error" in record or record["shared"] > most)
    none_of(records, lambda record: on_tensor_cores(record) and not record["products"])
    # Heads of 256 features have no pipeline where shared memory is small.
    none_of(records, lambda record: record["features"] < 256 and not record.get("copies", True))
    full = [record for record in records if on_tensor_cores(record) and record["rows"] >= 64]
    if kind.split()[0] in FROM_SHARED_MEMORY:
        pattern = FROM_SHARED_MEMORY[kind.split()[0]]
        none_of(full, lambda record: not all(re.search(pattern, name) for name in record["products"]))


@kinds(GPUS, gfx942="tiles of attention are chosen for NVIDIA's registers")
def test_attention_does_not_spill(kind):
    def wrong(record: dict) -> bool:
        return record["spilled"] > (OF_ATTENTION if on_tensor_cores(record) else OF_ATTENTION_IN_FLOAT32)

    none_of(all_compiled(kind)["attention"], wrong)


# -- convolutions ------------------------------------------------------------------------------------------------


def convolutions(kind: str) -> list[dict]:
    return all_compiled(kind)["conv"]


@kinds(GPUS)
def test_convolutions_compile_and_fit(kind):
    most = GPUS[kind.split()[0]].shared_memory
    none_of(convolutions(kind), lambda record: "error" in record or record["shared"] > most)
    kernels = {"conv_kernel", "conv_wgrad_kernel", "sum_kernel"}
    assert {record["kernel"] for record in convolutions(kind)} == kernels


# 128 sums of a thread and the operands of as many products share its registers.
IN_REGISTERS = "convolutions of 16 bits in blocks of 64, forward and the gradient of the inputs"


@kinds(GPUS, sm80=IN_REGISTERS, sm89=IN_REGISTERS)
def test_convolutions_do_not_spill(kind):
    none_of(convolutions(kind), spills)


@kinds(GPUS)
def test_convolutions_run_on_tensor_cores_and_copy_asynchronously(kind):
    sums = [record for record in convolutions(kind) if record["kernel"] != "sum_kernel" and on_tensor_cores(record)]
    none_of(sums, lambda record: not record["products"] or not record.get("copies", True))


def test_convolutions_spend_few_instructions_on_addresses():
    loops = [record for record in convolutions("sm90 few") if record.get("loop")]
    assert {record["pass_"] for record in loops} == set(tiles.PASSES)
    none_of(loops, lambda record: not 0 < record["loop"][0] <= 20 * record["loop"][1])
    none_of(loops, lambda record: record["together"] != 4)


@pytest.mark.full
def test_no_convolution_spends_many_instructions_on_addresses():
    loops = [record for record in convolutions("sm90") if record.get("loop") and min(record["block"]) >= 32]
    none_of(loops, lambda record: not 0 < record["loop"][0] <= 60 * record["loop"][1])


# The names of loads of this many bytes per thread, and of wider ones.
LOADS = {16: ("v4.b32", "v2.b64", "dwordx4")}
LOADS[8] = (*LOADS[16], "v2.b32", ".b64", "dwordx2")
LOADS[4] = (*LOADS[8], "global.b32", "dword")


@kinds(GPUS)
def test_gates_load_all_that_is_a_threads_at_once(kind):
    numbers = 2 if kind.startswith("gfx") else 4  # of 512 among 4 warps

    def wrong(record: dict) -> bool:
        wide = LOADS[min(numbers * SIZES[record["dtype"]], 16)]
        return not all(name.endswith(wide) for name in record["loads"])

    none_of([record for record in gates(kind) if record["hidden"] % 16 == 0], wrong)


def test_the_rule_knows_blackwell_from_ampere():
    work = tiles.Work("forward", torch.bfloat16, (32, 32), 8192, 0.1)

    def tokens(kind: str) -> int:
        return tiles.rule(work, Gpu("", kind, 100, 227 * 1024)).block_m

    assert tokens("sm100") == tokens("sm90") == 256
    assert tokens("sm80") == tokens("sm120") == tokens("gfx942") == 128


# -- the steps of an LSTM ----------------------------------------------------------------------------------------


@kinds(GPUS)
def test_steps_compile_for_tensor_cores_without_spills(kind):
    records, gpu = all_compiled(kind)["recurrent"], kind.split()[0]
    none_of(records, lambda record: "error" in record or record["spilled"] > FEW or not record["products"])
    assert {record["kernel"] for record in records} == {"step_forward_kernel", "step_wgrad_kernel"}
    none_of(records, lambda record: record["shared"] > GPUS[gpu].shared_memory)
    if gpu == "sm90":  # three programs of a step share the registers and the memory of a multiprocessor
        steps = [record for record in records if record["kernel"] == "step_forward_kernel"]
        none_of(steps, lambda record: record["registers"] > 168 or record["shared"] + 1024 > 228 * 1024 // 3)
