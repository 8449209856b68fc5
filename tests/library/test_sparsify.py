"""sparsify and densify of whole models: the blocks, the warnings, and equal results."""

import copy
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

import blocksparse as bs
from blocksparse.nn.module import BlockSparseModule
from masked import masked
from sparsified import assert_refused, layouts_of, mlp

pytestmark = pytest.mark.usefixtures("any_backend")


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# -- which blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.1, 0.37, 1])
@pytest.mark.parametrize("scope", ["careful", "global", "layer", "erk"])
def test_the_density_is_met(scope, density):
    model = mlp(96, 160, 128, 64)
    sparse = layouts_of(bs.sparsify(model, density, 8, scope=scope, force=True))
    blocks = {name: layout.grid[0] * layout.grid[1] for name, layout in sparse.items()}
    stored = sum(layout.nnz for layout in sparse.values())
    if scope == "layer":
        assert all(layout.nnz == round(density * blocks[name]) for name, layout in sparse.items())
    else:
        assert abs(stored - density * sum(blocks.values())) <= (
            0.5 if scope in ("careful", "global") else len(blocks) / 2 + 1e-9
        )
    if scope == "erk":
        densities = bs.sparsity.erk([(160, 96), (128, 160), (64, 128)], density, 8)
        for layout, wanted in zip(sparse.values(), densities, strict=True):
            assert layout.density == pytest.approx(wanted, abs=0.5 / (layout.grid[0] * layout.grid[1]))


@pytest.mark.parametrize("criterion", ["l2", "magnitude", "max", "lamp", "scores", "function"])
def test_the_blocks_with_the_highest_scores_stay(criterion):
    model = nn.ModuleList([nn.Linear(40, 24), nn.Conv2d(24, 16, 3), nn.ConvTranspose1d(16, 32, 2)]).double()
    wanted, given = {}, {}
    for name, weight in (("0.weight", model[0].weight), ("1.weight", model[1].weight), ("2.weight", model[2].weight)):
        matrix = weight.detach().transpose(0, 1) if name == "2.weight" else weight.detach()
        folded = matrix.unflatten(1, (-1, 8)).unflatten(0, (-1, 8))
        folded = folded.movedim((1, 3), (2, 3)).flatten(2)
        wanted[name] = {
            "l2": folded.square().mean(2).sqrt(),
            "magnitude": folded.abs().mean(2),
            "max": folded.abs().amax(2),
            "lamp": lamp(folded),
            "scores": torch.rand(folded.shape[:2]),
            "function": folded.mean(2),
        }[criterion]
        given[name] = wanted[name]
    if criterion == "scores":
        sparse = bs.sparsify(model, 0.3, 8, criterion=given, scope="global", force=True)
    elif criterion == "function":
        sparse = bs.sparsify(model, 0.3, 8, criterion=lambda name, matrix: given[name], scope="global", force=True)
    else:
        sparse = bs.sparsify(model, 0.3, 8, criterion=criterion, scope="global", force=True)
    found = layouts_of(sparse)
    kept = torch.cat([wanted[name][layout.mask()] for name, layout in found.items()])
    # But for the best of each, which stay whatever the others have.
    gone = torch.cat([wanted[name][~layout.mask()] for name, layout in found.items()])
    single = {wanted[name].max().item() for name, layout in found.items() if layout.nnz == 1}
    assert all(value >= gone.max() or value in single for value in kept.tolist())


def lamp(folded):
    squares = folded.square().sum(2)
    return torch.stack([one / squares[squares >= one].sum() for one in squares.flatten()]).view_as(squares)


def test_lamp_scores_do_not_depend_on_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    small = copy.deepcopy(model)
    with torch.no_grad():
        small[1].weight.mul_(1e-3)
        small[2].weight.zero_()
    assert bs.sparsify(small, 0.2, 8, criterion="l2", scope="global", skip="2", force=True)[1].layout.nnz == 1
    made = [bs.sparsify(one, 0.2, 8, scope="global", skip="2", force=True) for one in (model, small)]
    assert made[0][0].layout == made[1][0].layout
    assert made[0][1].layout == made[1][1].layout
    assert 5 < made[1][1].layout.nnz < 20
    assert bs.sparsify(small, 0.2, 8, scope="global", force=True)[2].layout.nnz == 1


