"""Models as people write them: hooks, routing by the data, weights that a hook computes, layers of other libraries."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch import nn

import blocksparse as bs


class Routed(nn.Module):
    """Sends each row to one of several experts, as most mixtures written by hand do."""

    def __init__(self):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(32, 32), nn.Linear(32, 3), nn.Linear(32, 16)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for nth, expert in enumerate(self.experts):
            rows = (chosen == nth).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return self.last(x + y)


def test_data_of_a_model_that_routes_by_them():
    model, data = Routed().eval(), [torch.randn(40, 32) for _ in range(3)]
    sparse = bs.sparsify(model, 0.5, block_size=8, force=True, data=data)
    assert all(isinstance(expert, bs.nn.Linear) for expert in sparse.experts)
    assert sparse(data[0]).isfinite().all()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PyTorch: its older parametrizations
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
        lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["spectral_norm", "weight_norm", "prune"],
)
def test_weights_that_a_hook_computes_stay_as_they_are(change):
    import torch.nn.utils.prune

    model = nn.Sequential(change(nn.Linear(32, 64)), nn.Linear(64, 64)).eval()
    x = torch.randn(3, 32)
    with torch.no_grad():
        model(x)
        with pytest.warns(bs.SparsityWarning, match=r"stay as they are\n  0.weight.*: its module computes weight"):
            sparse = bs.sparsify(model, 0.5, block_size=8, force=True, inplace=True)
        assert type(sparse[0]) is nn.Linear
        assert isinstance(sparse[1], bs.nn.Linear)
        assert sparse(x).shape == (3, 64)


@pytest.mark.parametrize("inplace", [True, False])
def test_hooks_of_the_backward_pass_go_along(inplace):
    seen = []
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].register_full_backward_hook(lambda *_: seen.append(1))
    sparse = bs.sparsify(model, 0.5, block_size=8, force=True, inplace=inplace)
    sparse(torch.randn(2, 32)).sum().backward()
    assert seen == [1]


def test_a_model_that_is_block_sparse_already_is_told_the_way_back():
    sparse = bs.sparsify(nn.Sequential(nn.Linear(32, 32)), 0.5, block_size=8, force=True)
    with pytest.raises(bs.BlockSparseError, match=r"block-sparse already: blocksparse.densify\(model\)"):
        bs.sparsify(sparse, 0.25)


def test_a_torchscript_model_is_refused_by_name():
    with pytest.raises(bs.BlockSparseError, match="RecursiveScriptModule has no block-sparse counterpart"):
        bs.sparsify(torch.jit.script(nn.Sequential(nn.Linear(32, 32))), 0.5)


def test_densify_gives_the_conv1d_of_transformers_back():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(64, 64))
    sparse = bs.sparsify(model, 0.5, block_size=8, force=True)
    dense = bs.densify(sparse)
    assert type(dense[0]) is conv1d
    x = torch.randn(3, 64)
    torch.testing.assert_close(dense(x), sparse(x))
    model.load_state_dict(dense.state_dict())
    torch.testing.assert_close(model(x), sparse(x))


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


def test_who_asks_whether_a_module_is_there_does_not_stop_what_waits_for_it():
    code = """
import importlib.util, torch, blocksparse as bs
assert importlib.util.find_spec("torch.utils.flop_counter")
from torch.utils.flop_counter import FlopCounterMode
layer = bs.nn.Linear(32, 32, block_size=8)
with FlopCounterMode(display=False) as counter:
    layer(torch.randn(5, 32))
print(counter.get_total_flops())
"""
    assert run(code).split() == [str(2 * 5 * 32 * 32)]


@pytest.mark.full
def test_the_same_for_transformers():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    code = """
import importlib.util, blocksparse
assert importlib.util.find_spec("transformers.modeling_utils")
import transformers.modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
print("blocksparse" in AUTO_QUANTIZER_MAPPING)
"""
    assert run(code).split() == ["True"]
