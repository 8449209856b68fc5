"""Measures on block and neuron level, against networkx, dense powers, published and known values."""

import sys

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import blocksparse as bs
from blocksparse import BlockLayout, BlockSparseError, topology
from blocksparse.topology.graph import graph_of
from strategies import layouts

LEVELS = ("block", "neuron")


def mask_at(layout, level):
    mask = layout.mask().numpy()
    return mask if level == "block" else np.kron(mask, np.ones(layout.block_shape, dtype=bool))


def as_networkx(layout, level):
    mask = mask_at(layout, level)
    rows, cols = np.nonzero(mask)
    square = mask.shape[0] == mask.shape[1]
    graph = networkx.Graph()
    graph.add_nodes_from(range(mask.shape[0] + (0 if square else mask.shape[1])))
    graph.add_edges_from(zip(rows, cols if square else cols + mask.shape[0], strict=True))
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    return graph


@given(layouts())
def test_degrees(layout):
    out_degrees, in_degrees = topology.degrees(layout)
    assert torch.equal(out_degrees, layout.mask().sum(1))
    assert torch.equal(in_degrees, layout.mask().sum(0))
    assert out_degrees.dtype == in_degrees.dtype == torch.int64


@pytest.mark.parametrize(
    ("layout", "length"),
    [
        (bs.patterns.barabasi_albert(576, 1, m=8), 2.52),
        (bs.patterns.barabasi_albert(576, 1, m=4), 2.99),
        (bs.patterns.barabasi_albert(576, 1, m=1), 6.38),
        (bs.patterns.barabasi_albert(1024, 1, m=2), 4.11),
        (bs.patterns.watts_strogatz(1024, 1, neighbors=10, rewire=0.2), 3.90),
        (bs.patterns.watts_strogatz(1024, 1, neighbors=10, rewire=0), 51.7),
        (bs.patterns.watts_strogatz_2d(1024, 1), 3.71),
        (bs.patterns.watts_strogatz_2d(4096, 1), 4.48),
    ],
    ids=["ba_576_8", "ba_576_4", "ba_576_1", "ba_1024_2", "ws_1024_10", "ring_1024_10", "ws_2d_1024", "ws_2d_4096"],
)
def test_published_path_lengths(layout, length):
    assert topology.average_path_length(layout) == pytest.approx(length, rel=0.03)


def test_ten_thousand_nodes():
    # A sample, since all 10,000 searches take some seconds.
    found = topology.path_lengths(bs.patterns.watts_strogatz_2d(10_000, 1), sources=500)
    assert found.mean == pytest.approx(4.97, abs=0.03)
    assert found.mean + 3 * found.standard_error < 5


