"""Benchmark of ONNX files: one row for the size and one per number of threads and batch size."""

import pytest

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx_files


@pytest.mark.filterwarnings("ignore:.*stores dense weights")
def test_rows_have_a_target_at_the_first_density(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx_files, "DENSITIES", (0.1, 0.5))
    monkeypatch.setattr(onnx_files, "THREADS", (1,))
    rows = list(onnx_files.rows(tmp_path, 320, 0.02, quick=True))
    assert [row.work for row in rows] == [
        f"{start}density {density}{end}"
        for density in (0.1, 0.5)
        for start, end in (
            ("size of the file, ", ""), ("", ", 1 thread, batch 1"), ("", ", 1 thread, batch 32"),
            ("", ", 1 thread, batch 256"),
        )
    ]  # fmt: skip
    assert [row.met is None for row in rows] == [False] * 4 + [True] * 4
    assert rows[4].details["gather"] < 0.7 * rows[4].details["dense"]
