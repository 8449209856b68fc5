"""The model of a GPU, compared with times measured on one, and figures of compiled kernels that it relies on."""

import json
import re
import subprocess
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version

import pytest

import bench_parts
import blocksparse as bs
from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse_lab.bench.linear_specs import LinearSpec
from prediction import compile as compile_rows
from prediction import model
from prediction.model import (
    CHIPS,
    HEAD,
    compiled,
    dense_time,
    launch_time,
    resident,
    table,
    together,
    without_empty_columns,
)
from targets.rows import Row

H100 = CHIPS["h100"]


def launch(programs, steps, longest, macs, memory, cache, registers, shared, warps, loop, tensor=True):
    instructions, wavefronts, narrow = loop
    loop = {"instructions": instructions, "wavefronts": wavefronts, "narrow": narrow}
    kernel = {"products": {}, "registers": registers, "shared": shared, "warps": warps, "loop": loop, "traps": False}
    facts = {"programs": programs, "steps": steps, "longest": longest, "macs": macs, "memory": memory, "cache": cache}
    return {**facts, "tensor": tensor, "kernel": kernel}


# Kernels compiled at commit d01ed05, with the seconds that an H100 took then.
FEW = (56, 50688, 4, (105, 68, None))
MEASURED = {
    "few tokens, bf16, density 0.5": (
        launch(384, 18624, 55, 2415919104, 152567808, 301989888, *FEW), 63.6e-6, "memory",
    ),
    "few tokens, bf16, density 0.1": (
        launch(384, 3878, 14, 483196928, 31772672, 60399616, *FEW), 16.7e-6, "memory",
    ),
    "few tokens, fp32, density 0.1": (
        launch(384, 14938, 55, 483196928, 63545344, 120799232, 72, 16640, 4, (381, 579, None), tensor=False),
        170.9e-6, "shared memory",
    ),
    "many tokens, block 32": (
        launch(8192, 108960, 22, 54978936832, 281858048, 3865706496, 80, 111104, 8, (131, 8, 32)), 565.5e-6, "L2 cache",
    ),
    "many tokens, block 64": (
        launch(4096, 54464, 24, 54962159616, 281849856, 2146959360, 123, 123392, 8, (143, 8, 64)), 382.9e-6, "L2 cache",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_predicts_measured_times(name):
    facts, seconds, bound = MEASURED[name]
    found = launch_time(facts, H100)
    assert found.seconds == pytest.approx(seconds, rel=0.15)
    assert found.bound == bound


def dense(hidden, tokens, dtype):
    moved = (hidden**2 + 2 * hidden * tokens) * (2 if dtype == "bfloat16" else 4)
    return {"operations": 2 * hidden**2 * tokens, "moved": moved, "dtype": dtype, "few": tokens <= 64}


def test_dense_products_match_cublas():
    for hidden, tokens, dtype, seconds in (
        (12288, 32, "bfloat16", 113.8e-6),
        (12288, 32, "float32", 427e-6),
        (8192, 8192, "bfloat16", 1490e-6),
    ):
        assert dense_time(**dense(hidden, tokens, dtype), chip=H100) == pytest.approx(seconds, rel=0.03)


def test_dense_product_includes_its_launch_and_16_bit_dtypes_agree():
    tiny = dense(64, 16, "bfloat16")
    assert dense_time(**tiny, chip=H100) > model.LAUNCH
    assert dense_time(**tiny, chip=H100, launches=2, times=3) > 6 * dense_time(**tiny, chip=H100)
    many = dense(8192, 8192, "bfloat16")
    assert dense_time(**{**many, "dtype": "float16"}, chip=H100) == dense_time(**many, chip=H100)


def test_faster_memory_helps_only_memory_bound_work():
    fast = replace(H100, memory=2 * H100.memory)
    few, _, _ = MEASURED["few tokens, bf16, density 0.5"]
    assert launch_time(few, fast).seconds < 0.85 * launch_time(few, H100).seconds
    fp32, _, _ = MEASURED["few tokens, fp32, density 0.1"]
    assert launch_time(fp32, fast) != launch_time(few, fast)
    assert launch_time(fp32, fast).seconds == launch_time(fp32, H100).seconds
    split = {**fp32, "kernel": {**fp32["kernel"], "products": {"mma.m16n8k8.row.col.f32.tf32.tf32.f32": 96}}}
    products = launch_time({**split, "macs": 10**12}, H100).parts["products"]
    assert products == pytest.approx(6e12 / (0.745 * 494.5e12))
    free = {**fp32, "kernel": {**fp32["kernel"], "loop": {**fp32["kernel"]["loop"], "wavefronts": 99}}}
    assert launch_time(free, H100).seconds < 0.4 * launch_time(fp32, H100).seconds, "without its bank conflicts"


def test_longest_row_bounds_the_time():
    even, _, _ = MEASURED["few tokens, bf16, density 0.1"]
    found = launch_time({**even, "longest": 80}, H100)
    assert found.bound == "longest row"
    assert found.seconds > 2 * launch_time(even, H100).seconds


def test_registers_memory_and_threads_limit_resident_programs():
    small = {"registers": 32, "shared": 1024, "warps": 4}
    assert resident(small, H100) == 16  # 2,048 threads
    assert resident({**small, "registers": 255, "warps": 8}, H100) == 1
    assert resident({**small, "shared": 111104}, H100) == 2
    assert resident({**small, "shared": 300000}, H100) == 1


def test_launches_add_up():
    few, _, _ = MEASURED["few tokens, bf16, density 0.1"]
    many, _, _ = MEASURED["many tokens, block 32"]
    both = together([few, many], H100)
    assert both.seconds == pytest.approx(launch_time(few, H100).seconds + launch_time(many, H100).seconds)
    assert both.bound == "L2 cache"


def test_table_has_targets_and_measured_times():
    rows = {}
    for name, (facts, _, _) in MEASURED.items():
        tokens, hidden = (32, 12288) if "few" in name else (8192, 8192)
        dtype = "float32" if "fp32" in name else "bfloat16"
        rows[name] = {"dense": [dense(hidden, tokens, dtype)], "launches": [facts]}
    step = rows["many tokens, block 64"]
    rows["training step, many tokens, block 64"] = {key: 3 * value for key, value in step.items()}
    details = {"seconds": {"blocksparse": {"median": 63.6e-6}}}
    measured = [Row("few tokens, bf16, density 0.5, hidden 12288, 32 tokens", "", "", None, details)]
    lines = {line[0]: dict(zip(HEAD, line, strict=True)) for line in table(rows, H100, measured)}
    first = lines["few tokens, bf16, density 0.5"]
    assert (first["target"], first["met"], first["measured"]) == ("1.8x", "yes", "63.6 us")
    assert "measured" in without_empty_columns(list(table(rows, H100, measured)))[0]
    head, without = without_empty_columns(table(rows, H100))
    assert head == HEAD[:6] == tuple(HEAD[: len(without[0])])
    assert re.fullmatch(r"-\d%", first["error"])
    assert lines["few tokens, fp32, density 0.1"]["met"] == "NO"
    assert lines["few tokens, fp32, density 0.1"]["error"] == ""
    trained = lines["training step, many tokens, block 64"]
    target = 0.85 * float(lines["many tokens, block 64"]["speed-up"].removesuffix("x"))
    assert float(trained["target"].removesuffix("x")) == pytest.approx(target, rel=0.01)
    assert trained["met"] == "yes"


def test_trap_has_no_time():
    facts, _, _ = MEASURED["few tokens, bf16, density 0.1"]
    broken = {**facts, "kernel": {**facts["kernel"], "traps": True}}
    (line,) = table({"a row": {"dense": [dense(12288, 32, "bfloat16")], "launches": [facts, broken]}}, H100)
    assert line[:4] == ("a row", "-", "a trap", "-")


def test_bank_conflicts_are_counted():
    text = """
    #shared1 = #ttg.swizzled_shared<{{vec = 4, perPhase = 1, maxPhase = {}, order = [0, 1]}}>
    ttg.local_load %w : !ttg.memdesc<{}x32xf32, #shared1, #smem> -> tensor<x, #ttg.dot_op<{{opIdx = 1, parent = #mma>
    """
    sizes = (8, 64), (1, 64), (2, 64), (1, 16)
    assert [compile_rows._bank_conflict_ways(text.format(*size)) for size in sizes] == [1, 8, 4, 4]


def test_kernels_that_do_not_compile_raise(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "TypeError: no spec has unexpected\n")
    monkeypatch.setattr(model.subprocess, "run", lambda *command, **options: failed)
    with pytest.raises(bs.BlockSparseError, match=r"kernels: expected ones that compile for H200.*unexpected"):
        compiled(CHIPS["h200"], '{"unexpected": 1}')


# -- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch, capsys):
    """`gpu.py` in this process: `script(*arguments)` returns its status, stdout and stderr."""
    return bench_parts.script(bench_parts.load("gpu"), monkeypatch, capsys)


def test_bad_layers_end_in_one_line(script):
    for arguments, wanted in (
        (("--linear", "64"), "--linear: expected OUTxIN, as in 3072x768, got '64'"),
        (("--linear", "64x96", "--block", "64"), "in_features: expected a multiple of the block size 64, got 96"),
        (("--linear", "64x96", "--dtype", "int8"), "--dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        (("--linear", "64x96", "--density", "0.01"), "--density: expected a block of 6, 1, or more, got 0.01 of them"),
        (("--linear", "64x96", "--tokens", "0"), "tokens: expected a positive int, got 0"),
        (("--density", "0.5"), "--density: expected --linear OUTxIN with it, got none"),
    ):
        assert script("--predict", *arguments) == (1, "", f"error: {wanted}\n")
    assert "--linear: expected --predict with it, got none" in script("--linear", "64x96")[2]


def test_predictions_fit_a_narrow_terminal(script, monkeypatch, tmp_path):
    every, asked = {name: {} for name in ("training step, many tokens, block 32", "few tokens, bf16, density 0.1")}, []

    def lines(found, chip, measured):
        had = list(measured) and "565.5 us"
        return [(name, "514.7 us", "L2 cache", "2.90x", "-", "-", had or "", "") for name in found]

    monkeypatch.setattr(model, "compiled", lambda chip, *names: asked.append(names) or every)
    monkeypatch.setattr(model, "table", lines)
    monkeypatch.setenv("COLUMNS", "80")
    status, said, _ = script("--predict", "--gpu", "b200", "--only", "few tokens, bf16, density 0.1", "--out", tmp_path)
    assert status == 0
    assert "predicted for B200: a model fitted to an H100, off by up to 45 % on the H100 and the H200" in " ".join(
        said.split()
    )
    assert "few tokens, bf16, 0.1  514.7 us" in said
    assert "many" not in said
    assert "measured  " not in said
    assert "few tokens, bf16, density 0.1 | 514.7 us" in (tmp_path / "predicted-b200.md").read_text()
    assert "565.5 us" in script("--predict", "--gpu", "h100")[1]
    said = script("--predict", "--linear", "3072x768", "--tokens", "12608", "--density", "0.25", "--dtype", "float16")[
        1
    ]
    assert "3072x768, 12608 tokens, block 32, density 0.25, float16, predicted for" in " ".join(said.split())
    assert json.loads(asked[-1][0])["density"] == 0.25


# -- figures of compiled kernels -------------------------------------------------------------------------------------

with_triton = pytest.mark.skipif(not triton_runtime._installed(), reason="Triton is not installed")
# Least programs per multiprocessor: four, so that some load while others end; two with large tiles at blocks of 32.
RESIDENT = {"few tokens, bf16, density 0.1": {"sm80": 3, "sm90": 4, "sm100": 4, "gfx942": 4}}
RESIDENT["many tokens, block 32"] = {"sm80": 4, "sm90": 2, "sm100": 2, "gfx942": 6}
EXACT = "few tokens, fp32, density 0.1"
ROWS = compile_rows.rows()
CONVOLUTIONS = {name.split()[-1][:-1]: name for name in ROWS if name.startswith("ConvSpec")}
RECURRENT, RECURRENT_WIDE = (name for name in ROWS if "language model" in name)
GATED = next(name for name in ROWS if name.startswith("gated MLP") and " 32 tokens" in name)
SHARED = ("many tokens, block 32", "layout with hubs, many tokens")
# Rows by falling density.
FALLING = {dtype: [name for name in ROWS if name.startswith(f"few tokens, {dtype}")] for dtype in ("bf16", "fp32")}
LAYER = LinearSpec(96, 512, tokens=4096, block=16, density=0.25, dtype="float16")
# Rows whose kernels are compiled together: those that always are, and others that check the same once more.
DESIGNED = (*RESIDENT, EXACT, *SHARED, *FALLING["bf16"], CONVOLUTIONS["forward"], RECURRENT, RECURRENT_WIDE, GATED)
DESIGNED += (model.layer_name(LAYER),)
REPEATED = (*FALLING["fp32"], CONVOLUTIONS["dgrad"], CONVOLUTIONS["wgrad"])
KINDS = {"sm80": "a100", "sm90": "h200", "sm100": "b200", "gfx942": "mi300x"}
# Least programs of convolutions and an LSTM's kernels; the step's tables leave room for three with its gates.
OTHERS = {
    "conv_kernel": {"sm80": 3, "sm90": 3, "sm100": 2, "gfx942": 2},
    "conv_wgrad_kernel": {"sm80": 2, "sm90": 2, "sm100": 2, "gfx942": 2},
    "step_forward_kernel": {"sm80": 3, "sm90": 3, "sm100": 3, "gfx942": 2},
    "linear_kernel": {"sm80": 5, "sm90": 5, "sm100": 5, "gfx942": 5},
    "step_wgrad_kernel": {"sm80": 1, "sm90": 1, "sm100": 1, "gfx942": 3},
}
# Bytes that may spill to memory, if this makes room for another program.
FEW_SPILLED = 8


@lru_cache
def launches(kind, *names):
    """Return what the launches of some rows do, by default of all; compile each group of rows once."""
    return compiled(CHIPS[KINDS[kind]], *dict.fromkeys(names))


def launches_of(kind, name):
    """Return what the launches of a row do."""
    return launches(kind, *(DESIGNED if name in DESIGNED else REPEATED))[name]["launches"]


def kinds(*without):
    """Parametrize over kinds of GPU; all but Hopper are `full`."""
    others = [pytest.param(kind, marks=pytest.mark.full) for kind in KINDS if kind not in ("sm90", *without)]
    return pytest.mark.parametrize("kind", ["sm90", *others])


@with_triton
@kinds()
@pytest.mark.parametrize("name", RESIDENT)
def test_kernels_keep_to_their_design(kind, name):
    (does,) = launches_of(kind, name)
    kernel, chip = does["kernel"], CHIPS[KINDS[kind]]
    assert kernel["spilled"] == 0
    assert resident(kernel, chip) >= RESIDENT[name][kind]
    assert kernel["products"], "on tensor cores"
    if kind != "gfx942":
        assert kernel["copies"]["0x10"] > 0, "asynchronous, 16 bytes per thread"
        products = max(4 * (does["macs"] / does["steps"]) / (256 * 32 * 64), 2)
        if kind == "sm100" and "many" in name:
            pytest.xfail("273 instructions where 137 are wanted: pairs of rows on Blackwell")
        assert kernel["loop"]["instructions"] < 60 * products, "per four products of 64 x 32 x 16"
    if kind == "sm90" and "many" in name:
        assert kernel["loop"]["narrow"] >= 32
        assert kernel["loop"]["wavefronts"] < 20, "the tensor cores read shared memory, threads hardly"


@with_triton
@kinds()
def test_float32_uses_tensor_cores_without_bank_conflicts(kind, request):
    if kind != "gfx942" and [int(part) for part in version("triton").split(".")[:2]] >= [3, 8]:
        reason = "Triton 3.8 moves the leading bits of the operands through shared memory again, with conflicts"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    (does,) = launches_of(kind, EXACT)
    kernel, chip = does["kernel"], CHIPS[KINDS[kind]]
    assert kernel["spilled"] == 0
    assert resident(kernel, chip) >= {"sm80": 3, "sm90": 4, "sm100": 4, "gfx942": 6}[kind]
    assert kernel["loop"]["plain"] == 0
    assert kernel["loop"]["ways"] == 1
    # A tile of 32 x 32 x 64 has 3,072 loads of 128 bytes, divided among two warps, and indices.
    assert kernel["loop"]["wavefronts"] <= 110
    wanted = "v_mfma_f32_32x32x2_f32" if kind == "gfx942" else "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    assert wanted in kernel["products"]


@with_triton
@kinds("sm80", "gfx942")
@pytest.mark.parametrize("name", SHARED)
def test_pairs_of_rows_share_loads_of_inputs(kind, name):
    (does,) = launches_of(kind, name)
    assert does["saved"] >= 0.13
    # Bytes of x and of the values that programs load, with tiles of 256 tokens in 16 bits.
    values = does["macs"] / 8192
    assert does["cache"] <= 2 * (0.87 * 8192 / 32 + 8192 / 256) * values


@with_triton
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
@kinds()
def test_fewer_blocks_are_no_slower(kind, dtype, request):
    if (kind, dtype) == ("gfx942", "bf16"):
        reason = "rows are split at density 0.03 but not at 0.05, and a second launch sums the splits"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    rows = [launches_of(kind, name) for name in FALLING[dtype]]
    for chip in (chip for chip in CHIPS.values() if chip.kind == kind):
        times = [together(row, chip).seconds for row in rows]
        assert times == sorted(times, reverse=True)


@with_triton
@kinds()
@pytest.mark.parametrize(
    "row", ["forward", "recurrent", *(pytest.param(pass_, marks=pytest.mark.full) for pass_ in ("dgrad", "wgrad"))]
)
def test_convolutions_and_recurrences_have_several_resident_programs(kind, row):
    found = launches_of(kind, RECURRENT if row == "recurrent" else CONVOLUTIONS[row])
    kernels = [does["kernel"] for does in found if does.get("kernel", {"name": "sum"})["name"] in OTHERS]
    assert len(kernels) == (3 if row == "recurrent" else 1)
    for kernel in kernels:
        assert not kernel["traps"]
        assert kernel["products"], "on tensor cores"
        assert kernel["spilled"] <= FEW_SPILLED
        assert resident(kernel, CHIPS[KINDS[kind]]) >= OTHERS[kernel["name"]][kind]


@with_triton
@pytest.mark.parametrize("kind", ["sm90"])
def test_layers_of_any_shape_are_predicted(kind):
    rows = launches(kind, *DESIGNED)
    assert list(rows)[-4:] == ["forward", "dgrad", "wgrad", "step"]
    found = {name: rows[name] for name in list(rows)[-4:]}
    parts = [together(found[pass_]["launches"], H100).seconds for pass_ in ("forward", "dgrad", "wgrad")]
    assert together(found["step"]["launches"], H100).seconds == pytest.approx(sum(parts))
    # 6 rows of 32 blocks, a quarter of which is stored: 96 outputs of 512 inputs.
    (forward,) = found["forward"]["launches"]
    assert forward["memory"] == 2 * (48 * 16**2 + 4096 * (96 + 512))
    # With few blocks, tokens are split among programs to fill the GPU, and PyTorch adds and rounds their sums.
    product, *passes = found["wgrad"]["launches"]
    assert "kernel" in product
    assert [sorted(each) for each in passes] == [["memory"], ["memory"]]
    assert product["memory"] > forward["memory"]
    assert found["forward"]["dense"][0]["operations"] == 2 * 96 * 512 * 4096
    head, lines = without_empty_columns(table(found, H100))
    assert head == ("work", "predicted", "bound by", "speed-up")
    assert [line[0] for line in lines] == list(found)


@with_triton
def test_convolution_has_few_instructions_for_addresses():
    (does,) = launches_of("sm90", CONVOLUTIONS["forward"])
    kernel = does["kernel"]
    # Four warps multiply 64 x 32 x 16 in one instruction.
    products = does["macs"] / does["steps"] / (64 * 32 * 16) / (kernel["warps"] / 4)
    assert kernel["loop"]["instructions"] <= 60 * products / 4


@with_triton
def test_large_lstm_and_gated_mlp_match_their_measured_parts():
    # Times on an H100 from docs/results/gpu.md; whole steps are sums of the kernels' times.
    rows = launches("sm90", *DESIGNED)
    for name, ours, peers in ((RECURRENT, 17e-3, 8.14e-3), (RECURRENT_WIDE, 17e-3, 187.8e-3), (GATED, 19e-6, 133e-6)):
        assert together(rows[name]["launches"], H100).seconds == pytest.approx(ours, rel=0.15)
        assert sum(dense_time(**each, chip=H100) for each in rows[name]["dense"]) == pytest.approx(peers, rel=0.15)
    step, *_ = rows[RECURRENT]["launches"]
    assert step["times"] == 64
    assert launch_time(step, H100).seconds == pytest.approx(75e-6, rel=0.2)
    (pass_, *_) = (does for does in rows[RECURRENT]["launches"] if "kernel" not in does)
    assert launch_time(pass_, H100).bound == "memory"


@with_triton
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_predicted_for_every_kind(kind):
    lines = table(launches(kind), CHIPS[KINDS[kind]])
    assert [line[0] for line in lines] == list(compile_rows.rows())
    for line in lines:
        assert len(line) == len(HEAD)
        assert 1 < float(line[1].removesuffix(" us")) < 30000
    assert json.dumps(launches(kind))
    assert set(model.CHIPS) >= set(KINDS.values())
