"""The GPU benchmark, as far as it runs without a GPU: targets, rows, peers, the whole program."""

import io
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import bench_parts
import blocksparse as bs
from blocksparse.measure import Samples, Spread
from blocksparse.ops.gpu.tiles import INTERPRETED
from blocksparse_lab import machine
from blocksparse_lab.bench import peers
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.device import Host, Rotation, get_device
from blocksparse_lab.bench.linear import PEERS, LinearBench, LinearCase
from blocksparse_lab.bench.linear_specs import GPU_HUBS, GPU_MEAN, GPU_REACH, LinearSpec, Target
from command import error
from targets import contract, gpu, rows
from targets.gpu_chart import write_chart

pytestmark = pytest.mark.usefixtures("any_backend")

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SPEC = LinearSpec(64, 96, tokens=10, block=8, density=0.25)
CEILINGS = gpu.Ceilings(copy=1e9, dense={"bfloat16": 1e12, "float32": 1e11})


def case(spec=SPEC, refused=(), **seconds):
    return bench_parts.timed(spec, spec.layout(), refused, **seconds)


@pytest.fixture
def script(monkeypatch, capsys):
    """The program in this process: `script(*arguments)` returns its status, stdout and stderr."""
    module = bench_parts.load("gpu")
    monkeypatch.setattr(module.signal, "signal", lambda *of: None)
    monkeypatch.setenv("COLUMNS", "250")
    return bench_parts.script(module, monkeypatch, capsys)


# -- targets -------------------------------------------------------------------------------------------------------


def test_targets_are_fixed():
    ratio = {name: dict(target.ratios)["dense"] for name, target in GPU_REACH.items()}
    assert list(ratio.values()) == [1.8, 3.5, 8, 14, 18, 3, 5, 7.5, 1, 1, 1, 1.8, 3.5, 8, 14, 18]
    even = [GPU_REACH[f"break-even, block {block}"].spec.density for block in (32, 64, 128)]
    assert even == [0.35, 0.5, 0.75]
    assert {t.spec.density for t in GPU_REACH.values() if t.bandwidth == 0.75} == {0.5, 0.25, 0.1}
    assert dict(GPU_REACH["many tokens, block 128"].ratios)["stk"] == 1.1
    assert sum(gpu._has_peer(target, "torch-bsr") for target in GPU_REACH.values()) == 8
    assert all({peer for peer, _ in t.ratios} | set(t.others) <= set(PEERS) for t in GPU_REACH.values())
    assert set(GPU_MEAN) <= set(PEERS)


def test_hubs_are_compared_with_a_random_layout_of_equal_size():
    for spec in GPU_HUBS.values():
        hubs = spec.layout(seed=3)
        even = replace(spec, pattern="random", density=hubs.density).layout(seed=3)
        assert hubs.nnz == even.nnz
        assert hubs.density == pytest.approx(spec.density, rel=0.05)
        assert "barabasi-albert" in repr(spec)
        assert max(hubs.crow_indices().diff()) > 3 * max(even.crow_indices().diff()) / 2


# -- rows ----------------------------------------------------------------------------------------------------------


def test_bytes_and_operations_are_counted():
    result = case(blocksparse=1e-3, dense=2e-3)
    assert result.nnz == 24
    assert result.moved == 4 * (24 * 64 + 10 * (64 + 96))
    assert result.bandwidth == pytest.approx(result.moved / 1e-3)
    assert result.operations == 2 * 24 * 64 * 10
    train = replace(result, spec=replace(SPEC, pass_="train"))
    assert train.operations == 3 * result.operations
    assert CEILINGS.least_time(result) == pytest.approx(result.moved / 1e9)
    assert gpu.Ceilings(1e15, {"float32": 1e6}).least_time(result) == pytest.approx(result.operations / 1e6)


