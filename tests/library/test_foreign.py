"""Checkpoints of other sparse libraries: `from_zeros` loads files written here in their formats."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import blocksparse as bs

pytestmark = pytest.mark.filterwarnings("ignore::blocksparse.SparsityWarning")

HIDDEN = 64


def model():
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 8))


def pruned(block=16):
    """Return a model whose first weight has a quarter of its blocks."""
    dense = model()
    mask = bs.patterns.random((HIDDEN, HIDDEN), block, density=0.25, seed=1).mask()
    with torch.no_grad():
        dense[0].weight.mul_(torch.from_numpy(np.kron(mask, np.ones((block, block)))))
    return dense


def two_four(weight):
    """Return a weight with the two largest of every four values."""
    groups = weight.detach().unflatten(-1, (-1, 4))
    return (
        torch.zeros_like(groups)
        .scatter_(-1, (top := groups.abs().topk(2, -1).indices), groups.gather(-1, top))
        .flatten(-2)
    )


def bitmask(state, name, *, is_two_four):
    """Replace a weight by the tensors of compressed-tensors' sparse-24-bitmask or sparse-bitmask format."""
    weight = state.pop(f"{name}.weight")
    mask = weight != 0
    packed = np.packbits(mask.numpy(), axis=-1, bitorder="little")
    shape = torch.tensor(weight.shape)
    state[f"{name}.shape"] = shape[:, None] if is_two_four else shape
    state[f"{name}.compressed"] = weight[mask].reshape(len(weight), -1) if is_two_four else weight[mask]
    state[f"{name}.bitmask"] = torch.from_numpy(packed)
    if not is_two_four:
        state[f"{name}.row_offsets"] = mask.sum(1).cumsum(0) - mask.sum(1)
    return state


