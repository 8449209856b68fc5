"""The choice of tiles: the rule, tuned ones read from files, and what the choice depends on."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import blocksparse as bs
from blocksparse.ops.gpu import tiles
from blocksparse.ops.gpu.tiles import Gpu, Tile, Work
from blocksparse.ops.linear import triton as linear
from compile_cases import GPUS

H200 = Gpu("NVIDIA H200", "sm90", 132, 227 * 1024)
WORK = Work("forward", torch.bfloat16, (32, 32), 8192, 0.1)
ODD = Tile(block_m=64, block_n=32, block_k=64, warps=4, stages=3)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Tuned tiles are looked for here, and nowhere else."""
    monkeypatch.setenv("BLOCKSPARSE_TILES", str(tmp_path / "tuned"))
    monkeypatch.setattr(tiles, "shipped_folder", lambda: tmp_path / "shipped")
    tiles.forget_tuned()
    yield tmp_path
    tiles.forget_tuned()


@contextmanager
def tf32():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("pass_", tiles.PASSES)
def test_the_rule_fits_every_gpu(gpu, pass_):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for block in ((1, 1), (8, 8), (24, 40), (128, 128), (256, 512)):
            for tokens in (16, 64, 128, 8192):
                work = Work(pass_, dtype, block, tokens, 0.1)
                tile = tiles.tile_for(work, gpu)
                assert tiles.shared_memory(tile, work) <= gpu.shared_memory
                sizes = (tile.block_m, tile.block_n, tile.block_k, tile.warps)
                assert all(size & (size - 1) == 0 for size in sizes)
                assert min(sizes[:3]) >= 16


def test_a_gpu_with_too_little_memory_is_refused():
    with pytest.raises(bs.BlockSparseError, match=r"GPU: expected at least .* bytes of shared memory.*Tiny"):
        tiles.tile_for(WORK, Gpu("Tiny", "sm80", 1, 1000))


def test_the_switch_of_tf32_counts_at_once():
    def now() -> tuple[Tile, object]:
        return tiles.tile_for(Work("forward", torch.float32, (32, 32), 8192, 0.1), H200), tiles.forced(torch.float32)

    exact = now()
    with tf32():
        assert now()[0] != exact[0]
        assert now()[1] != exact[1]
        assert Work("forward", torch.bfloat16, (32, 32), 8192, 0.1) == WORK
    assert now() == exact


def test_tuned_tiles_are_used_on_their_gpu_only(folder):
    exact = Work("wgrad", torch.float32, (16, 16), 1024, 0.5, tf32=False)
    rounded = replace(exact, tf32=True)
    tuned = {WORK: ODD, exact: replace(ODD, warps=8), rounded: replace(ODD, stages=2)}
    path = folder / "tuned" / "nvidia-h200.json"
    tiles.write(path, H200, tuned, {"torch": "2.99"})
    assert tiles.read(path) == tuned
    assert json.loads(path.read_text())["torch"] == "2.99"
    tiles.forget_tuned()
    for work, tile in tuned.items():
        assert tiles.tile_for(work, H200) == tile
    other = replace(H200, name="NVIDIA A100")
    assert tiles.tile_for(WORK, other) == tiles.rule(WORK, other)


def test_the_nearest_tuned_work_of_the_same_kind_is_chosen(folder):
    far = replace(WORK, tokens=128, density=0.9)
    tiles.write(folder / "shipped" / "nvidia-h200.json", H200, {WORK: ODD, far: replace(ODD, warps=8)}, {})
    assert tiles.tile_for(replace(WORK, tokens=4096), H200).warps == 4
    assert tiles.tile_for(replace(WORK, tokens=256, density=0.8), H200).warps == 8
    for other in (replace(WORK, tokens=16), replace(WORK, block=(16, 16)), replace(WORK, dtype=torch.float16)):
        assert tiles.tile_for(other, H200) == tiles.fit(tiles.rule(other, H200), other, H200)


def test_the_users_tiles_come_before_the_shipped_ones(folder):
    other = replace(WORK, block=(64, 64))
    tiles.write(folder / "shipped" / "nvidia-h200.json", H200, {WORK: ODD, other: replace(ODD, warps=2)}, {})
    tiles.write(folder / "tuned" / "nvidia-h200.json", H200, {WORK: replace(ODD, warps=8)}, {})
    assert tiles.tile_for(WORK, H200).warps == 8
    assert tiles.tile_for(other, H200).warps == 2


