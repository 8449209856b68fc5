"""The parts that pictures share."""

from itertools import combinations

import pytest

pytest.importorskip("matplotlib")

from blocksparse.topology.drawings.style import figure_and_axes, label_points


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
