"""Pictures of layouts, and the layouts of runs that `compare --topology` reads."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse import checkpoint
from blocksparse.topology import drawings
from blocksparse.topology.drawings.degrees import bins
from blocksparse.topology.drawings.matrix import cells, coarse
from blocksparse.topology.drawings.replacement import reach
from blocksparse.topology.drawings.style import figure_and_axes, label_points
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
from blocksparse_lab.models.mlp import SparseMLP
from blocksparse_lab.recipes import layouts
from command import error, run

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

PNG, GIF = b"\x89PNG", b"GIF8"


def seed():
    return int(np.random.default_rng().integers(1 << 30))


# -- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 16)], ids=str)
@pytest.mark.parametrize("name", ["matrix", "dense_against_sparse", "degree_histogram"])
def test_a_layout_of_any_shape_is_drawn(name, shape, tmp_path):
    layout = bs.patterns.random(shape, 8, density=0.3, seed=seed())
    getattr(drawings, name)(layout, tmp_path / "p.png", "random")
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)


def test_an_empty_layout_is_drawn_or_refused(tmp_path):
    layout = bs.BlockLayout.from_indices([], [], (4, 6), block_size=8)
    drawings.matrix(layout, tmp_path / "m.png", "empty")
    drawings.degree_histogram(layout, tmp_path / "d.png", "empty")
    with pytest.raises(bs.BlockSparseError, match="expected one that stores a block, got BlockLayout"):
        drawings.dense_against_sparse(layout, tmp_path / "p.png", "empty")
    assert not (tmp_path / "p.png").exists()


def test_coarse_cells_count_the_blocks():
    layout = bs.patterns.random((70, 110), 1, density=0.2, seed=seed())
    rows, cols, counts, grid = coarse(layout, 4)
    padded = np.zeros((72, 112))
    padded[:70, :110] = layout.mask()
    expected = padded.reshape(18, 4, 28, 4).sum((1, 3))
    found = np.zeros(grid)
    found[rows, cols] = counts
    np.testing.assert_array_equal(found, expected)
    image, step = cells(layout)
    assert step == 1
    np.testing.assert_array_equal(image > 0, layout.mask().numpy())


def test_bins_hold_every_degree():
    for counts in (np.array([3]), np.array([0, 0]), np.arange(500), np.array([1, 2, 2, 900])):
        for log in (False, True):
            kept = counts[counts > 0] if log else counts
            assert np.histogram(kept, bins(counts, log))[0].sum() == kept.size


def test_a_spreading_has_a_frame_per_step(tmp_path):
    image = pytest.importorskip("PIL.Image")
    layout = bs.patterns.watts_strogatz_2d(144, 1, neighbors=8, rewire=0.2, seed=seed())
    last = drawings.spreading(layout, tmp_path / "s.gif", "small world")
    assert last == bs.topology.steps_from(layout, 6 * 12 + 6).max()
    with image.open(tmp_path / "s.gif") as frames:
        # The last ones are equal, and a writer may join those.
        assert last + 1 <= frames.n_frames <= last + 4
        assert frames.info["loop"] == 0

    layout = bs.patterns.block_diagonal((64, 64), block_size=8)
    assert drawings.spreading(layout, tmp_path / "s.gif", "alone") == 0, "it ends though it never arrives"


@pytest.mark.parametrize(
    ("make", "path", "message"),
    [
        (lambda: bs.patterns.dense((8, 16), 4), "s.gif", "a square grid"),
        (lambda: bs.BlockLayout.from_indices([0], [0], (100_000, 100_000), 1), "s.gif", "at most 300 .*, got 100,000 "),
        (lambda: bs.patterns.dense((8, 8), 4), "s.png", r"expected a name that ends in \.gif, got .*s\.png"),
        (lambda: bs.patterns.dense((8, 8), 4), "no/s.gif", "expected a GIF file to write, got .*no/s.gif"),
    ],
    ids=["rectangle", "huge", "png", "folder"],
)
def test_what_cannot_spread_is_refused(make, path, message, tmp_path):
    with pytest.raises(bs.BlockSparseError, match=message):
        drawings.spreading(make(), tmp_path / path, "it")


def test_a_replacement_costs_what_the_dense_layer_costs(tmp_path):
    made = drawings.Replacement.of(lambda n, s: bs.patterns.random((n, n), 8, density=0.25, seed=s), 256)
    assert made.features == 128
    assert made.dense_weights == made.wide_weights == made.deep_weights == 128**2
    assert len(made.deep) == 4
    assert len(set(made.deep)) == 4
    drawings.replacement(made, tmp_path / "r.png", "random")
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)
    product = np.linalg.multi_dot([layout.mask().double().numpy() for layout in reversed(made.deep)])
    assert reach(made.deep) == pytest.approx((product > 0).mean())
    with pytest.raises(bs.BlockSparseError, match="a square one that stores some of its blocks"):
        drawings.Replacement.of(lambda n, s: bs.patterns.dense((n, n), 8), 64)


def test_distances_are_drawn(tmp_path):
    points = np.random.default_rng().random((6, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    drawings.distance_map(distances, list("abcdef"), tmp_path / "d.png", "nets")
    drawings.distance_map(distances, list("012012"), tmp_path / "e.png", "nets", ["a"] * 3 + ["b"] * 3)
    assert (tmp_path / "e.png").read_bytes().startswith(PNG)
    with pytest.raises(bs.BlockSparseError, match="three or more to draw, got 2"):
        drawings.distance_map(distances[:2, :2], ["a", "b"], tmp_path / "p.png", "nets")
    with pytest.raises(bs.BlockSparseError, match="6, one for each net, got 1"):
        drawings.distance_map(distances, ["a"], tmp_path / "p.png", "nets")


def test_labels_lie_beside_their_points_and_not_on_each_other():
    figure, axes = figure_and_axes((4, 4))
    axes.set(xlim=(1, 100), ylim=(0, 10), xscale="log")
    near = [(2, 5 + 0.05 * n, f"label {n}", "k") for n in range(5)]
    label_points(axes, [*near, (95, 5, "at the edge", "k"), (2, 11, "beyond", "k"), (2, 1, "alone", "k")])
    texts = {text.get_text(): text for text in axes.texts}
    assert set(texts) == {*(f"label {n}" for n in range(5)), "at the edge", "alone"}
    figure.draw_without_rendering()
    boxes = {text: note.get_window_extent() for text, note in texts.items()}
    assert not any(one.overlaps(other) for one, other in combinations(boxes.values(), 2))
    heights = [boxes[f"label {n}"].y0 for n in range(5)]
    assert heights == sorted(heights)
    for text, (x, y) in {"label 0": (2, 5), "alone": (2, 1), "at the edge": (95, 5)}.items():
        assert (boxes[text].y0 + boxes[text].y1) / 2 == pytest.approx(axes.transData.transform((x, y))[1], abs=3)
    assert boxes["at the edge"].x1 < axes.bbox.x1


def test_an_evolution_records_each_epoch():
    pytest.importorskip("sklearn")
    from blocksparse_lab.recipes.evolution import evolve

    with bs.use_backend("cpu" if bs.backends()["cpu"] else "reference"):
        found = evolve(epochs=1, runs=2)
    assert found.trajectory.labels == [0, 1, 0, 1]
    assert found.runs == ("run 1", "run 1", "run 2", "run 2")
    distances = found.trajectory.distances()
    assert distances[0, 2] == 0  # they begin with the same connections
    assert min(distances[0, 1], distances[2, 3], distances[1, 3]) > 0.2  # a third of the connections has moved
    assert all(0 <= error <= 100 for error in found.errors)


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", ["matrix", "dense", "degrees", "replacement", "spreading"])
def test_the_command_draws(picture, tmp_path):
    options = ("--features", 72 if picture == "spreading" else 256, "--block-size", 8, "--neighbors", 4)
    path = tmp_path / "p.gif"
    out = run("layout", "watts_strogatz_2d", *options, "--picture", picture, "--out", path).stdout
    assert f"wrote {path}" in out
    assert path.read_bytes().startswith(GIF if picture == "spreading" else PNG)


def test_the_command_writes_a_page(tmp_path):
    run("layout", "random", "--shape", "64,96", "--block-size", 8, "--density", 0.2, "--html", tmp_path / "p.html")
    assert "random(density=0.2)" in (tmp_path / "p.html").read_text()
    run("layout", "design", "--features", 512, "--block-size", 16, "--params", "60k", "--html", tmp_path / "d.html")
    page = (tmp_path / "d.html").read_text()
    assert "Layouts for 60k weights, 512 features" in page
    assert page.count("data-of=") > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["random", "--features", 64, "--picture", "oil"], "--picture: expected one of matrix, dense, degrees"),
        (["random", "--features", 64, "--picture", "dense"], "--picture dense: expected --out FILE"),
        (["random", "--features", 64, "--html", "/no/such/folder/p.html"], "html: expected a file to write"),
        (["evolution"], "evolution: expected --out FILE.png and nothing else"),
        (["evolution", "--features", 64, "--out", "p.png"], "evolution: expected --out FILE.png and nothing else"),
        (
            ["random", "--shape", "64,32", "--picture", "replacement", "--out", "p.png"],
            "--picture replacement: expected a square layout",
        ),
        (
            ["random", "--shape", "64,32", "--picture", "spreading", "--out", "p.gif"],
            "layout: expected a square grid, whose outputs are inputs again",
        ),
    ],
    ids=["picture", "no-out", "folder", "evolution", "evolution-of", "replacement", "spreading"],
)
def test_a_mistake_ends_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error("layout", *arguments)
    assert not list(tmp_path.iterdir())


# -- runs ------------------------------------------------------------------------------------------------------------


def saved(folder, model, task):
    folder.mkdir()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint.save(folder / "last.safetensors", tensors, {"task": task})
    return folder


def classifier(folder, **options):
    model = SparseMLP([20, 33, 17, 3], **options)
    return saved(folder, model, {"kind": "classify", "model": {"sizes": model.sizes}}), model


def byte_model(folder, **options):
    config = CharLMConfig(width=32, embedding=8, block_size=8, **options)
    return saved(folder, CharLM(config), {"kind": "charlm", "model": vars(config)})


@pytest.mark.parametrize("block", [1, 4, (4, 8)], ids=str)
def test_the_layouts_of_a_run_are_those_of_its_model(block, tmp_path):
    folder, model = classifier(tmp_path / "a", epsilon=6, block_size=block, seed=seed())
    found = layouts.read(folder)
    assert [layer.layout for layer in found.layers.values()] == [layer.layout for layer in model.layers]
    assert found.fed
    assert bs.topology.nnstd(list(found.layers.values()), model) == 0


def test_runs_are_compared(tmp_path):
    one, a = classifier(tmp_path / "one", epsilon=6, seed=0)
    two, b = classifier(tmp_path / "two", epsilon=6, seed=1)
    three, _ = classifier(tmp_path / "three", epsilon=4, seed=2)
    dense, _ = classifier(tmp_path / "dense", density=None)
    files = ("--html", tmp_path / "p.html", "--json", tmp_path / "p.json", "--out", tmp_path / "p.png")
    out = run("compare", "--topology", one, two, three, dense, *files).stdout
    far = bs.topology.nnstd(a, b)
    assert f"{far:.3f}" in out
    assert "not compared: dense: no block-sparse weights" in out
    numbers = json.loads((tmp_path / "p.json").read_text())
    assert numbers["runs"] == ["one", "two", "three", "dense"]
    assert numbers["nnstd"][0][1] == pytest.approx(far)
    assert numbers["nnstd"][3] == [None] * 4
    assert numbers["layers"]["two, layers.1"]["level"] == "block"
    page = (tmp_path / "p.html").read_text()
    assert f"{far:.3f}</td>" in page
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)


def test_byte_models_are_compared_layer_by_layer(tmp_path):
    torch.manual_seed(seed())
    same = [byte_model(tmp_path / name, pattern="barabasi_albert", m=1, seed=0) for name in ("a", "b")]
    found, reasons = layouts.distances([layouts.read(folder) for folder in same])
    assert found == [[0, 0], [0, 0]]
    assert reasons == []
    other, _ = classifier(tmp_path / "c", epsilon=6, seed=0)
    found, reasons = layouts.distances([layouts.read(same[0]), layouts.read(other)])
    assert found[0][1] is None
    assert reasons[0].startswith("a and c: nets: expected the same layers, got ")


def test_runs_without_layouts_are_refused(tmp_path):
    dense, _ = classifier(tmp_path / "dense", density=None)
    assert "runs: expected one with block-sparse weights, got only dense ones" in error("compare", "--topology", dense)
    assert "checkpoint: expected a file, got" in error("compare", "--topology", tmp_path)
    other = saved(tmp_path / "other", torch.nn.Linear(2, 2), {"kind": "pixels"})
    assert "expected a run of train charlm, train gpt or train mlp, got pixels" in error("compare", "--topology", other)
    assert "--html: expected --topology with it" in error("compare", dense, "--html", tmp_path / "p.html")
    sparse, _ = classifier(tmp_path / "sparse", epsilon=6)
    wrong = ("--html", "/no/such/folder/p.html")
    assert "html: expected a file to write" in error("compare", "--topology", sparse, *wrong)
    assert "nets: expected three or more to draw, got 1" in error("compare", "--topology", sparse, "--out", "p.png")


def test_groups_are_one_for_each_net():
    pytest.importorskip("matplotlib")
    with pytest.raises(bs.BlockSparseError, match="groups: expected 3, one for each net, got 2"):
        drawings.distance_map(np.zeros((3, 3)), ["a", "b", "c"], "map.png", "", groups=["a", "b"])