@pytest.mark.parametrize("tile", [{"block_m": 48}, {"warps": "4"}, {"stages": 0}, {"block_k": -16}], ids=str)
def test_tiles_that_cannot_be_are_refused(folder, tile):
    with pytest.raises(bs.BlockSparseError, match=f"{next(iter(tile))} of a tile: expected"):
        replace(ODD, **tile)
    path = folder / "tuned" / "nvidia-h200.json"
    tiles.write(path, H200, {WORK: ODD}, {})
    entries = json.loads(path.read_text())
    entries["tiles"][0]["tile"] |= tile
    path.write_text(json.dumps(entries))
    with pytest.raises(bs.BlockSparseError, match=r"tuned tiles: expected .*nvidia-h200\.json"):
        tiles.tile_for(WORK, H200)


@pytest.mark.parametrize(
    ("change", "pays"),
    [
        ({}, True),
        ({"pass_": "dgrad"}, True),
        ({"dtype": torch.float32}, False),
        ({"tokens": 64}, False),
        ({"block": (64, 64)}, False),
    ],
    ids=str,
)
def test_two_rows_at_a_time_only_if_inputs_bound_the_time(change, pays):
    tile = tiles.tile_of_pairs(replace(WORK, **change), H200)
    assert (tile is not None) is pays
    assert tile is None or tile.pairs


def test_no_pairs_for_tuned_or_forced_tiles_or_older_tensor_cores(folder):
    assert tiles.tile_of_pairs(WORK, GPUS["sm80"]) is None
    with tiles.use_tiles(forward=ODD):
        assert tiles.tile_of_pairs(WORK, H200) is None
    tiles.write(folder / "tuned" / "nvidia-h200.json", H200, {WORK: ODD}, {})
    tiles.forget_tuned()
    assert tiles.tile_of_pairs(WORK, H200) is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"tiles": 3}', '{"tiles": [{}]}', '{"tiles": [{"pass": "forward", "dtype": "float31"}]}'],
)
def test_a_broken_file_is_named(folder, content):
    path = folder / "tuned" / "nvidia-h200.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(bs.BlockSparseError, match=r"tuned tiles: expected .*nvidia-h200\.json"):
        tiles.tile_for(WORK, H200)


# -- what the plan of a product makes of them ---------------------------------------------------------------------


def parts_of_rows(lengths, multiprocessors):
    """The number of tasks of each row, by its number of blocks and that of multiprocessors."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    layout, gpu = bs.BlockLayout(mask, 32), replace(H200, multiprocessors=multiprocessors)
    work = replace(WORK, block=(32, 32), tokens=16, density=layout.density)
    tasks = linear._plan(layout, False, work, gpu).tasks
    return [int((tasks[:, 0] == row).sum()) for row in range(len(lengths))]


def test_a_hub_is_cut_sooner_than_a_row_like_the_others():
    # 108 blocks, 27 a multiprocessor: a row of 30 is cut where the others are short, in parts of 16, the least.
    assert parts_of_rows([30] + [2] * 39, 4) == [2] + [1] * 39
    # 90 blocks, 22.5 a multiprocessor: as long, but so are the others.
    assert parts_of_rows([30, 30, 30], 4) == [1, 1, 1]
    # 15 a multiprocessor: nearly twice the mean.
    assert parts_of_rows([30, 30, 30], 6) == [2, 2, 2]


@pytest.mark.parametrize(("pass_", "shared", "pairs"), [
    ("forward", 8, True), ("dgrad", 8, True), ("forward", 2, True), ("dgrad", 2, False), ("forward", 1, False),
])  # fmt: skip
def test_rows_are_paired_if_they_share_enough_inputs(pass_, shared, pairs):
    """Two rows of eight blocks each, which share a number of inputs: the loads saved, of 16."""
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :8] = mask[1, 8 - shared : 16 - shared] = True
    layout = bs.BlockLayout(mask if pass_ == "forward" else mask.T, 32)
    plan = linear._plan(layout, pass_ == "dgrad", replace(WORK, pass_=pass_, density=0.5), H200)
    assert (plan.tasks.shape[1] == 5) is pairs