@pytest.mark.parametrize("criterion", ["l2", "lamp"])
def test_careful_leaves_no_weight_and_no_row_without_blocks(criterion):
    torch.manual_seed(0)
    model = mlp(256, 256, 256, 256)
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
        model[4].weight[:32] *= 1e-3
    layouts = layouts_of(bs.sparsify(model, 0.5, 32, criterion=criterion, force=True))
    assert sum(layout.nnz for layout in layouts.values()) == 96
    assert all(layout.nnz >= 16 for layout in layouts.values())
    assert all((layout.mask().sum(1) > 0).all() for layout in layouts.values())
    old = layouts_of(bs.sparsify(model, 0.5, 32, criterion="l2", scope="global", force=True))
    assert old["2.weight"].nnz == 1


def trained(strong):
    """A net of which this part of each row's blocks has nearly all of the squares."""
    torch.manual_seed(0)
    model = mlp(512, 256, 512)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            blocks = layer.weight.unflatten(1, (-1, 32))
            blocks[:, int(strong * blocks.shape[1]) :] *= 0.01
    return model


def test_a_trained_weight_keeps_what_it_needs(speeds):
    speeds(lambda layer: 2 if layer.layout.density < 0.7 else 0.8)
    easy = bs.sparsify(trained(0.25), 0.25)
    assert [layout.density for layout in layouts_of(easy).values()] == [0.25, 0.25]
    with pytest.warns(bs.SparsityWarning, match=r"the density is 0\.5, not 0\.25\n  0.weight: needs 50% of"):
        half = bs.sparsify(trained(0.5), 0.25)
    assert [layout.density for layout in layouts_of(half).values()] == [0.5, 0.5]
    with pytest.warns(bs.SparsityWarning) as caught:
        most = bs.sparsify(trained(0.75), 0.25)
    assert not layouts_of(most)
    head, first, _, last, page = str(caught[0].message).splitlines()
    assert head == "sparsify: nothing became block-sparse"
    assert first.startswith(
        "  0.weight: 0.8 times as fast block-sparse (density 0.75, blocks of 32 x 32, 64 tokens); it"
    )
    assert first.endswith("it needs 75% of its blocks to preserve 95% of each row's squared norm")
    assert last == "  to go lower, pass data= to calibrate, or force=True and fine-tune"
    assert page == "  see help(blocksparse.sparsify)"
    for options in ({"force": True}, {"scope": "layer"}):
        found = layouts_of(bs.sparsify(trained(0.75), 0.25, **options))
        assert sum(layout.nnz for layout in found.values()) == 64


def test_each_row_keeps_its_squared_norm(speeds):
    speeds(lambda layer: 2)
    torch.manual_seed(1)
    model = mlp(512, 256)
    with torch.no_grad():
        model[0].weight *= torch.rand(256, 512).unflatten(1, (16, 32)).mean(2).pow(8).repeat_interleave(32, 1)
        squares = model[0].weight.square().view(8, 32, 16, 32).sum((1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bs.SparsityWarning)
        mask = layouts_of(bs.sparsify(model, 0.1))["0.weight"].mask()
    assert mask.float().mean() < 0.95
    assert ((squares * ~mask).sum(1) <= 0.05 * squares.sum(1)).all()


@pytest.mark.parametrize(
    "make", [lambda: mlp(512, 256), lambda: nn.Sequential(nn.Conv2d(128, 128, 3)), lambda: nn.LSTM(96, 64)]
)
def test_untrained_weights_get_the_density(make, speeds):
    speeds(lambda layer: 2)
    sparse = bs.sparsify(make(), 0.25)
    layouts = [module.layout for module in sparse.modules() if isinstance(module, BlockSparseModule)]
    assert 0.2 < sum(x.nnz for x in layouts) / sum(x.grid[0] * x.grid[1] for x in layouts) < 0.3


@pytest.mark.parametrize("init", [nn.init.orthogonal_, nn.init.xavier_normal_, nn.init.trunc_normal_, nn.init.eye_])
def test_weights_of_other_initializations_are_untrained(init, speeds):
    speeds(lambda layer: 2)
    model = mlp(512, 256)
    init(model[0].weight)
    assert layouts_of(bs.sparsify(model, 0.25))["0.weight"].density == 0.25


def test_a_short_training_is_noticed(speeds):
    speeds(lambda layer: 2 if layer.layout.density < 0.7 else 0.8)
    torch.manual_seed(0)
    model = mlp(256, 512, 512)
    x = torch.randn(2000, 256)
    label = (x @ torch.randn(256, 512)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in torch.randint(2000, (30, 64)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), label[batch]).backward()
        optimizer.step()
    with pytest.warns(bs.SparsityWarning, match=r"0\.weight: .* to preserve 95% of each row's squared norm"):
        assert not layouts_of(bs.sparsify(model, 0.1))


def test_padding_that_takes_the_share_of_others_is_named(speeds):
    speeds(lambda layer: 2)
    torch.manual_seed(0)
    with pytest.warns(
        bs.SparsityWarning,
        match=r"the density is 0\.0\d+, not 0\.1\n  2\.weight: keeps all of its blocks, 65,536 parameters with padding "
        r"and 20,480 without: use smaller blocks or skip=",
    ):
        bs.sparsify(mlp(1024, 2048, 10), 0.1)


def test_blocks_of_convolutions_compete_per_parameter():
    model = nn.ModuleList([nn.Linear(16, 16, bias=False), nn.Conv2d(16, 16, 5, bias=False)])
    with torch.no_grad():
        model[0].weight.fill_(0.2)
        model[1].weight.fill_(0.1)
    sparse = bs.sparsify(model, (4 + 25) / (4 + 4 * 25), 8, criterion="l2", scope="global", force=True)
    assert sparse[0].layout.nnz == 4
    assert sparse[1].layout.nnz == 1


def test_a_function_sees_the_weight_in_whole_blocks():
    seen = {}

    def scores(name, matrix):
        seen[name] = matrix
        return matrix.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).abs().sum((1, 3))

    model = nn.Sequential(nn.Linear(21, 35))
    bs.sparsify(model, 0.5, 16, criterion=scores, force=True)
    assert seen["0.weight"].shape == (48, 32)
    assert torch.equal(seen["0.weight"][:35, :21], model[0].weight)


