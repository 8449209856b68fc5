"""Benchmark of truly sparse MLPs: all contenders compute the same, and rows say which targets are met."""

import json

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.measure import Samples
from blocksparse_lab.bench.case import OURS
from targets import mlp
from targets.mlp import MlpProblem, MlpSpec

pytest.importorskip("scipy")
SPEC = MlpSpec((30, 40, 35, 5), epsilon=3, batch=8, rows=80)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("wgrad", mlp._WGRADS)
@pytest.mark.parametrize("dgrad", mlp._DGRADS)
def test_all_ways_give_the_same(dgrad, wgrad):
    problem = MlpProblem(SPEC, seed=3)
    for layer in problem.scipy.layers:
        layer.ways = {"dgrad": dgrad, "wgrad": wgrad}
    differences = problem.check()
    assert set(differences) == {"dense", "scipy", "blas"}
    assert 0 < max(differences.values()) < 1e-5


def test_scipys_steps_equal_our_sgd():
    problem = MlpProblem(MlpSpec(SPEC.sizes, epsilon=3, batch=8, dropout=0.0, weight_decay=0.01))
    model = problem.ours()
    s = problem.spec
    step = problem.step(model, bs.sparsity.SGD(model.parameters(), s.lr, s.momentum, s.weight_decay))
    for _ in range(5):
        assert problem.scipy.step() == pytest.approx(step().item(), rel=1e-5)
    for layer, theirs in zip(model.layers, problem.scipy.layers, strict=True):
        np.testing.assert_allclose(theirs.values, layer.values.detach().flatten(), rtol=1e-4, atol=1e-6)


def test_scipys_dropout_keeps_the_mean():
    net = MlpProblem(MlpSpec((30, 2000, 5), epsilon=5, batch=64)).scipy
    without, with_dropout = (net._forward(p)[0][1] for p in (0.0, 0.3))
    assert abs((with_dropout == 0).mean() - 0.3) < 0.01
    assert with_dropout.mean() == pytest.approx(without.mean(), rel=0.05)


def test_differing_results_raise(monkeypatch):
    problem = MlpProblem(SPEC)
    problem.scipy.layers[1].bias += 1
    with pytest.raises(
        bs.BlockSparseError, match=r"of scipy of .*: expected a relative L2 error of at most 1e-05 against ours, got"
    ):
        problem.check()


def test_rows_on_small_sizes():
    rows = list(mlp.rows(0.05, quick=True))
    assert [row.target for row in rows] == ["> 1x dense torch.nn", ">= 5x scipy CSR", "-"]  # one thread here
    assert all(isinstance(row.met, bool) and "1 thread" in row.work for row in rows[:2])
    assert rows[2].met is None
    assert json.dumps([row.details for row in rows])


@pytest.mark.full
def test_a_second_round_has_one_thread():
    torch.set_num_threads(2)
    assert [row.met is None for row in mlp.rows(0.05, quick=True)] == [False, False] + 4 * [True]


def test_targets():
    epochs = Samples({OURS: [1.0] * 3, "dense": [1.1] * 3, "scipy": [4.9] * 3, "blas": [2.0] * 3}, {})
    details = {"threads": 2, "evolution": 0.1, "dense_sgd": "fused", "blas_ways": [{"wgrad": "gathers"}]}
    dense, scipy, blas = (mlp.epoch_row(SPEC, peer, epochs, details, has_target=True) for peer in mlp.PEERS)
    assert (dense.met, scipy.met, blas.met) == (True, False, None)
    assert dense.measured.startswith("1.10x (1.10-1.10) dense torch.nn, SGD fused; 1.00 s against 1.10 s")
    assert "one thread, nothing dense" in scipy.measured
    assert "from dense products where faster (gathers)" in blas.measured