@pytest.mark.parametrize(("ratio", "bandwidth", "met"), [(2, 0.9, True), (2.1, 0.9, False), (2, 1.1, False)])
def test_target_needs_its_ratio_and_its_bandwidth(ratio, bandwidth, met):
    result = case(blocksparse=1e-3, dense=2e-3)
    part = result.moved / 1e-3 / 1e9
    target = Target(SPEC, (("dense", ratio),), bandwidth=part * bandwidth)
    (row,) = gpu.case_rows("work", target, result, CEILINGS)
    assert row.met is met
    assert f"= {part:.0%} of a copy" in row.measured
    assert row.details["part_of_copy"] == pytest.approx(part)


def case_rows(target, ceilings=CEILINGS, **seconds):
    return gpu.case_rows("work", target, case(blocksparse=1.0, **seconds), ceilings)


def test_further_targets_have_rows_and_refusals_their_reasons():
    target = Target(SPEC, (("dense", 3), ("stk", 1.1)), others=("torch-bsr", "csr-matmul"))
    first, second = case_rows(target, dense=4.0, torch_bsr=5.0, refused={"stk": "not here", "csr-matmul": "no bf16"})
    assert first.met is True
    assert "4.00x" in first.measured
    assert first.measured.endswith("5.00x torch-bsr, csr-matmul refused")
    assert first.details["refused"]["csr-matmul"] == "no bf16"
    assert (second.work, second.met) == ("work, stk", None)
    assert second.measured == "not measured: stk: not here; ours takes 1e+06 us"
    assert case_rows(target, dense=4.0, stk=1.0, torch_bsr=1.0, csr_matmul=1.0)[1].met is False


def test_rows_without_peer_or_ceilings_have_our_time():
    target = Target(SPEC, (("dense", 3),))
    (row,) = case_rows(target, refused={"dense": "oom"})
    assert row.met is None
    assert row.measured.startswith("not measured: dense: oom; ours takes 1e+06 us, ")
    assert row.details["seconds"][OURS]["median"] == 1.0
    (row,) = case_rows(target, None, dense=4.0)
    assert row.met is True
    assert "part_of_copy" not in row.details
    target = replace(target, bandwidth=0.75)
    assert [case_rows(target, None, dense=seconds)[0].met for seconds in (4.0, 2.0)] == [None, False]


def test_training_keeps_a_fraction_of_forward():
    train = replace(SPEC, pass_="train")
    step = case(train, blocksparse=1.0, dense=4.0)
    assert gpu.training_row("work", Spread(4.7, 4.7, 4.7, 9), step).met is True
    row = gpu.training_row("work", Spread(4.8, 4.8, 4.8, 9), step)
    assert row.met is False
    assert "83% of forward's 4.80x" in row.measured
    row = gpu.training_row("work", Spread(4.7, 4.7, 4.7, 9), case(train, blocksparse=1.0, refused={"dense": "oom"}))
    assert row.measured == "not measured: dense: oom; ours takes 1e+06 us"
    assert row.details["seconds"]


def test_mean_is_geometric_over_cases_that_ran():
    cases = [case(blocksparse=1.0, torch_bsr=ratio).as_dict() for ratio in (1.0, 4.0)]
    refusing = case(blocksparse=1.0, refused={"torch-bsr": "no"}).as_dict()
    row = gpu.mean_row("work", "torch-bsr", 1.9, [*cases, refusing])
    assert row.met is True
    assert row.details["mean"] == pytest.approx(2)
    assert "2 of 3 cases" in row.measured
    row = gpu.mean_row("work", "torch-bsr", 1.9, [refusing])
    assert (row.met, row.measured) == (None, "not measured: no")


def test_host_time_is_of_the_eager_call():
    slow, fast = (Spread(seconds, seconds, seconds, 9) for seconds in (13e-6, 11e-6))
    assert gpu.host_row({"eager": fast, "compiled": slow}).met is True
    row = gpu.host_row({"eager": slow, "compiled": "it broke"})
    assert row.met is False
    assert row.measured == "13.0 us eager, compiled not measured"
    json.dumps(row.details)