def test_densities_may_name_modules():
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    sparse = bs.sparsify(model, {"1": 0.5, "1.0": 0.25}, 16, force=True)
    assert {name: layout.density for name, layout in layouts_of(sparse).items()} == {
        "1.0.weight": 0.25,
        "1.1.weight": 0.5,
    }


def test_densities_and_layouts_by_name():
    model = mlp(32, 64, 64, 10)
    sparse = bs.sparsify(model, {"0.weight": 0.5, "2.weight": 0.25}, 16, force=True)
    assert [layout.density for layout in layouts_of(sparse).values()] == [0.5, 0.25]
    assert isinstance(sparse[4], nn.Linear)
    assert bs.report(sparse).dense == {"4.weight": "no density was given"}
    layout = bs.patterns.random((64, 64), 16, density=0.5, seed=0)
    assert layouts_of(bs.sparsify(model, layouts={"2.weight": layout}, block_size=16, force=True)) == {
        "2.weight": layout
    }


def test_the_model_itself_is_changed_only_in_place():
    model = mlp(64, 64, 64)
    before, text = copy.deepcopy(model.state_dict()), repr(model)
    sparse = bs.sparsify(model, 0.5, 16, force=True)
    assert sparse is not model
    assert repr(model) == text
    torch.testing.assert_close(model.state_dict(), before)
    bias, optimizer = model[0].bias, torch.optim.SGD(model.parameters())
    assert bs.sparsify(model, 0.5, 16, force=True, inplace=True, optimizer=optimizer) is model
    assert model[0].bias is bias
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    layer = nn.Linear(64, 64)
    assert isinstance(bs.sparsify(layer, 0.5, 16, force=True, inplace=True), bs.nn.Linear)


# -- the report --------------------------------------------------------------------------------------------------


def test_report_counts(speeds):
    speeds(lambda layer: 2.5)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(10, 40),
            "linear": nn.Linear(40, 20),
            "norm": nn.LayerNorm(20),
            "conv": nn.Conv2d(32, 64, 3, groups=2),
            "lstm": bs.nn.LSTM(20, 24, layouts={"weight_hh_l0": bs.patterns.dense((4 * 32, 32), 16)}),
        }
    )
    sparse = bs.sparsify(model, {"linear.weight": 0.5}, 16, force=True)
    report = bs.report(sparse, tokens=5)
    rows = {row.name: row for row in report.rows}
    assert list(rows) == [
        "embedding.weight", "linear.weight", "conv.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0"
    ]  # fmt: skip
    row = rows["linear.weight"]
    assert (row.kind, row.shape, row.block, row.density, row.nnz) == ("Linear", (20, 40), (16, 16), 0.5, 3)
    assert (row.parameters, row.dense_parameters, row.flops, row.dense_flops) == (768, 800, 1536, 1600)
    assert (row.bytes, row.dense_bytes) == (768 * 4 + 3 * 4 + 3 * 4, 3200)
    assert row.speed_up == 2.5
    assert rows["embedding.weight"].flops == 0
    assert rows["conv.weight"].shape == (64, 16, 3, 3)
    assert rows["conv.weight"].note == "2 groups"
    assert (rows["lstm.weight_hh_l0"].kind, rows["lstm.weight_hh_l0"].shape) == ("LSTM", (96, 24))
    totals = report.totals
    assert totals["parameters"] == sum(parameter.numel() for parameter in sparse.parameters())
    assert totals["dense_parameters"] - report.other_parameters == 400 + 800 + 64 * 16 * 9 + 128 * 20 + 96 * 24
    assert report.as_dict()["totals"] == totals
    lines = str(report).splitlines()
    assert "linear.weight" in next(line for line in lines if "20x40" in line)
    assert "2 groups" in str(report)
    assert "if dense" in lines[-1]
    assert max(map(len, lines)) <= 80
    assert f"{totals['dense_parameters'] / 1000:.3g}k" in lines[-1]