@pytest.mark.parametrize(
    ("layout", "length"),
    [
        (bs.patterns.dense((5, 5), 1), 1),
        (bs.patterns.banded((50, 50), 1), 17),  # a path of n nodes: (n + 1) / 3
        (bs.patterns.dense((2, 3), 1), (12 * 1 + 8 * 2) / 20),  # bipartite: 1 across, 2 on the same side
        (BlockLayout([[False, True], [False, False]], 1), 1),  # a directed edge counts for both ways
    ],
    ids=["complete", "path", "bipartite", "directed"],
)
def test_known_path_lengths(layout, length):
    assert topology.average_path_length(layout) == pytest.approx(length, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@given(layout=layouts(max_grid=5, blocks=(1, 2, 3)))
@settings(max_examples=60)
def test_undirected_measures_agree_with_networkx(level, layout):
    graph = as_networkx(layout, level)
    ours = graph_of(layout, level)
    assert ours.nodes == len(graph)
    assert ours.edges == graph.number_of_edges()
    assert ours.expanded().nnz == 2 * graph.number_of_edges()
    assert sorted(np.repeat(ours.degrees, ours.weights)) == sorted(degree for _, degree in graph.degree)
    assert topology.connected_components(layout, level) == networkx.number_connected_components(graph)
    assert topology.clustering(layout, level) == pytest.approx(networkx.average_clustering(graph), abs=1e-12)
    if len(graph) < 2:
        return
    lengths = [length for _, found in networkx.all_pairs_shortest_path_length(graph) for length in found.values()]
    counts = np.bincount(lengths)
    found = topology.path_lengths(layout, level)
    assert found.pairs == tuple(counts[1:])
    assert (found.diameter or 0) == counts.size - 1
    assert (found.nodes, found.exact, found.standard_error) == (len(graph), True, 0)
    pairs = counts[1:].sum()
    assert found.mean == (pytest.approx(np.arange(counts.size) @ counts / pairs) if pairs else None)
    gap = topology.spectral_gap(layout, level)
    if found.components > 1:
        assert gap == 0
        with pytest.raises(BlockSparseError, match=f"{found.components} components"):
            topology.average_path_length(layout, level=level)
        with pytest.raises(BlockSparseError, match=f"{found.components} components"):
            topology.diameter(layout, level=level)
    else:
        assert gap == pytest.approx(networkx.normalized_laplacian_spectrum(graph)[1], abs=1e-10)
        assert topology.average_path_length(layout, level=level) == found.mean
        assert topology.diameter(layout, level=level) == networkx.diameter(graph)


@pytest.mark.parametrize("level", LEVELS)
@given(layout=layouts(max_grid=5, blocks=(1, 2)))
@settings(max_examples=60)
def test_steps_to_mix_agree_with_powers(level, layout):
    mask = mask_at(layout, level).astype(int)
    if mask.shape[0] != mask.shape[1]:
        with pytest.raises(BlockSparseError, match="expected a square"):
            topology.steps_to_mix(layout, level=level)
        return
    n = mask.shape[0]
    if n < 2:
        return
    for identity, others in ((True, ~np.eye(n, dtype=bool)), (False, np.ones((n, n), dtype=bool))):
        # By Wielandt, a graph that has not mixed after (n - 1)^2 + 1 steps never does.
        power, steps, wanted = np.eye(n, dtype=int), 0, None
        while wanted is None and steps <= (n - 1) ** 2 + 1:
            power = np.minimum(mask @ power + (power if identity else 0), 1)
            steps += 1
            wanted = steps if power[others].all() else None
        if wanted is None:
            with pytest.raises(BlockSparseError, match=r"expected (a path from every unit|paths of all lengths)"):
                topology.steps_to_mix(layout, level=level, identity=identity)
        else:
            assert topology.steps_to_mix(layout, level=level, identity=identity) == wanted


def test_steps_follow_the_arrows():
    cycle = BlockLayout(np.roll(np.eye(7, dtype=bool), 1, axis=0), block_size=4)
    assert topology.steps_from(cycle, 2).tolist() == [5, 6, 0, 1, 2, 3, 4]
    assert topology.steps_to_mix(cycle) == 6
    assert topology.steps_to_mix(cycle, level="neuron") == 7  # and back to the others of its block
    with pytest.raises(BlockSparseError, match=r"period 7"):
        topology.steps_to_mix(cycle, identity=False)
    one_way = BlockLayout(np.tril(np.ones((3, 3), dtype=bool)), block_size=4)
    with pytest.raises(BlockSparseError, match="3 strongly connected components"):
        topology.steps_to_mix(one_way)
    assert topology.steps_from(one_way, 1).tolist() == [-1, 0, 1]
    with pytest.raises(BlockSparseError, match="expected an int from 0 to 2"):
        topology.steps_from(one_way, 3)


def test_wielandts_graph_takes_the_longest_to_mix():
    n = 12
    mask = np.roll(np.eye(n, dtype=bool), 1, axis=0)
    mask[1, n - 1] = True
    assert topology.steps_to_mix(BlockLayout(mask, 2), identity=False) == (n - 1) ** 2 + 1


def test_a_sample_comes_with_its_error():
    layout = bs.patterns.barabasi_albert(3000, 1, m=3)
    exact = topology.path_lengths(layout)
    misses = []
    for seed in range(20):
        found = topology.path_lengths(layout, sources=100, seed=seed)
        assert not found.exact
        assert found.diameter <= exact.diameter
        assert 0 < found.standard_error < 0.1
        misses.append((found.mean - exact.mean) / found.standard_error)
    assert 0.5 < np.std(misses) < 1.6  # as many standard errors off as a normal variable
    assert (
        topology.average_path_length(layout, sources=100, seed=3)
        == topology.path_lengths(layout, sources=100, seed=3).mean
    )
    assert topology.path_lengths(layout, sources=3000) == exact
    # On neuron level a sampled block stands for its neurons.
    wide = bs.patterns.barabasi_albert(16 * 300, 16, m=3)
    found = topology.path_lengths(wide, level="neuron", sources=150)
    assert found.mean == pytest.approx(topology.path_lengths(wide, level="neuron").mean, abs=4 * found.standard_error)
    with pytest.raises(BlockSparseError, match="expected None or an int, 2 or more, got 1"):
        topology.average_path_length(layout, sources=1)


@pytest.mark.parametrize("pattern", ["dense", "ring", "path"])
def test_large_spectral_gaps_have_closed_forms(pattern):
    n = 700
    layout, expected = {
        "dense": (bs.patterns.dense((n, n), 1), 1 + 1 / (n - 1)),
        "ring": (bs.patterns.watts_strogatz(n, 1, neighbors=2, rewire=0), 1 - np.cos(2 * np.pi / n)),
        "path": (bs.patterns.banded((n, n), 1), 1 - np.cos(np.pi / (n - 1))),
    }[pattern]
    assert topology.spectral_gap(layout) == pytest.approx(expected, rel=1e-6)


@given(layouts())
@settings(max_examples=30)
def test_degree_distributions_count_rows_and_weights(layout):
    for level in LEVELS:
        mask = mask_at(layout, level)
        found = topology.degree_distribution(layout, level)
        for counts, axis in ((found.out, 1), (found.in_, 0)):
            degrees = mask.sum(axis)
            assert list(counts) == sorted(set(degrees.tolist()))
            assert counts == {degree: int((degrees == degree).sum()) for degree in counts}


def test_hub_load():
    assert topology.hub_load(bs.patterns.dense((8, 16), 4)) == 1
    assert topology.hub_load(BlockLayout([[0, 0]], 4)) == 0
    assert topology.hub_load(BlockLayout([[1, 0, 0], [1, 0, 0], [1, 1, 0]], 4)) == 3 / (4 / 3)


def test_references_keep_what_they_should():
    from blocksparse.topology.small_world import _edges, _lattice, _random_reference

    graph = graph_of(bs.patterns.barabasi_albert(300, 1, m=4))
    edges = _edges(graph)
    drawn = _random_reference(300, edges, np.random.default_rng(0))
    assert (drawn.degrees == graph.degrees).all()
    assert drawn.edges == graph.edges
    assert set(drawn.adjacency.data) == {1}
    assert not drawn.adjacency.diagonal().any()
    assert drawn.adjacency.multiply(graph.adjacency).sum() < 0.4 * graph.adjacency.sum()
    for nodes in (6, 7):
        for count in range(1, nodes * (nodes - 1) // 2 + 1):
            assert _lattice(nodes, count).edges == count


def test_small_world_measures_agree_with_networkx():
    layout = bs.patterns.watts_strogatz(40, 1, neighbors=6, rewire=0.1, seed=1)
    graph = as_networkx(layout, "block")
    # The swaps of networkx.random_reference, without its tests of connection, which take minutes.
    references = [networkx.double_edge_swap(graph.copy(), 1200, max_tries=10**5, seed=seed) for seed in range(20)]
    clustering = np.mean([networkx.average_clustering(one) for one in references])
    found = topology.small_world(layout, references=20)
    assert found.random_clustering == pytest.approx(clustering, rel=0.1)
    length = np.mean([networkx.average_shortest_path_length(one) for one in references])
    assert found.random_path_length == pytest.approx(length, rel=0.03)
    assert found.sigma == topology.small_world_sigma(layout, references=20)
    assert found.omega == topology.small_world_omega(layout, references=20)
    assert found.as_dict()["sigma"] == found.sigma
    assert topology.small_world_sigma(layout, seed=1) != topology.small_world_sigma(layout, seed=2)


def test_small_worlds_are_between_rings_and_random_graphs():
    omegas = []
    for rewire in (0, 0.1, 1):
        found = topology.small_world(bs.patterns.watts_strogatz(1024, 1, neighbors=10, rewire=rewire), references=2)
        omegas.append(found.omega)
    assert omegas[0] < -0.9
    assert abs(omegas[1]) < 0.35
    assert omegas[2] > 0.9
    # Nothing can be swapped among the edges of a complete graph: it is its own reference.
    assert topology.small_world_sigma(bs.patterns.dense((64, 64), 4)) == pytest.approx(1)
    wide = bs.patterns.watts_strogatz(256, 8, neighbors=4, rewire=0.1)
    assert topology.small_world_sigma(wide, level="neuron", references=1) > 1


PARTS = BlockLayout(torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).bool(), 1)


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda: topology.average_path_length(PARTS), "2 components, a mean path of 1 within them"),
        (lambda: topology.average_path_length(bs.patterns.block_diagonal((4, 4), 1)), "4 components, no two nodes con"),
        (lambda: topology.average_path_length(bs.patterns.dense((4, 4), 4)), "expected two nodes or more"),
        (lambda: topology.average_path_length(torch.ones(3, 3)), "expected a BlockLayout, got Tensor"),
        (lambda: topology.connected_components(torch.ones(3, 3)), "expected a BlockLayout, got Tensor"),
        (lambda: topology.degrees(torch.ones(3, 3)), "expected a BlockLayout, got Tensor"),
        (lambda: topology.small_world_sigma(bs.patterns.block_diagonal((4, 4), 1)), "4 components"),
        (lambda: topology.small_world_sigma(bs.patterns.banded((3, 3), 1)), "references have triangles"),
        (lambda: topology.small_world_omega(bs.patterns.banded((20, 20), 1)), "lattice with triangles"),
        (lambda: topology.small_world(bs.patterns.dense((4, 4), 1), references=0), "references: expected an int, 1"),
        (lambda: topology.clustering(bs.patterns.dense((4, 4), 1), level="unit"), "level: expected 'block' or 'neur"),
        (lambda: topology.spectral_gap(bs.patterns.dense((4, 4), 4)), "expected two nodes or more"),
        (lambda: topology.steps_to_mix(bs.patterns.dense((4, 4), 4)), "expected two units or more"),
        (lambda: topology.steps_to_mix(BlockLayout([[0]], 4), level="neuron"), "got no block"),
        (lambda: topology.degree_distribution(torch.ones(2, 2)), "expected a BlockLayout, got Tensor"),
        (lambda: topology.summary(torch.ones(2, 2)), "expected a BlockLayout, got Tensor"),
        (lambda: topology.path_lengths(bs.patterns.dense((9, 9), 1), sources=2, seed=-1), "seed: expected an int"),
    ],
    ids=lambda value: "" if callable(value) else value.split(":")[0].replace(" ", "_"),
)
def test_bad_arguments(measure, message):
    with pytest.raises(BlockSparseError, match=message):
        measure()


