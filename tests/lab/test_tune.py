"""Tuning without a GPU: the tiles that are tried, the search with a fake clock, and the use of its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

import blocksparse as bs
from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse.ops.gpu import tiles
from blocksparse.ops.gpu.tiles import Tile, Work
from blocksparse_lab.bench import tune
from blocksparse_lab.bench.device import Host
from blocksparse_lab.bench.linear_specs import LinearSpec
from blocksparse_lab.bench.tune import Case, Tuner, is_valid, neighbours, search
from command import error, run
from compile_cases import GPUS

TINY = LinearSpec(64, 64, tokens=32, block=16, density=0.5)

interpreted = pytest.mark.skipif(not triton_runtime.interpreting(), reason="runs in Triton's interpreter, on the CPU")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSPARSE_TILES", str(tmp_path))
    monkeypatch.setattr(tiles, "shipped_folder", lambda: tmp_path / "shipped")
    tiles.forget_tuned()
    yield tmp_path
    tiles.forget_tuned()


def cost_of_lanes(tile: Tile) -> float:
    """Return a cost that is least at 32 lanes and 4 warps."""
    return 1 + abs(tile.block_k - 32) / 16 + abs(tile.warps - 4) / 4


@dataclass
class Timed:
    """Replaces a GPU: products run on the CPU and take the time that their tile costs."""

    monkeypatch: pytest.MonkeyPatch
    cost: Callable[[Tile], float]

    def __post_init__(self) -> None:
        self.running: Tile | None = None
        self.seconds: dict[Callable[[], object], float] = {}
        use_tiles = tiles.use_tiles

        def watched(**forced: Tile):
            (self.running,) = forced.values()
            return use_tiles(**forced)

        def few(tile: Tile, work: Work, gpu: tiles.Gpu) -> list[Tile]:  # the interpreter is slow
            found = neighbours(tile, work, gpu)
            return [t for t in found if t == replace(tile, block_k=t.block_k, warps=t.warps) and t.block_k > 16]

        self.monkeypatch.setattr(tiles, "use_tiles", watched)
        self.monkeypatch.setattr(tune, "neighbours", few)
        self.device = Host()
        self.device.clock = self.clock

    def clock(self, call, repeat: int) -> float:
        if call not in self.seconds:  # once is enough: the interpreter is slow
            call()
            assert self.running is not None
            self.seconds[call] = 1e-2 * self.cost(self.running)
        return self.seconds[call]


# -- tiles that are tried-----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("pass_", tiles.PASSES)
def test_neighbours_are_valid_and_distinct(kind, pass_):
    gpu = GPUS[kind]
    for dtype in (torch.bfloat16, torch.float32):
        for block in ((8, 8), (32, 32), (24, 40), (128, 128)):
            for tokens in (16, 64, 8192):
                work = Work(pass_, dtype, block, tokens, 0.1)
                rule = tiles.fit(tiles.rule(work, gpu), work, gpu)
                assert is_valid(rule, work, gpu), (rule, work)
                around = neighbours(rule, work, gpu)
                assert len(set(around)) == len(around) >= 3
                assert rule not in around
                for tile in around:
                    assert is_valid(tile, work, gpu)
                    assert tiles.fit(tile, work, gpu) == tile


def test_pairs_are_tried_only_for_rows():
    forward = Work("forward", torch.bfloat16, (32, 32), 8192, 0.5)
    wgrad = replace(forward, pass_="wgrad")
    gpu = GPUS["sm90"]
    assert any(tile.pairs for tile in neighbours(tiles.rule(forward, gpu), forward, gpu))
    assert not any(tile.pairs for tile in neighbours(tiles.rule(wgrad, gpu), wgrad, gpu))


def test_search_finds_a_planted_optimum():
    work, gpu = Work("forward", torch.bfloat16, (64, 64), 8192, 0.1), GPUS["sm90"]
    planted = Tile(block_m=64, block_n=32, block_k=128, warps=4, stages=3, group_m=4)

    def cost(tile: Tile) -> float:
        names = ("block_m", "block_n", "block_k", "warps", "stages", "group_m")
        ratios = [getattr(tile, name) / getattr(planted, name) for name in names]
        return sum(max(ratio, 1 / ratio) for ratio in ratios) + tile.pairs

    tried = []

    def race(tile: Tile, best: Tile) -> float:
        tried.append(tile)
        return cost(tile) / cost(best)

    best = search([tiles.rule(work, gpu)], lambda tile: neighbours(tile, work, gpu), race, lambda: True)
    assert best == planted
    assert len(set(tried)) == len(tried)


def test_search_stops_in_time_and_ignores_noise():
    start, other = Tile(16, 16, 16, 4, 2), Tile(16, 16, 32, 4, 2)
    assert search([start, other], lambda tile: [], lambda tile, best: 0.5, lambda: False) == start
    assert search([start, other], lambda tile: [], lambda tile, best: 0.995, lambda: True) == start
    assert search([start, other], lambda tile: [], lambda tile, best: 0.9, lambda: True) == other


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"passes": ["train"]}, "passes: expected some of forward, dgrad, wgrad, got 'train'"),
        ({"blocks": []}, "blocks: expected at least one"),
        ({"dtypes": ["fp32"]}, "dtypes: expected some of float32, float64, bfloat16, float16, tf32, got 'fp32'"),
        ({"densities": [0.0]}, "density: expected a number above 0"),
        ({"hidden": 100}, "a multiple of the block size 16"),
    ],
)
def test_bad_cases_raise(changed, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        tune.cases(**changed)


# -- from the search to the call -------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("pass_", tiles.PASSES)
def test_tuned_tiles_are_written_and_used(folder, monkeypatch, pass_):
    timed = Timed(monkeypatch, cost_of_lanes)
    tuner = Tuner(timed.device)
    assert not list(folder.iterdir())  # nothing before a case is finished
    (result,) = tuner.run([Case(replace(TINY, pass_=pass_))], seconds=600)
    assert (result.tile.block_k, result.tile.warps) == (32, 4)
    assert result.time.median < result.rule_time.median
    assert not result.refused
    assert tiles.read(tuner.path) == {result.work: result.tile}
    assert json.loads(tuner.path.read_text())["machine"]["torch"] == torch.__version__
    assert tiles.tile_for(result.work, tuner.gpu) == result.tile
    assert tiles.tile_for(result.work, GPUS["sm80"]) != result.tile
    with bs.use_backend("triton"):  # and it runs
        problem = tuner.bench.case(result.case.spec)
        problem.check(seed=1)


@interpreted
def test_runs_add_to_the_file_and_start_from_it(folder, monkeypatch):
    timed = Timed(monkeypatch, cost_of_lanes)
    (first,) = Tuner(timed.device).run([Case(TINY)], seconds=600)
    tuner = Tuner(timed.device)
    cases = [Case(replace(TINY, density=0.25)), Case(TINY, tf32=True)]
    results = tuner.run(cases, seconds=0)  # only the first tile is timed
    second = next(results)
    assert second.tile == second.rule
    assert second.tried == 0
    assert set(tiles.read(tuner.path)) == {first.work, second.work}
    third = next(results)
    assert third.work.tf32
    assert third.work != first.work
    assert len(tiles.read(tuner.path)) == 3
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    with monkeypatch.context() as patch:
        patch.setattr(tune, "neighbours", lambda *_: [])
        (again,) = tuner.run([Case(replace(TINY, density=0.75))], seconds=600)
    assert again.tile == first.tile  # the tile of the nearest density


@interpreted
def test_failing_tiles_are_skipped(monkeypatch):
    def cost(tile: Tile) -> float:
        return 1 / tile.block_k

    timed = Timed(monkeypatch, cost)
    tuner = Tuner(timed.device)
    ready = tuner._prepare

    def failing(problem, tile: Tile):
        if tile.block_k > 64:
            raise RuntimeError("out of\nresources")
        return ready(problem, tile)

    monkeypatch.setattr(tuner, "_prepare", failing)
    monkeypatch.setattr(tiles, "rule", lambda work, gpu: Tile(32, 16, 32, 4, 3))
    (result,) = tuner.run([Case(TINY)], seconds=600)
    assert result.tile.block_k == 64
    assert set(result.refused.values()) == {"RuntimeError: out of resources"}


@interpreted
def test_wrong_results_of_the_rule_raise(monkeypatch):
    from blocksparse.ops.linear import triton

    tuner = Tuner(Timed(monkeypatch, cost_of_lanes).device)
    right = triton.linear
    monkeypatch.setattr(triton, "linear", lambda *arguments: right(*arguments) * 1.01)
    with pytest.raises(bs.BlockSparseError, match=r"y of LinearSpec.*: expected a relative L2 error"):
        next(tuner.run([Case(TINY)], seconds=600))
    assert not tuner.path.exists()


@interpreted
def test_other_files_are_not_overwritten(folder):
    path = folder / f"{tiles.slug(tiles.INTERPRETED.name)}.json"
    path.write_text('{"tiles": "mine"}')
    with pytest.raises(
        bs.BlockSparseError, match=r"tuned tiles: expected a file that `blocksparse tune` wrote, got .*"
    ):
        Tuner(Host())
    assert path.read_text() == '{"tiles": "mine"}'


# -- the command -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_without_a_gpu_raises():
    assert error("tune") == "error: device: expected a GPU that PyTorch sees, got none\n"


@pytest.mark.parametrize(
    ("option", "value"), [("--blocks", "16,x"), ("--tokens", ""), ("--minutes", "0"), ("--passes", "train")]
)
def test_command_refuses_bad_options(option, value):
    assert error("tune", option, value).startswith(f"error: {option[2:]}: expected ")


@interpreted
def test_command_compares_the_rule_with_the_result(folder, monkeypatch):
    timed = Timed(monkeypatch, cost_of_lanes)
    monkeypatch.setattr(tune.Tuner.__init__, "__defaults__", (timed.device, None, 0))
    out = folder / "elsewhere"
    sizes = ["--hidden", "64", "--blocks", "16", "--tokens", "32", "--density", "0.5", "--dtypes", "float32"]
    result = run("tune", *sizes, "--passes", "forward,wgrad", "--out", out, columns=160)
    assert "wgrad float32, block 16, 32 tokens, density 0.5" in result.stdout
    (path,) = out.glob("*.json")
    assert f"wrote {path}" in result.stdout
    assert len(tiles.read(path)) == 2