# -- and back ----------------------------------------------------------------------------------------------------


LAYERS = {
    "linear": (lambda: bs.nn.Linear(61, 35, density=0.5, block_size=16), (5, 61)),
    "linear-gelu": (lambda: bs.nn.Linear(32, 32, density=0.5, block_size=16, activation="gelu", bias=False), (5, 32)),
    "conv2d": (
        lambda: bs.nn.Conv2d(20, 48, 3, stride=2, padding=1, density=0.5, block_size=16, padding_mode="reflect"),
        (2, 20, 9, 9),
    ),
    "conv1d": (
        lambda: bs.nn.Conv1d(32, 32, 3, padding="same", density=0.5, block_size=16, activation="relu"),
        (2, 32, 9),
    ),
    "conv_transpose2d": (
        lambda: bs.nn.ConvTranspose2d(20, 48, 3, stride=2, output_padding=1, density=0.5, block_size=16),
        (2, 20, 5, 6),
    ),
    "lstm": (lambda: bs.nn.LSTM(20, 40, 2, bidirectional=True, proj_size=12, density=0.5, block_size=16), (3, 2, 20)),
    "mlstm": (lambda: bs.nn.MultiplicativeLSTM(20, 40, density=0.5, block_size=16), (3, 2, 20)),
    "mlstm, outputs without weights": (
        lambda: bs.nn.MultiplicativeLSTM(20, 32, layout=bs.BlockLayout([[True, True], [False, False]], 16)),
        (3, 2, 20),
    ),
    "smallworld": (lambda: bs.nn.SmallWorldLSTM(20, 32, density=0.5, block_size=16), (3, 2, 20)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_densify(name):
    make, shape = LAYERS[name]
    model = nn.Sequential(make().double())
    dense = bs.densify(model)
    assert not any(isinstance(module, BlockSparseModule) for module in dense.modules())
    assert any(isinstance(module, BlockSparseModule) for module in model.modules()), "it is a copy"
    x = torch.randn(shape, dtype=torch.float64)
    actual, expected = dense(x), model(x)
    close(actual, expected)
    if name == "lstm":
        twin = nn.LSTM(20, 40, 2, bidirectional=True, proj_size=12, dtype=torch.float64)
        twin.load_state_dict(dense[0].state_dict())
        close(twin(x), expected)
    assert bs.densify(model, inplace=True) is model
    close(model(x), expected)


def test_densify_returns_the_masked_model():
    model = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 10)).double()
    sparse = bs.sparsify(model, 0.5, 16, force=True)
    expected = masked(model, layouts_of(sparse))
    dense = bs.densify(sparse)
    assert repr(dense) == repr(model)
    torch.testing.assert_close(dense.state_dict(), expected.state_dict(), rtol=0, atol=0)


# -- real architectures ------------------------------------------------------------------------------------------


