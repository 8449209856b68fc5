"""Path lengths and degrees, against published and known values."""

import sys

import pytest
import torch
from hypothesis import given

from blocksparse import BlockLayout, BlockSparseError
from blocksparse.patterns import banded, barabasi_albert, block_diagonal, dense, watts_strogatz, watts_strogatz_2d
from blocksparse.topology import (
    average_path_length,
    clustering,
    connected_components,
    degrees,
    nnstd,
    path_lengths,
    spectral_gap,
    steps_to_mix,
)
from strategies import layouts


@given(layouts())
def test_degrees(layout):
    out_degrees, in_degrees = degrees(layout)
    assert torch.equal(out_degrees, layout.mask().sum(1))
    assert torch.equal(in_degrees, layout.mask().sum(0))
    assert out_degrees.dtype == in_degrees.dtype == torch.int64


@pytest.mark.parametrize(
    ("layout", "length"),
    [
        (barabasi_albert(576, 1, m=8), 2.52),
        (barabasi_albert(576, 1, m=4), 2.99),
        (barabasi_albert(576, 1, m=1), 6.38),
        (barabasi_albert(1024, 1, m=2), 4.11),
        (watts_strogatz(1024, 1, neighbors=10, rewire=0.2), 3.90),
        (watts_strogatz(1024, 1, neighbors=10, rewire=0), 51.7),
        (watts_strogatz_2d(1024, 1), 3.71),
        (watts_strogatz_2d(4096, 1), 4.48),
    ],
    ids=["ba_576_8", "ba_576_4", "ba_576_1", "ba_1024_2", "ws_1024_10", "ring_1024_10", "ws_2d_1024", "ws_2d_4096"],
)
def test_published_path_lengths(layout, length):
    assert average_path_length(layout) == pytest.approx(length, rel=0.03)


def test_ten_thousand_nodes():
    # All 10,000 searches take some seconds: a sample tells as much.
    found = path_lengths(watts_strogatz_2d(10_000, 1), sources=500)
    assert found.mean == pytest.approx(4.97, abs=0.03)
    assert found.mean + 3 * found.standard_error < 5


@pytest.mark.parametrize(
    ("layout", "length"),
    [
        (dense((5, 5), 1), 1),
        (banded((50, 50), 1), 17),  # a path of n nodes: (n + 1) / 3
        (dense((2, 3), 1), (12 * 1 + 8 * 2) / 20),  # bipartite: 1 across, 2 on the same side
        (BlockLayout([[False, True], [False, False]], 1), 1),  # a directed edge counts for both ways
    ],
    ids=["complete", "path", "bipartite", "directed"],
)
def test_known_path_lengths(layout, length):
    assert average_path_length(layout) == pytest.approx(length, rel=1e-12)


def test_unconnected_graphs_are_said():
    two = BlockLayout(torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).bool(), 1)
    with pytest.raises(BlockSparseError, match="2 components, a mean path of 1 within them"):
        average_path_length(two)
    with pytest.raises(BlockSparseError, match="4 components, no two nodes connected"):
        average_path_length(block_diagonal((4, 4), 1))
    with pytest.raises(BlockSparseError, match="expected two nodes or more"):
        average_path_length(dense((4, 4), 4))


def test_what_is_no_layout_is_refused():
    for measure in (average_path_length, connected_components, degrees):
        with pytest.raises(BlockSparseError, match="expected a BlockLayout, got Tensor"):
            measure(torch.ones(3, 3))


def test_missing_scipy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    measures = average_path_length, connected_components, clustering, spectral_gap, steps_to_mix
    for measure in (*measures, lambda layout: nnstd(layout, layout)):
        with pytest.raises(BlockSparseError, match=r'pip install "blocksparse-torch\[lab\]"'):
            measure(dense((4, 4), 1))