def test_a_summary_is_the_measures_together():
    layout = bs.patterns.barabasi_albert(512, 8, m=4)
    for level in LEVELS:
        found = topology.summary(layout, level)
        assert found.path_length == topology.average_path_length(layout, level=level)
        assert found.diameter == topology.diameter(layout, level=level)
        assert found.clustering == topology.clustering(layout, level)
        assert found.steps_to_mix == topology.steps_to_mix(layout, level=level)
        assert found.spectral_gap == topology.spectral_gap(layout, level)
        assert (found.components, found.exact, found.path_length_error) == (1, True, 0)
        assert found.as_dict()["nodes"] == found.nodes == {"block": 64, "neuron": 512}[level]
    assert topology.summary(bs.patterns.dense((8, 16), 4)).steps_to_mix is None
    apart = topology.summary(bs.patterns.block_diagonal((4, 4), 1))
    assert (apart.components, apart.path_length, apart.diameter, apart.spectral_gap) == (4, None, None, 0)


def test_missing_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    measures = [
        topology.average_path_length,
        topology.connected_components,
        topology.clustering,
        topology.spectral_gap,
        topology.steps_to_mix,
        lambda layout: topology.nnstd(layout, layout),
    ]
    for measure in measures:
        with pytest.raises(BlockSparseError, match=r"pip install scipy"):
            measure(bs.patterns.dense((4, 4), 1))