def test_a_transformer_computes_what_the_masked_one_does():
    """Others are among the families of `benchmarks/families.py`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model, inputs = transformers.GPT2LMHeadModel(config).double().eval(), {"input_ids": torch.randint(60, (2, 9))}
    sparse = bs.sparsify(model, 0.4, (8, 16), force=True)
    layouts = layouts_of(sparse)
    assert len(layouts) == 2 * 4
    expected = masked(model, layouts)(**inputs).logits
    close(sparse(**inputs).logits, expected)
    close(bs.densify(sparse)(**inputs).logits, expected)
    again = bs.load_sparsified(copy.deepcopy(model), sparse.state_dict())
    close(again(**inputs).logits, expected)
    sparse.train()(**inputs).logits.square().mean().backward()
    assert all(parameter.grad is not None for name, parameter in sparse.named_parameters() if "values" in name)
    made = bs.report(sparse)
    assert made.dense["lm_head.weight"].startswith("tied to transformer.wte.weight: to prune it, untie it")
    assert made.totals["parameters"] == sum(parameter.numel() for parameter in sparse.parameters())


def test_an_output_layer_that_is_tied_is_warned_of_if_it_is_most_of_the_model():
    model = nn.Sequential(nn.Embedding(200, 32), nn.Linear(32, 32), nn.Linear(32, 200, bias=False))
    model[2].weight = model[0].weight
    with pytest.warns(bs.SparsityWarning, match=r"2\.weight: tied to 0\.weight: to prune it, untie it first"):
        sparse = bs.sparsify(model, 0.5, 8, force=True)
    assert layouts_of(sparse).keys() == {"1.weight"}
    size = sum(parameter.numel() for parameter in sparse.parameters())
    assert bs.report(sparse).totals["parameters"] == size


# -- what they survive -------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Conv2d(16, 40, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 16, 24))


@pytest.fixture
def sparse():
    return bs.sparsify(net(), 0.3, 16, force=True).eval()


def test_a_saved_model_is_loaded_into_the_dense_one(sparse, tmp_path):
    safetensors.torch.save_file(sparse.state_dict(), tmp_path / "model.safetensors")
    again = bs.load_sparsified(net().eval(), safetensors.torch.load_file(tmp_path / "model.safetensors"))
    x = torch.randn(3, 16, 4, 4)
    assert torch.equal(again(x), sparse(x))
    assert layouts_of(again) == layouts_of(sparse)
    parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in sparse.state_dict().items()}
    assert torch.equal(bs.load_sparsified(net().eval(), parameters)(x), sparse(x))


# -- mistakes ----------------------------------------------------------------------------------------------------


def test_states_that_do_not_fit_are_refused(sparse):
    state = sparse.state_dict()
    other = next(key for key in state if key.endswith("bias"))  # what is loaded as usual
    for wrong, message in (
        ({k: v for k, v in state.items() if k != "0.col_indices"}, "0.values: expected blocks with crow_indices and"),
        ({**state, "9.weight": torch.zeros(2)}, "state: expected the state of this Sequential"),
        ({**state, "0.crow_indices": torch.zeros(9, dtype=torch.int32)}, r"crow_indices: expected \[4\] for 3 rows"),
        ({**state, "0.crow_indices": None}, "crow_indices: expected a vector of ints"),
        ({**state, "0.col_indices": state["0.col_indices"].double()}, "col_indices: expected a vector of ints"),
        ({**state, "0.col_indices": state["0.col_indices"].to("meta")}, "col_indices: expected a vector of ints"),
        ({**state, "0.col_indices": state["0.col_indices"] + 10**6}, "cols: expected indices from 0"),
        ({**state, "0.values": [1.0]}, "0.values: expected blocks with .*, got list"),
        ({**state, "0.values": torch.tensor(1.0)}, "0.values: expected blocks"),
        ({**state, "0.values": state["0.values"][:, :0]}, "0.values: expected blocks"),
        ({**state, "0.values": state["0.values"][1:]}, "values: expected shape"),
        ({**state, "0.values": state["0.values"].to_sparse()}, "values: expected a dense tensor"),
        ({**state, other: state[other].to("meta")}, "expected a dense tensor with values"),
        ({**state, other: state[other].to_sparse()}, "expected a dense tensor with values"),
        ({**state, other: state[other][:1]}, "state: expected the state of this Sequential, got .*"),
        ([1, 2], "state: expected a state dict, got list"),
        ({1: torch.ones(1)}, "state: expected a state dict"),
    ):
        assert_refused(message, bs.load_sparsified, net(), wrong)


def test_scores_may_be_ints():
    scores = {"weight": torch.arange(16).view(4, 4)}
    made = bs.sparsify(nn.Linear(32, 32), 0.5, 8, criterion=scores, force=True)
    assert made.layout.nnz == 8
    assert made.layout.mask()[3].all()


def test_a_checkpoint_of_a_model_with_extra_state_is_loaded():
    class Counted(nn.Linear):
        count = 1

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    model = nn.Sequential(nn.Linear(64, 64), Counted(64, 64))
    model[1].count = 2
    sparse = bs.sparsify(model, 0.5, 8, force=True, skip="1")
    loaded = bs.load_sparsified(nn.Sequential(nn.Linear(64, 64), Counted(64, 64)), sparse.state_dict())
    assert loaded[1].count == 2
    assert loaded[0].layout == sparse[0].layout
