"""Blocks of layers that are fitted together after their layers, and features that `sparsify` reorders first."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse.sparsity.calibration import joint, reconstruction


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x, mask=None):
        x = x if mask is None else mask @ x
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(blocks), nn.Linear(16, 16)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.last(x)


def trained():
    """Return a net whose blocks change their inputs much, and correlated inputs `[32, 6, 16]`."""
    torch.manual_seed(0)
    model = Net([Block(), Block()]).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight.mul_(3)
            block.down.weight.mul_(3)
    return model, torch.randn(32, 6, 5) @ torch.randn(5, 16)


def error(model, dense, *args):
    with torch.no_grad():
        return float((model(*args) - dense(*args)).square().mean())


def reconstruct(model, batches, **options):
    return bs.sparsity.reconstruct(model, batches, 0.3, 4, jointly=True, **options)


def without_joint_fits(monkeypatch):
    monkeypatch.setattr(reconstruction, "fit_block", lambda *_: None)


def test_blocks_are_closer_than_their_layers_fitted_one_by_one(monkeypatch):
    model, x = trained()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = reconstruct(model, x.split(16), skip="last")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in made.model.parameters())
    assert all(parameter.requires_grad for parameter in made.model.parameters())
    without_joint_fits(monkeypatch)
    alone = reconstruct(model, x.split(16), skip="last")
    assert alone.layouts.keys() == made.layouts.keys()
    assert error(made.model, model, x) < 0.9 * error(alone.model, model, x)
    densities = {name: layout.density for name, layout in made.layouts.items()}
    assert densities == {name: layout.density for name, layout in alone.layouts.items()}
    assert all(abs(density - 0.3) < 0.05 for density in densities.values())


def test_two_runs_give_the_same_bits():
    model, x = trained()
    first, second = (reconstruct(model, x.split(16), skip="last").model for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["mask", "names", "frozen", "float64", "twice"])
def test_other_calls_are_fitted_too(kind, monkeypatch):
    model, x = trained()
    args = (x,)
    if kind == "mask":  # it has as many rows as the batch has samples
        args = x[:, :6], torch.eye(6)
        x = x[:6]
        args = x, torch.eye(6)
    if kind == "twice":
        model.blocks.extend(list(model.blocks))
    if kind == "frozen":
        model.requires_grad_(False)
    if kind == "float64":
        model, args = model.double(), (x.double(),)
    batches = [dict(zip(("x", "mask"), args, strict=False))] if kind == "names" else [args]
    made = reconstruct(model, batches).model
    assert [p.requires_grad for p in made.parameters()] == [kind != "frozen"] * len(list(made.parameters()))
    without_joint_fits(monkeypatch)
    assert error(made, model, *args) < error(reconstruct(model, batches).model, model, *args)


def test_models_in_16_bits_stay_as_least_squares_left_them(monkeypatch):
    model, x = trained()
    model, x = model.bfloat16(), x.bfloat16()
    made = reconstruct(model, [x]).model
    without_joint_fits(monkeypatch)
    alone = reconstruct(model, [x]).model
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("limit", [1e3, 5e7])
def test_the_work_is_bounded(limit, monkeypatch):
    model, x = trained()
    steps, step = [], torch.optim.Adam.step
    monkeypatch.setattr(joint, "MAX_FLOPS", limit)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, *args: steps.append(self) or step(self, *args))
    reconstruct(model, x.split(16))
    assert len(steps) == 0 if limit == 1e3 else joint.MIN_STEPS < len(steps) < 3 * joint.STEPS  # two blocks, the model


def test_an_error_that_grows_is_undone(monkeypatch):
    model, x = trained()
    monkeypatch.setattr(joint, "_train", lambda block, records, parameters, masks, *_: [
        parameter.data.mul_(3) for parameter in parameters.values()])  # fmt: skip
    made = reconstruct(model, [x]).model
    without_joint_fits(monkeypatch)
    alone = reconstruct(model, [x]).model
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), alone.parameters(), strict=True))


def test_sparsify_with_data_reorders_features_first():
    model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).eval(), torch.randn(256, 16)
    scattered = torch.arange(64) % 4 == 0  # a fourth of the hidden units matters
    with torch.no_grad():
        model[0].weight[~scattered] *= 1e-3
        model[2].weight[:, ~scattered] *= 1e-3

    def sparsify(dense, **options):
        return bs.sparsify(dense, 0.25, 8, force=True, data=x.split(64), **options)

    sparse, in_place = sparsify(model), sparsify(copy.deepcopy(model), inplace=True)
    assert error(sparse, model, x) < 1e-4
    assert error(in_place, sparse, x) == 0
    blocks = {f"{at}.weight": model[at].weight.unflatten(1, (-1, 8)).unflatten(0, (-1, 8)) for at in (0, 2)}
    scores = {name: each.detach().abs().sum((1, 3)) for name, each in blocks.items()}
    assert error(sparsify(model, criterion=scores), model, x) > 1e-4, "scores have the old order"
    other = copy.deepcopy(model)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.0)
    other(x).sum().backward()
    optimizer.step()
    assert error(sparsify(other, inplace=True, optimizer=optimizer), model, x) > 1e-4, "its state has the old order"


def test_a_block_that_returns_no_tensor_when_it_is_called_again_is_named():
    class Silent(nn.Module):
        def forward(self, x):
            return None

    x = torch.ones(2, 3)
    with pytest.raises(bs.BlockSparseError, match="data: Silent returned no tensor"):
        joint._call(Silent(), ((x,), {}, x))


def test_batches_of_several_forms_are_not_split():
    """The first could be split into samples, but the second has none: its first axis are channels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(16, 32, 5), nn.ReLU(), nn.Conv1d(32, 16, 3))
    batches = [torch.randn(4, 16, 20), torch.randn(16, 12)]
    fitted = bs.sparsify(model, 0.5, 8, data=batches, force=True)
    assert fitted(batches[1]).isfinite().all()
