"""Checkpoints: what is stored comes back, and whatever happens while one is written, a whole one is there."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from blocksparse import BlockSparseError, checkpoint
from processes import run_script


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.safetensors"


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_all_that_is_stored_comes_back(path):
    shared = torch.randn(4, 6)
    tensors = {
        "float": torch.randn(3, 5),
        "bfloat16": torch.randn(7).bfloat16(),
        "int64": torch.tensor([-1, 2**40]),
        "bytes": torch.get_rng_state(),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "empty too": torch.zeros(0),
        "shared": shared,
        "the same": shared,
        "a part of it": shared[1:3],
        "transposed": shared.T,
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    about = {"step": 3, "name": "\u00e9", "nested": {"list": [1, 2.5, None]}}
    checkpoint.save(path, tensors, about)
    found, said = checkpoint.load(path)
    same(found, {name: tensor.detach() for name, tensor in tensors.items()})
    assert said == about
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("dtype", checkpoint.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_at_any_place_and_as_safetensors_reads_it(path, dtype):
    tensors = {"odd": torch.zeros(3, dtype=torch.uint8), "x": (3 * torch.randn(5, 3)).to(dtype)}
    tensors |= {"odd too": torch.ones(7, dtype=torch.bool), "last": torch.randn(2)}
    checkpoint.save(path, tensors, {})
    same(checkpoint.load(path)[0], tensors)
    same(load_file(path), tensors)


def test_a_tensor_of_one_number_with_any_stride(path):
    tensors = {"x": torch.arange(8.0)[3:8:4][:1]}
    assert tensors["x"].stride() == (4,)
    checkpoint.save(path, tensors, {})
    same(checkpoint.load(path)[0], tensors)


def test_a_dtype_that_the_format_has_not(path):
    checkpoint.save(path, {}, {"step": 1})
    with pytest.raises(BlockSparseError, match=r"z: expected one of torch.float64, .*, got torch.complex64"):
        checkpoint.save(path, {"z": torch.zeros(2, dtype=torch.complex64)}, {"step": 2})
    assert checkpoint.load(path)[1] == {"step": 1}


@pytest.mark.parametrize(
    ("tensors", "about", "message"),
    [
        ({}, {"when": {1, 2}}, "about: expected values that JSON can express, got Object of type set"),
        ({}, {("a", 1): 2}, "about: expected values that JSON can express, got keys must be str"),
        ({"x": torch.ones(3, device="meta")}, {}, "x: expected a tensor with data, got one on the meta device"),
        ({"x": [1.0]}, {}, "x: expected a tensor, got list"),
    ],
)
def test_what_cannot_be_stored(path, tensors, about, message):
    checkpoint.save(path, {}, {"step": 1})
    with pytest.raises(BlockSparseError, match=message):
        checkpoint.save(path, tensors, about)
    assert checkpoint.load(path)[1] == {"step": 1}


MEMORY = """
import sys, torch
from pathlib import Path
from blocksparse import checkpoint
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
tensors = {f"layer{i}": torch.ones(4 << 20) for i in range(8)}      # 16 MiB each
checkpoint.save(sys.argv[1], {"x": torch.ones(3)}, {})
checkpoint.load(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
checkpoint.save(sys.argv[1], tensors, {})
saved = status("VmHWM") - before
before, most = status("RssAnon"), 0
with checkpoint.opened(sys.argv[1]) as (found, about):
    for name, tensor in found.items():
        tensors[name].copy_(tensor)
        most = max(most, status("RssAnon"))
print(saved, most - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_neither_saving_nor_loading_takes_a_second_copy(path):
    script = path.with_name("script.py")
    script.write_text(MEMORY)
    saving, loading = map(float, run_script(1, script, str(path), folder=path.parent).split())
    assert saving < 16
    assert loading < 16


def test_what_is_loaded_does_not_depend_on_the_file(path):
    checkpoint.save(path, {"x": torch.ones(1000)}, {})
    found, _ = checkpoint.load(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(found["x"], torch.ones(1000))


def no_space(*_):
    raise OSError(28, "No space left on device")


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize(("fails", "kind"), [(no_space, BlockSparseError), (interrupted, KeyboardInterrupt)])
def test_a_save_that_fails_leaves_the_checkpoint_before_it(moment, fails, kind, path, monkeypatch):
    checkpoint.save(path, {"x": torch.ones(3)}, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, moment, fails)
        with pytest.raises(kind) as error:
            checkpoint.save(path, {"x": torch.zeros(3)}, {"step": 2})
    if kind is BlockSparseError:
        assert "No space left on device; the checkpoint before it is whole. Free some space" in str(error.value)
    same(checkpoint.load(path)[0], {"x": torch.ones(3)})
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of files")
def test_a_file_that_cannot_be_written_to_its_end(path):
    import resource

    checkpoint.save(path, {"x": torch.ones(3)}, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(BlockSparseError, match="the checkpoint before it is whole"):
            checkpoint.save(path, {"x": torch.zeros(100_000)}, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.load(path)[1] == {"step": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there(path):
    with pytest.raises(BlockSparseError, match="No such file or directory; there is none before it"):
        checkpoint.save(path.parent / "no" / path.name, {}, {})


def test_a_remnant_of_a_killed_process_is_replaced(path):
    path.with_name("last.safetensors.part").write_bytes(b"half a checkp")
    checkpoint.save(path, {}, {"step": 1})
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("part", [0, 4, 50, -1])
def test_a_file_cut_short(part, path):
    checkpoint.save(path, {"x": torch.ones(3)}, {})
    path.write_bytes(path.read_bytes()[:part])
    with pytest.raises(BlockSparseError, match=r"last\.safetensors: expected a whole checkpoint, got \d+ bytes"):
        checkpoint.load(path)


def test_files_of_others(path):
    with pytest.raises(BlockSparseError, match=r"expected a file, got .* which is missing"):
        checkpoint.load(path)
    with pytest.raises(BlockSparseError, match="which is a folder"):
        checkpoint.load(path.parent)
    path.write_text("A novel.\n" * 100)
    with pytest.raises(BlockSparseError, match="expected a whole checkpoint"):
        checkpoint.load(path)
    save_file({"x": torch.ones(3)}, path)
    with pytest.raises(BlockSparseError, match="'blocksparse checkpoint', got a safetensors file with format None"):
        checkpoint.load(path)
    save_file({"x": torch.ones(3)}, path, {"format": "pt"})
    with pytest.raises(BlockSparseError, match="format 'pt'"):
        checkpoint.load(path)
    save_file({"x": torch.ones(3)}, path, {"format": checkpoint.FORMAT, "version": "99", "about": "{}"})
    with pytest.raises(BlockSparseError, match="version 2 of the format, got 99"):
        checkpoint.load(path)


def test_a_text_is_written_whole_too(tmp_path, monkeypatch):
    checkpoint.write_text(tmp_path / "a.json", "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(BlockSparseError, match="No space left"):
            checkpoint.write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


# -- damage and strangers ------------------------------------------------------------------------------------------


def test_a_byte_that_changed_anywhere_is_noticed(path):
    tensors = {"x": torch.randn(40), "layer.weight": torch.randn(3, 5).bfloat16(), "n": torch.tensor(3)}
    checkpoint.save(path, tensors, {"step": 7, "name": "walk"})
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1 << at % 8, 0x20):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(BlockSparseError):
                checkpoint.load(path)


def test_a_damaged_tensor_is_named(path):
    checkpoint.save(path, {"x": torch.ones(3), "y": torch.zeros(2)}, {})
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(BlockSparseError, match=r"expected y as it was written, with checksum \w{8}, got \w{8}: the f"):
        checkpoint.load(path)
    assert checkpoint.about(path) == {}


def test_a_description_needs_a_path():
    with pytest.raises(BlockSparseError, match="checkpoint: expected a path, got None"):
        checkpoint.about(None)


@pytest.mark.parametrize(
    "about", ["[1, 2]", "null", "7", "{", "[" * 100_000, '{"a":' * 100_000, "1" * 5000], ids=lambda text: text[:6]
)
def test_a_description_that_is_none(about, path, monkeypatch):
    monkeypatch.setattr(checkpoint.json, "dumps", lambda found, own=json.dumps: about if found == {} else own(found))
    checkpoint.save(path, {"x": torch.ones(3)}, {})
    monkeypatch.undo()
    for read in (checkpoint.load, checkpoint.about):
        with pytest.raises(BlockSparseError, match="expected a whole checkpoint"):
            read(path)


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symlink", "link"])
def test_a_remnant_that_is_a_link_is_not_followed(make, target, path):
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_text("precious")
    if make is os.symlink or target == "elsewhere":
        make(path.with_name(target), path.with_name("last.safetensors.part"))
    checkpoint.save(path, {"x": torch.ones(3)}, {"step": 1})
    checkpoint.write_text(path.with_name("config.json"), "{}")
    assert elsewhere.read_text() == "precious"
    assert not path.with_name("nowhere").exists()
    assert not path.is_symlink()
    assert checkpoint.load(path)[1] == {"step": 1}


def test_a_link_that_comes_after_the_remnant_was_removed_is_not_followed(path, monkeypatch):
    elsewhere, remove = path.with_name("elsewhere"), type(path).unlink
    elsewhere.write_text("precious")

    def put_back(file, **options):
        remove(file, **options)
        os.symlink(elsewhere, file)

    monkeypatch.setattr(type(path), "unlink", put_back)
    with pytest.raises(BlockSparseError, match="expected a place to write a checkpoint to"):
        checkpoint.save(path, {"x": torch.ones(3)}, {"step": 1})
    assert elsewhere.read_text() == "precious"


def test_two_that_write_the_same_file_do_not_mix(path, monkeypatch):
    checkpoint.save(path, {"x": torch.zeros(3)}, {"step": 1})
    own = os.fsync

    def other(*arguments):
        monkeypatch.undo()
        os.unlink(f"{path}.part")
        path.with_name(f"{path.name}.part").write_bytes(b"half of what another writes")
        own(*arguments)

    monkeypatch.setattr(os, "fsync", other)
    with pytest.raises(BlockSparseError, match="another process writes it too; the checkpoint before it is whole"):
        checkpoint.save(path, {"x": torch.ones(3)}, {"step": 2})
    assert checkpoint.load(path)[1] == {"step": 1}
