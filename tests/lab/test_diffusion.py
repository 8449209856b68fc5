"""Diffusion over graphs, its network, and citation graphs."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

import blocksparse as bs
from blocksparse_lab import experiments
from blocksparse_lab.data import planetoid
from blocksparse_lab.data.synthetic import growing_graph
from blocksparse_lab.models.dcnn import DCNN
from blocksparse_lab.recipes import dcnn

SHARED = Path(__file__).parents[3] / "shared" / "data" / "planetoid"


def draw_graph(nodes=20, edges=40):
    return torch.randint(nodes, (2, edges))


def transition(edges, nodes, threshold=0.0):
    """Return the dense definition in float64."""
    a = torch.zeros(nodes, nodes, dtype=torch.float64)
    a[edges[0], edges[1]] = a[edges[1], edges[0]] = 1
    a.fill_diagonal_(0)
    p = a / (a.sum(0) + 1)
    return p * (p > threshold)


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.3])
@pytest.mark.parametrize("hops", [1, 3])
def test_diffusion_is_powers_of_the_transition_matrix(hops, threshold):
    edges = draw_graph()
    x = torch.randn(20, 7, dtype=torch.float64, requires_grad=True)
    diffusion = bs.nn.Diffusion(edges, 20, hops, threshold, dtype=torch.float64)
    p = transition(edges, 20, threshold)
    expected = torch.stack([torch.linalg.matrix_power(p, hop) @ x for hop in range(hops + 1)], 1)
    found = diffusion(x)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(z, x, upstream)[0] for z in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert diffusion.nnz == tuple(int((torch.linalg.matrix_power(p, hop) > 0).sum()) for hop in range(1, hops + 1))
    assert diffusion.nnz[0] <= (20 * (1 / threshold - 1) if threshold else 20 * 19)


def test_edges_in_any_order_and_number():
    edges = torch.tensor([[0, 1, 2, 2, 1], [1, 0, 3, 2, 2]])  # a repeated edge, and a self-loop
    diffusion = bs.nn.Diffusion(edges, 5, hops=1)
    assert diffusion.nnz == (6,)
    assert diffusion.isolated == 1
    assert not diffusion(torch.randn(5, 2))[4, 1:].any()


def test_convolution():
    z = torch.randn(6, 3, 4)
    conv = bs.nn.DiffusionConv(4, hops=2)
    torch.testing.assert_close(conv(z), torch.tanh(conv.weight * z))
    model = DCNN(4, 5)
    torch.testing.assert_close(model(z), model(z.flatten(1)))
    assert not bs.nn.Diffusion(draw_graph(), 20).state_dict()


def test_memory_grows_with_the_nodes_whatever_the_hubs():
    found = dcnn.growth((1000, 4000))
    bytes_per_node = [size / nodes for nodes, _, size in found]
    assert bytes_per_node[1] < 1.1 * bytes_per_node[0]
    whole = dcnn.growth((1000, 4000), threshold=0.0)
    assert whole[1][2] / whole[1][0] > 1.2 * whole[0][2] / whole[0][0]  # the threshold prevents this


def test_bad_input():
    edges = draw_graph()
    diffusion = bs.nn.Diffusion(edges, 20)
    for call, message in [
        (lambda: bs.nn.Diffusion(edges, 10), "edges: expected nodes from 0 to 9"),
        (lambda: bs.nn.Diffusion(edges.float(), 20), "edges: expected ints"),
        (
            lambda: bs.nn.Diffusion(edges, 20, threshold=0.5),
            "threshold: expected one that leaves an edge; the strongest",
        ),
        (lambda: bs.nn.Diffusion(edges[:, :0], 20), "edges: expected at least one edge between two nodes, got none"),
        (lambda: bs.nn.Diffusion(edges, 20, threshold=1.5), "threshold: expected a number from 0 to below 1"),
        (lambda: bs.nn.Diffusion(edges, 20, hops=0), "hops: expected an int, 1 or more"),
        (lambda: diffusion(torch.randn(19, 2)), r"x: expected a tensor \[20, features\], got \[19, 2\]"),
        (lambda: bs.nn.DiffusionConv(4)(torch.randn(2, 4)), r"z: expected a tensor \[..., 3, 4\]"),
        (lambda: planetoid.load("pubmad"), "graph: expected one of cora, citeseer, pubmed"),
        (lambda: planetoid.load("cora"), r"cora: expected --data-dir, .*no download"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            call()


# -- planetoid -------------------------------------------------------------------------------------------------------


def write_planetoid(folder: Path, name: str = "cora", **changed: object) -> planetoid.Graph:
    """Write twelve papers: eight known, three to test on in another order, and one missing from the files."""
    words, classes = torch.rand(12, 5).round(), torch.randint(2, (12,))
    words[10], classes[10] = 0, 0
    one_hot = torch.eye(2)[classes].numpy()
    tested = [11, 8, 9]
    rows = scipy.sparse.csr_matrix(words.numpy())
    graph = {node: [(node + 1) % 12, node] for node in range(12)}
    parts = {"allx": rows[:8], "ally": one_hot[:8], "tx": rows[tested], "ty": one_hot[tested], "graph": graph} | changed
    for part, content in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, 2))
    (folder / f"ind.{name}.test.index").write_text("\n".join(map(str, tested)))
    ring = torch.tensor(sorted(sorted((n, (n + 1) % 12)) for n in range(12))).T
    return planetoid.Graph(name, words, classes, ring)


def test_planetoid(tmp_path):
    expected = write_planetoid(tmp_path)
    found = planetoid.load("cora", tmp_path)
    torch.testing.assert_close(found.features, expected.features)
    assert found.labels.tolist() == expected.labels.tolist()
    assert found.edges.tolist() == expected.edges.tolist()


class Runs:
    """A call that a malicious pickle would make."""

    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"graph": pickle.dumps(Runs())}, "a pickle of planetoid, got a broken one: builtins.print is not to be in it"),
        ({"allx": b"\x80\x02"}, "expected a pickle of planetoid, got a broken one: pickle exhausted"),
        ({"ally": np.zeros((3, 2))}, "expected the parts of cora, which fit each other"),
        ({"graph": {0: [99]}}, "expected the parts of cora, which fit each other"),
    ],
    ids=["a program", "cut short", "too few labels", "a node too many"],
)
def test_broken_planetoid(tmp_path, capsys, changed, message):
    write_planetoid(tmp_path, **changed)
    with pytest.raises(bs.BlockSparseError, match=message):
        planetoid.load("cora", tmp_path)
    assert not capsys.readouterr().out


def test_missing_planetoid(tmp_path):
    write_planetoid(tmp_path)
    (tmp_path / "ind.cora.ty").unlink()
    with pytest.raises(bs.BlockSparseError, match=r"cora: expected a readable file, got .*ind\.cora\.ty: No such"):
        planetoid.load("cora", tmp_path)


# -- training --------------------------------------------------------------------------------------------------------


def test_a_run_and_its_report(tmp_path):
    write_planetoid(tmp_path)
    experiment = experiments.find("diffusion-cora")
    graph = experiment.load(tmp_path)
    for name, of in experiment.contenders.items():
        if name != "above 0.1":
            run = tmp_path / "runs" / f"{name}-0"
            dcnn.trainer(replace(of, epochs=2), graph, run).train()
    paths = experiments.write("diffusion-cora", experiment, tmp_path / "runs", tmp_path / "out")
    text = paths[1].read_text()
    assert "| entries of P^2 | " in text
    assert "| accuracy, against all transitions | " in text
    assert "| 100,000 | " in text


def test_edges_at_random_take_no_more_memory():
    graph = growing_graph(nodes=400)
    size = bs.nn.Diffusion(graph.edges, 400, threshold=0.1).nbytes
    first, same, other = (dcnn.random_diffusion(graph, size, seed) for seed in (0, 0, 1))
    assert 0.97 * size < first.nbytes <= size
    assert first.nnz == same.nnz
    assert first.layouts[0] != other.layouts[0]
    assert dcnn.random_diffusion(graph, 0).nnz[0] == 2, "an edge at least"


def test_growing_graph_has_hubs_and_neighbours_of_the_same_class():
    graph = growing_graph(nodes=3000, classes=5, m=3, features=20, within=0.5)
    degrees = torch.bincount(graph.edges.flatten(), minlength=3000)
    assert degrees.max() > 10 * degrees.float().mean()
    assert graph.edges.shape[1] > 0.95 * 3 * 3000
    same = (graph.labels[graph.edges[0]] == graph.labels[graph.edges[1]]).float().mean()
    assert same == pytest.approx(0.5 + 0.5 / 5, abs=0.03)
    assert torch.equal(graph.edges, growing_graph(nodes=3000, classes=5, m=3, features=20, within=0.5).edges)
    assert not torch.equal(graph.labels, growing_graph(nodes=3000, classes=5, features=20, seed=1).labels)
    pairs = set(map(tuple, graph.edges.T.tolist()))
    assert len(pairs) == graph.edges.shape[1]
    assert all(a > b for a, b in pairs), "each joins those that were there"
    classes = torch.stack([graph.features[graph.labels == nth].mean(0) for nth in range(5)])
    assert 0.07 < classes.min() < 0.13
    assert 0.17 < classes.max() < 0.25


def test_thirds():
    graph = planetoid.Graph("ring", torch.randn(10, 3), torch.arange(10) % 2, torch.arange(20).view(2, 10) % 10)
    graph = planetoid.Graph("ring", graph.features, graph.labels, torch.stack([torch.arange(9), torch.arange(1, 10)]))
    diffusion = bs.nn.Diffusion(graph.edges, 10)
    first, same, other = (dcnn.table(graph, diffusion, seed) for seed in (0, 0, 1))
    assert [len(first.train), len(first.test), first.tested] == [4, 3, 3]
    assert torch.equal(first.train, same.train)
    assert not torch.equal(first.train, other.train)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the Cora files")
def test_cora_has_the_published_entries():
    graph = planetoid.load("cora", SHARED)
    nnz = [bs.nn.Diffusion(graph.edges, len(graph.labels), 2, threshold).nnz[1] for threshold in (0, 0.05, 0.1)]
    assert nnz == [94_728, 33_832, 18_441]
