"""libxsmm as a peer: its products if it is built, and the rows if it is not."""

import pytest
import torch

import bench_parts
import blocksparse as bs
from blocksparse.errors import BlockSparseError
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import LinearSpec
from targets import libxsmm


def is_built():
    try:
        libxsmm.library()
    except BlockSparseError:
        return False
    return bool(bs.backends()["cpu"])


needs_libxsmm = pytest.mark.skipif(not is_built(), reason="libxsmm is not built: benchmarks/libxsmm/build.py")


@needs_libxsmm
@pytest.mark.parametrize("dtype", libxsmm.DTYPES)
@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", [(16, 1, True, False), (32, 2, True, True), (16, 4, False, False)])
def test_products_equal_ours(dtype, block, threads, how):
    if not libxsmm.library().serves(dtype):
        pytest.skip(f"libxsmm has no {dtype} kernel here")
    case = LinearBench(rounds=1).case(LinearSpec(128, 256, tokens=64, block=block, density=0.02, dtype=dtype))
    assert case.layout.crow_indices().diff().min() == 0  # a row without blocks is 0
    how = dict(zip(("width", "chunks", "panels_first", "prefetch"), how, strict=True))
    with libxsmm.set_threads(threads), torch.no_grad():
        for form in (libxsmm.OWN, libxsmm.ROWS):
            peer = libxsmm.Peer(libxsmm.library(), case, form, threads, how)
            assert peer.result().shape == (64, 128)
            assert case.find_fault(form, peer.result) is None


@needs_libxsmm
def test_sizes_without_a_plan_raise():
    case = LinearBench(rounds=1).case(LinearSpec(64, 64, tokens=8, block=32, density=1))
    with pytest.raises(BlockSparseError, match=r"libxsmm has no kernel of LinearSpec\(64x64, 8 tokens"):
        libxsmm.fastest_plan(case, libxsmm.OWN, threads=1)


def test_missing_library_is_a_row_with_instructions(monkeypatch, tmp_path):
    monkeypatch.setenv(libxsmm.VARIABLE, str(tmp_path / "missing.so"))
    (row,) = libxsmm.rows(0.1, quick=True)
    assert row.met is None
    assert f"no {tmp_path / 'missing.so'}: build it with `python benchmarks/libxsmm/build.py" in row.measured


def test_other_files_are_refused(monkeypatch, tmp_path):
    path = tmp_path / "text.so"
    path.write_text("not a library")
    monkeypatch.setenv(libxsmm.VARIABLE, str(path))
    with pytest.raises(BlockSparseError, match=r"text\.so does not load"):
        libxsmm.library()


def test_script_refuses_a_folder_without_sources(tmp_path, monkeypatch, capsys):
    build = bench_parts.script(bench_parts.load("libxsmm/build"), monkeypatch, capsys)
    status, _, _ = build(tmp_path, "--out", tmp_path / "out")
    assert status == f"{tmp_path}: no include/libxsmm.h; expected the folder of libxsmm's sources"