# -- running -------------------------------------------------------------------------------------------------------


def test_copies_rotate_and_differ():
    problem = LinearBench(device=Host(copies=3)).case(SPEC)
    results = [problem.call(OURS, copy)() for copy in range(3)]
    assert not any(torch.equal(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert all((problem.copy_of_values(copy) != 0).all() for copy in range(3))
    rotation = Rotation([lambda copy=copy: copy for copy in range(3)], repeats=2)
    rotation()
    assert len(rotation.calls) == 6
    assert rotation.result == 2


def test_seconds_are_per_product():
    counts = {}
    bench = LinearBench(device=Host(copies=3))
    bench.prepare(bench.case(SPEC), OURS, counts)
    assert counts == {OURS: 33}  # 11 times 3 copies, as few tokens need 32 products or more
    assert Samples({"a": [6.0, math.nan]}, {}).per({"a": 3}).time("a") == Spread(2.0, 2.0, 2.0, 1)
    result = LinearBench(("dense",), rounds=3, budget=0.05, device=Host(copies=3)).run(SPEC)
    assert result.as_dict()["calls_per_sample"] == {OURS: 33, "dense": 33}


def test_tiles_are_recorded():
    problem = LinearBench().case(replace(SPEC, pass_="train", dtype="bfloat16"))
    tiles = problem.tiles(INTERPRETED)
    assert set(tiles) == {"forward", "dgrad", "wgrad"}
    assert tiles["forward"]["block_n"] >= 8
    json.dumps(tiles)


def test_replay_with_other_bits_raises(monkeypatch):
    def drifting(case, name, copy=0):
        return lambda: torch.randn(3)

    monkeypatch.setattr(LinearCase, "call", drifting)
    bench = LinearBench(device=Host(copies=2))
    with pytest.raises(bs.BlockSparseError, match=r"a replay of .* expected the bits of the call, got others"):
        bench.prepare(bench.case(SPEC), OURS, {})


def test_failing_and_wrong_peers_are_recorded_and_the_others_timed(monkeypatch):
    right = LinearCase.call

    def call(case, name, copy=0):
        if name == "torch-bsr":
            raise AssertionError("its kernel\nfails")
        call = right(case, name, copy)
        return (lambda: call() + 1) if name == "bsr-matmul" else call

    monkeypatch.setattr(LinearCase, "call", call)
    result = LinearBench(PEERS, rounds=1, budget=0.01).run(SPEC)
    assert result.refused["torch-bsr"] == "its kernel fails"
    assert "wrong: bsr-matmul's y has a relative L2 error of" in result.refused["bsr-matmul"]
    assert result.peers == ["dense", "onednn", "csr-matmul"]


def test_peer_that_fails_later_leaves_the_others(monkeypatch):
    right, broken, counts = LinearCase.call, "csr-matmul", Counter()

    def call(case, name, copy=0):
        done = right(case, name, copy)

        def late():
            counts[name] += 1
            if name == broken and counts[name] == 5:
                raise RuntimeError("the card\n is gone")
            return done()

        return late

    monkeypatch.setattr(LinearCase, "call", call)
    bench = LinearBench(["dense", "csr-matmul"], rounds=5, budget=2.0)  # enough for all rounds of such short calls
    result = bench.run(SPEC)
    assert result.peers == ["dense"]
    assert result.refused == {"csr-matmul": "the card is gone"}
    broken = OURS
    counts.clear()
    with pytest.raises(RuntimeError, match="the card"):
        bench.run(SPEC)


@pytest.mark.parametrize(
    ("error", "met", "measured"),
    [
        (RuntimeError("out of\nmemory"), False, "FAILED: RuntimeError: out of memory"),
        (NotImplementedError("not here"), None, "not measured: not here"),
        (RuntimeError("cannot open [/tmp/kernel.ptx]"), False, "FAILED: RuntimeError: cannot open [/tmp/kernel.ptx]"),
    ],
    ids=["fails", "refuses", "brackets"],
)
def test_failing_job_is_a_row(error, met, measured):
    def measure():
        raise error

    found = gpu.Job("work [/b]", "-", measure).run()
    assert [(row.met, row.measured) for row in found] == [(met, measured)]
    console = Console(width=200, file=io.StringIO())
    console.print(rows.table(found, "title"))
    assert "work [/b]" in console.file.getvalue()
    assert measured in console.file.getvalue()


# -- the program ---------------------------------------------------------------------------------------------------


@NO_GPU
def test_no_gpu_raises(script):
    message = "device: expected a GPU that PyTorch sees, got none"
    with pytest.raises(bs.BlockSparseError, match=message):
        get_device("cuda")
    assert script() == script("--check") == (1, "", f"error: {message}\n")
    assert message in error("bench", "linear", "--device", "cuda")


def test_list_shows_rows_with_targets(script):
    status, said, _ = script("--list")
    assert status == 0
    for text in ("few tokens, bf16, density 0.03", ">= 18x dense", "layout with hubs", "< 12 us eager", ">= 1.1x stk"):
        assert text in said
    assert "fp32" not in script("--list", "--only", "hubs,break-even")[1]
    wanted = "--only: expected words of the rows that --list shows, got 'hub caps'"
    assert wanted in script("--only=hub caps", "--list")[2]


def test_only_accepts_whole_names_with_commas(script):
    name = "many tokens, block 32, density 0.1, hidden 8192, 8192 tokens"

    def shown(*only):
        listed = script("--list", *(part for name in only for part in ("--only", name)))[1]
        return [text in listed for text in (name, "hubs", "block 64")]

    assert shown(name) == [True, False, False]
    assert shown(name.upper(), "hubs,host") == [True, True, False]
    assert "got 'hub caps'" in script("--list", "--only", name, "--only", "hub caps")[2]


def test_program_runs_on_small_shapes(tmp_path, script, monkeypatch):
    if not bs.backends()["cpu"]:
        pytest.skip("slow without the compiled core")
    monkeypatch.setenv("BLOCKSPARSE_COMMIT", "0123456789abcdef+")
    assert script("--quick", "--device", "cpu", "--out", tmp_path)[0] == 0
    (path,) = tmp_path.glob("linear-*.json")
    content = json.loads(path.read_text())
    jobs = gpu.GpuTargets(None).jobs()
    assert len(content["rows"]) == len(jobs) + 1  # STK has a row of its own
    assert not any(row["measured"].startswith("FAILED") for row in content["rows"])
    assert content["machine"]["commit"] == "0123456789abcdef"
    assert content["machine"]["dirty"] is True
    assert content["settings"]["rounds"] == 1
    case = content["rows"][1]["details"]
    assert case["errors"]["y"] <= case["error_bound"]
    assert case["calls_per_sample"] == {"blocksparse": 32, "dense": 32}
    assert "01234567 with changes" in path.with_suffix(".md").read_text()


def test_late_rows_are_not_measured(tmp_path, script):
    quick = "--quick", "--device", "cpu", "--only", "host,break-even", "--out", tmp_path
    assert script(*quick, "--minutes", "0")[0] == 0
    (path,) = tmp_path.glob("linear-*.json")
    assert {row["measured"] for row in json.loads(path.read_text())["rows"]} == {"not measured: out of time"}


def test_known_rows_stay_when_late():
    known, late = gpu.Job("known", "-", pytest.fail), gpu.Job("late", "-", pytest.fail)
    row = rows.Row("known, block 32", "-", "2x", True)
    reach = gpu.GpuTargets(None, known=[row])
    program = bench_parts.load("gpu")
    unmeasured = rows.Row("late", "-", rows.OUT_OF_TIME, None)
    assert list(program.measure_jobs(reach, [known, late], -1)) == [[row], [unmeasured]]


@pytest.mark.parametrize(
    "change",
    [
        {"measured": 5}, {"work": 3}, {"met": "x"}, {"details": "x"}, {"more": 1}, "x", {"gpu": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_files_of_another_program_are_refused(tmp_path, change):
    path = tmp_path / "a.json"
    rows.write(path, [rows.Row("a", "-", "2x", True)], "what", machine.machine())
    assert rows.read(path)[1][0].measured == "2x"
    content = json.loads(path.read_text())
    if change == {"gpu": "x"}:
        content["machine"] |= change
    else:
        content["rows"][0] = change if isinstance(change, str) else content["rows"][0] | change
    path.write_text(json.dumps(content))
    with pytest.raises(bs.BlockSparseError, match="expected a file that this program wrote"):
        rows.read(path)


def test_bad_options_raise_before_measuring(tmp_path, script, monkeypatch):
    monkeypatch.setattr(gpu.GpuTargets, "jobs", lambda reach: pytest.fail("measures"))
    file = tmp_path / "file"
    file.write_text("")
    for options, message in (
        (("--out", file), f"out: expected a folder to write to, got {file} (File exists)"),
        (("--budget", "-1"), "--budget: expected a finite number, 0 or more, got -1.0"),
        (("--minutes", "-1"), "--minutes: expected a finite number, 0 or more, got -1.0"),
    ):
        assert script("--quick", "--device", "cpu", *options) == (1, "", f"error: {message}\n")
    assert "--device cpu: expected --quick or --check with it" in script("--device", "cpu")[2]


@pytest.mark.full
def test_run_resumes_an_earlier_one(tmp_path, script, monkeypatch):
    settled = []
    monkeypatch.setattr(Host, "warm_up", lambda device: settled.append(device))
    monkeypatch.setenv("BLOCKSPARSE_COMMIT", "0123456789abcdef")
    quick = "--quick", "--device", "cpu", "--out", tmp_path, "--only"
    assert script(*quick, "dense peak,break-even,host")[0] == 0
    (path,) = tmp_path.glob("linear-*.json")
    content = json.loads(path.read_text())
    _, even, *_, host = content["rows"]
    assert even["work"].startswith("break-even")
    host["measured"] = "FAILED: out of memory"
    path.write_text(json.dumps(content))
    timed = len(settled)
    assert script(*quick, "break-even,host,2:4,hubs")[0] == 0
    rows = json.loads(path.read_text())["rows"]
    names = ["bandwidth", *["break-even"] * 3, *["layout with hubs"] * 2, "host time", "2:4"]  # in the order of --list
    assert all(row["work"].startswith(name) for row, name in zip(rows, names, strict=True))
    assert rows[1] == even
    assert not rows[6]["measured"].startswith("FAILED"), "is measured again"
    assert len(settled) == timed + 2, "for the new rows; host times need no warm device"
    monkeypatch.setenv("BLOCKSPARSE_COMMIT", "fedcba")
    assert script(*quick, "break-even")[0] == 0
    assert len(settled) > timed + 2, "of another commit all is measured again"
    path.write_text('{"rows": 1}')
    assert "expected a file that this program wrote" in script(*quick, "host")[2]


def test_check_covers_all_ops_and_reports_failures(script, monkeypatch):
    status, said, _ = script("--check", "--device", "cpu")
    assert status == 0
    assert "WRONG" not in said
    for name in ("LinearSpec", "ConvSpec", "LstmSpec", "gated MLP", "attention", "2 of 4 experts", "GRU"):
        assert f"right {name}" in said
    monkeypatch.setattr(contract, "DTYPES", ("float32",))
    monkeypatch.setattr(contract.LstmBench, "case", lambda self, spec: 1 / 0)
    status, said, _ = script("--check", "--device", "cpu")
    assert status == 1
    assert said.count("WRONG LstmSpec") == 6
    assert "right gated MLP" in said


def test_chart_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    cases = {
        "few tokens, bf16, density 0.5": case(
            replace(SPEC, dtype="bfloat16"), blocksparse=1e-3, dense=2e-3, torch_bsr=1e-2
        ),
        "many tokens, block 32": case(blocksparse=1e-3, dense=3e-3),
    }
    facts = {"gpu": None, "cpu": "x", "isa": None, "threads": 1, "torch": "2", "blocksparse": "0", "commit": None}
    for some in (cases, {"many tokens, block 32": case(blocksparse=1e-3, refused={"dense": "oom"})}):
        details = {name: {**case.as_dict(), "least_time": 1e-4} for name, case in some.items()}
        write_chart(tmp_path / "r.png", details, vars(CEILINGS), machine.where(facts))
        assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_chip_has_the_driver():
    facts = {"gpu": {"name": "NVIDIA H200", "driver": "580.1", "triton": "3.6.0"}}
    assert machine.chip(facts) == "NVIDIA H200, driver 580.1, triton 3.6.0"


def test_memory_beyond_a_steps_needs_is_not_met():
    facts = {"nnz": 100, "gradient": 2**20, "activations": 2**20}
    assert rows.memory_row("work", {**facts, "peak": 3 * 2**20}, dense=2**30).met is True
    assert rows.memory_row("work", {**facts, "peak": 2**25}, dense=2**30).met is False


# -- peers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(2, 2), (3, 5), (1, 4)], ids=str)
def test_csr_has_the_same_weight(block):
    grid = torch.rand(7, 9) < 0.4
    grid[3] = False
    layout = bs.BlockLayout(grid, block_size=block)
    values = torch.randn(layout.values_shape)
    csr = peers.csr(layout, values)
    assert csr.col_indices().dtype == torch.int32
    torch.testing.assert_close(csr.to_dense(), bs.to_dense(values, layout))
    torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), csr.values(), csr.shape, check_invariants=True)


def test_stk_refuses():
    layout = bs.patterns.dense((64, 64), block_size=32)
    with pytest.raises(NotImplementedError, match=r"STK is not installed here|its blocks are 128 x 128"):
        peers.stk(layout, torch.randn(layout.values_shape))


@pytest.fixture
def tuner(monkeypatch):
    """PyTorch's tuner with a kernel that is fastest with 5 stages and 8 warps; yields the parameters that it tried."""
    testing = pytest.importorskip("triton.testing")
    from torch.sparse import _triton_ops

    tried = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_triton_ops, "bsr_dense_addmm", lambda *_, meta, **options: tried.append(dict(meta)))

    def do_bench(call, **options):
        call()
        return 1.0 + abs(tried[-1]["num_stages"] - 5) + abs(tried[-1]["num_warps"] - 8)

    monkeypatch.setattr(testing, "do_bench", do_bench)
    yield tried
    assert testing.do_bench is do_bench  # restored


def bsr_weight():
    layout = bs.patterns.random((64, 96), 16, density=0.4)
    return layout.to_torch_bsr(torch.randn(layout.values_shape))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("tokens", "split"), [(32, 1), (512, 4), (200, 12)])
def test_tuner_starts_from_our_parameters(tuner, tokens, split):
    best = peers.tuned(bsr_weight(), torch.randn(tokens, 96), seconds=60)
    assert {"GROUP_SIZE_ROW": 4, "SPLIT_N": split, "num_stages": 3, "num_warps": 4} in tuner[:2]
    assert (best["num_stages"], best["num_warps"]) == (5, 8)


@pytest.mark.filterwarnings("ignore")
def test_tuner_stops_in_time(tuner):
    assert peers.tuned(bsr_weight(), torch.randn(32, 96), seconds=-1) == {}
    assert not tuner