def stk(weight, block=16):
    """Return the tensors of an STK matrix."""
    bsr = weight.detach().to_sparse_bsr(block)
    rows = torch.arange(len(weight) // block).repeat_interleave(bsr.crow_indices().diff())
    return {
        "data": bsr.values(),
        "row_indices": rows.short(),
        "column_indices": bsr.col_indices().short(),
        "offsets": bsr.crow_indices().int(),
    }


def torchao(weight, block=16):
    """Return an object with the attributes of torchao's BlockSparseTensor."""
    bsr = weight.detach().to_sparse_bsr(block)
    indices = {"bsr_crow_indices": bsr.crow_indices(), "bsr_col_indices": bsr.col_indices()}
    return SimpleNamespace(**indices, bsr_values=bsr.values(), shape=weight.shape, size=lambda: weight.shape)


def as_state(source, form):
    """Return the state dict of a pruned model in a format."""
    state = {key: tensor.detach().clone() for key, tensor in source.state_dict().items()}
    weight = state["0.weight"]
    if form in ("sparse-bitmask", "sparse-24-bitmask"):
        return bitmask(state, "0", is_two_four=form == "sparse-24-bitmask")
    if form in ("stk", "stk with size"):
        del state["0.weight"]
        size = {"size": torch.tensor(weight.shape)} if form == "stk with size" else {}
        return state | {f"0.weight.{key}": tensor for key, tensor in (stk(weight) | size).items()}
    makers = {
        "bsr": lambda: weight.to_sparse_bsr(16),
        "csr": weight.to_sparse_csr,
        "coo": weight.to_sparse,
        "torchao": lambda: torchao(weight),
        "stk matrix": lambda: SimpleNamespace(**stk(weight), size=lambda: weight.shape),
        "dense": lambda: weight,
    }
    state["0.weight"] = makers[form]()
    return state


FORMS = (
    "sparse-bitmask",
    "sparse-24-bitmask",
    "stk",
    "stk with size",
    "stk matrix",
    "bsr",
    "csr",
    "coo",
    "torchao",
    "dense",
)


@pytest.mark.parametrize("form", FORMS)
def test_state_dicts_of_other_libraries_become_block_sparse(form):
    source, x = pruned(), torch.randn(5, HIDDEN)
    if form == "sparse-24-bitmask":
        with torch.no_grad():
            source[0].weight.copy_(two_four(nn.Linear(HIDDEN, HIDDEN).weight))
    loaded = bs.from_zeros(model(), [16, 1], checkpoint=as_state(source, form), skip="2", force=True)
    expected = (1, 1), 0.5
    if form != "sparse-24-bitmask":
        expected = (16, 16), 0.25
    assert (loaded[0].layout.block_shape, loaded[0].layout.density) == expected
    torch.testing.assert_close(loaded(x), source(x))


@pytest.mark.parametrize("form", ["sparse-bitmask", "sparse-24-bitmask", "stk", "dense"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_safetensors_files_and_folders(form, is_folder, tmp_path):
    source = pruned()
    with torch.no_grad():
        source[0].weight.copy_(two_four(source[0].weight + 0.01) if form == "sparse-24-bitmask" else source[0].weight)
    state = as_state(source, form)
    save_file(state, tmp_path / "model.safetensors")
    if is_folder:  # in two files
        keys = sorted(state)
        names = {key: f"part{number % 2}.safetensors" for number, key in enumerate(keys)}
        for file in set(names.values()):
            save_file({key: state[key] for key in keys if names[key] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    loaded = bs.from_zeros(model(), checkpoint=tmp_path if is_folder else tmp_path / "model.safetensors", force=True)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(loaded(x), source(x))


def test_pytorch_files_with_sparse_tensors_and_in_place(tmp_path):
    source, own = pruned(), model()
    torch.save(as_state(source, "bsr"), tmp_path / "model.pt")
    before = own[0].weight.detach().clone()
    bs.from_zeros(own, checkpoint=tmp_path / "model.pt", force=True)
    assert torch.equal(own[0].weight, before)
    loaded = bs.from_zeros(own, checkpoint=tmp_path / "model.pt", force=True, inplace=True)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(loaded(x), source(x))
    assert loaded is own


def test_heads_that_nn_pruning_removed():
    transformers = pytest.importorskip("transformers")
    config = {"vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": 1, "intermediate_size": 128}
    build = lambda: transformers.BertModel(transformers.BertConfig(**config, num_attention_heads=4)).eval()  # noqa: E731
    source = build()
    attention = source.encoder.layer[0].attention
    with torch.no_grad():  # the third head, and a hidden unit, compute nothing
        for module in (attention.self.query, attention.self.key, attention.self.value):
            module.weight[32:48], module.bias[32:48] = 0, 0
        attention.output.dense.weight[:, 32:48] = 0
        source.encoder.layer[0].intermediate.dense.weight[5] = 0
        source.encoder.layer[0].intermediate.dense.bias[5] = 0
        source.encoder.layer[0].output.dense.weight[:, 5] = 0
    heads = [*range(32), *range(48, 64)]
    units = [unit for unit in range(128) if unit != 5]
    state = source.state_dict()
    prefix = "encoder.layer.0."
    for name in ("query", "key", "value"):
        for kind in ("weight", "bias"):
            state[f"{prefix}attention.self.{name}.{kind}"] = state[f"{prefix}attention.self.{name}.{kind}"][heads]
    state[f"{prefix}attention.output.dense.weight"] = state[f"{prefix}attention.output.dense.weight"][:, heads]
    for kind in ("weight", "bias"):
        state[f"{prefix}intermediate.dense.{kind}"] = state[f"{prefix}intermediate.dense.{kind}"][units]
    state[f"{prefix}output.dense.weight"] = state[f"{prefix}output.dense.weight"][:, units]
    loaded = bs.from_zeros(build(), 16, checkpoint=state, force=True)
    ids = torch.randint(50, (2, 7))
    torch.testing.assert_close(loaded(ids)[0], source(ids)[0], atol=1e-5, rtol=1e-4)
    assert loaded.encoder.layer[0].attention.self.value.layout.density == 0.75


def last_is(value):
    return lambda tensor: torch.cat([tensor[:-1], tensor.new_tensor([value])])


HUGE = torch.tensor([1 << 30, 1 << 30])
REPEATED = torch.ones(1, dtype=torch.int64).expand(1 << 40)  # a small file may have it

BAD = [
    ("sparse-bitmask", "bitmask", lambda bits: bits | 1, "0.compressed: expected 1408 values, got 1024"),
    ("sparse-bitmask", "bitmask", lambda bits: bits[:, :-1], r"0.bitmask: expected uint8 \[64, 8\]"),
    ("sparse-bitmask", "shape", lambda _: HUGE, r"size of 0.weight: expected \(64, 64\)"),
    ("sparse-bitmask", "shape", lambda _: torch.arange(1, 4), "size of 0.weight: expected two positive ints"),
    ("sparse-bitmask", "compressed", lambda values: values.to(torch.float8_e4m3fn), "that are not quantized"),
    ("stk", "column_indices", last_is(4), "cols"),
    ("stk", "column_indices", last_is(-1), "cols"),
    ("stk", "offsets", last_is(100), "crow_indices"),
    ("stk", "row_indices", last_is(0), "row_indices: expected the rows of"),
    ("stk", "offsets", lambda starts: starts.float(), "offsets: expected a vector of ints"),
    ("stk", "data", lambda blocks: blocks[:, :, :7], r"0.weight.data: expected blocks .* divide \(64, 64\)"),
    ("sparse-bitmask", "shape", lambda _: REPEATED, "size of 0.weight: expected two positive ints"),
    (
        "sparse-bitmask",
        "shape",
        lambda _: torch.tensor([torch.inf, 64]),
        "size of 0.weight: expected two positive ints",
    ),
    ("sparse-bitmask", "bitmask", lambda bits: bits.to_sparse(), "0.bitmask: expected a dense tensor"),
    ("sparse-bitmask", "compressed", lambda values: values.to("meta"), "0.compressed: expected a dense tensor"),
    ("sparse-bitmask", "compressed", last_is(torch.nan), "0.weight: expected finite values"),
    ("stk", "offsets", lambda _: REPEATED, "0.weight.offsets: expected a dense tensor with all its elements"),
    ("stk", "row_indices", lambda _: REPEATED, "0.weight.row_indices: expected a dense tensor with all its elements"),
    ("stk", "data", lambda blocks: blocks.to_sparse(), "0.weight.data: expected a dense tensor"),
    ("stk", "data", lambda blocks: blocks + 1j, "0.weight: expected real values, got torch.complex64"),
    ("stk", "data", lambda blocks: blocks / 0, "0.weight: expected finite values"),
    ("stk with size", "size", lambda _: HUGE, r"size of 0.weight: expected \(64, 64\)"),
]


def refused(own, state, message):
    before = own[0].weight.detach().clone()
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.from_zeros(own, checkpoint=state, inplace=True, force=True)
    assert torch.equal(own[0].weight, before)


@pytest.mark.parametrize(("form", "key", "change", "message"), BAD)
def test_bad_tensors_are_refused_and_change_nothing(form, key, change, message):
    state = as_state(pruned(), form)
    name = next(name for name in state if name.endswith(f".{key}"))
    refused(model(), state | {name: change(state[name])}, message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("9.weight", torch.ones(64, 64).to_sparse_bsr(16), "expected weights of the model, got 9.weight"),
        ("0.weight", "text", r"checkpoint\['0.weight'\]: expected a tensor, got str"),
        ("0.weight", torch.ones(64, 64), "state: expected the state of this Sequential"),
        ("0.weight", torch.ones(64, 64, dtype=torch.complex64), "0.weight: expected real values"),
        (
            "0.weight",
            SimpleNamespace(**vars(torchao(torch.ones(64, 64))) | {"bsr_crow_indices": "text"}),
            "0.weight.bsr_crow_indices: expected a vector of ints, got str",
        ),
        ("0.weight_packed", torch.ones(3), "decompress it with compressed-tensors first"),
        ("0.mask_scores", torch.ones(3), "call compile_model"),
    ],
)
def test_other_states_are_refused_and_change_nothing(name, value, message):
    refused(model(), {name: value}, message)


def test_bad_files_are_refused(tmp_path):
    refused(model(), tmp_path / "no.safetensors", "no.safetensors: No such file")
    refused(model(), tmp_path / "model.npz", "checkpoint: expected a state dict, a folder or a .safetensors, .pt")
    refused(model(), 7, "checkpoint: expected a path, got 7")
    for name in ("model.safetensors", "model.pt"):
        (tmp_path / name).write_bytes(b"\x08\0\0\0\0\0\0\0{}      xx")
        refused(model(), tmp_path / name, "checkpoint: expected a state dict")
    torch.save(SimpleNamespace(a=1), tmp_path / "object.pt")
    refused(model(), tmp_path / "object.pt", "Load it where its library is installed, and pass the state dict")
    torch.save([1], tmp_path / "list.pt")
    refused(model(), tmp_path / "list.pt", "a file with a state dict, got list")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    refused(model(), tmp_path, "expected a weight_map of file names in the folder")
