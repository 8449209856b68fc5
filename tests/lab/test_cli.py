"""The command line: output, files, exit status."""

import json
import re
import subprocess
import sys

import pytest

import blocksparse as bs
from blocksparse.topology.drawings.matrix import cells
from blocksparse_lab.cli.layout import PATTERNS
from command import error, run

pytestmark = pytest.mark.usefixtures("any_backend")

TINY = ["--hidden", "64", "--block-size", "16", "--batch", "8", "--rounds", "2", "--budget", "0.01"]


def test_help_lists_the_commands():
    assert {"info", "bench", "layout"} <= set(re.findall(r"\w+", run("--help").stdout))


def test_help_wraps_paragraphs_at_the_width_of_the_terminal():
    (paragraph,) = re.findall(
        r"^ A folder .*?^ *$", run("compress", "--help", columns=80).stdout, re.DOTALL | re.MULTILINE
    )
    *lines, _ = paragraph.strip().splitlines()
    assert len(lines) >= 3
    assert all(len(line.strip()) > 65 for line in lines)


def test_version():
    assert run("--version").stdout == f"blocksparse {bs.__version__}\n"


def test_the_command_line_imports_nothing_heavy():
    heavy = {"matplotlib", "scipy", "sklearn", "pooch", "triton", "jinja2", "plotext", "tensorboard"}
    loaded = f"import sys, blocksparse_lab.cli; print(sorted(sys.modules.keys() & {heavy}))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_too_little_memory_ends_in_one_line_too():
    assert "allocate" in error("layout", "dense", "--features", 10**9, "--block-size", 1)


def test_info_says_what_works_and_why_the_rest_does_not():
    out = run("info").stdout
    for name, status in bs.backends().items():
        assert name in out
        assert status or status.reason[:30] in out
    assert "BLOCKSPARSE_CPU_ISA" in out or not bs.backends()["cpu"]
    assert "torch" in out


@pytest.mark.parametrize("pass_", ["forward", "dgrad", "wgrad", "train"])
def test_bench_linear_writes_its_numbers_and_its_chart(pass_, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--densities", "1,0.5", "--pass", pass_, "--against", "dense,torch-bsr", "--out", tmp_path / "new"]
    out = run("bench", "linear", *TINY, *arguments).stdout
    assert "over dense" in out
    assert ("refused: torch-bsr" in out) == (pass_ != "forward")
    (path,) = (tmp_path / "new").glob("*.json")
    content = json.loads(path.read_text())
    assert [case["density"] for case in content["results"]] == [1, 0.5]
    assert {case["pass"] for case in content["results"]} == {pass_}
    assert content["settings"]["rounds"] == 2
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float8"], "dtype: expected one of float32, float64, bfloat16, float16, got 'float8'"),
        (["--pass", "both"], "pass: expected one of forward, dgrad, wgrad, train, got 'both'"),
        (
            ["--against", "dense,cublas"],
            "expected some of dense, onednn, torch-bsr, bsr-matmul, csr-matmul, stk, got 'cublas'",
        ),
        (["--densities", "1,many"], "densities: expected numbers with commas between"),
        (["--densities", ""], "densities: expected numbers with commas between"),
        (["--densities", "2"], "density: expected a number from 0 to 1, got 2.0"),
        (["--block-size", "0"], "block: expected a positive int, got 0"),
        (["--hidden", "60"], "expected a multiple of the block size 16, got 60"),
        (["--device", "abacus"], "device: expected one that can be timed"),
        (["--rounds", "0"], "rounds: expected a positive int, got 0"),
    ],
    ids=lambda value: "".join(value[:1]) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_line(arguments, message, tmp_path):
    assert message in error("bench", "linear", *TINY, "--out", tmp_path, *arguments)


def test_a_folder_that_cannot_be_made_is_said_before_measuring(tmp_path):
    (tmp_path / "file").touch()
    assert "out: expected a folder to write to" in error("bench", "linear", *TINY, "--out", tmp_path / "file")


def test_an_unknown_option_is_a_usage_error():
    run("bench", "linear", "--hiden", "64", code=2)


def test_ctrl_c_ends_quietly(monkeypatch, tmp_path):
    from blocksparse_lab.bench.linear import LinearBench

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(LinearBench, "run", interrupted)
    result = run("bench", "linear", *TINY, "--out", tmp_path, code=130)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layout_draws_every_pattern(pattern, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    out = run("layout", pattern, "--features", 512, "--block-size", 16, "--out", tmp_path / "p.png").stdout
    assert "512 x 512 (out x in)" in out
    assert "average path length" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_layout_passes_its_options_on():
    out = run("layout", "watts_strogatz", "--features", 256, "--block-size", 4, "--neighbors", 4, "--rewire", 0).stdout
    assert re.search(r"blocks +320 \(5,120 weights\)", out)
    assert re.search(r"blocks per row +5 to 5, mean 5", out)


def test_layout_of_a_rectangle_says_what_is_not_connected():
    pytest.importorskip("scipy")
    out = run("layout", "block_diagonal", "--shape", "64,128", "--block-size", 32).stdout
    assert "64 x 128 (out x in)" in out
    assert "expected a connected graph, got 2 components" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spiral", "--features", "64"], "pattern: expected one of dense, random"),
        (["spiral", "--features", "64"], "barabasi_albert, design, evolution, got 'spiral'"),
        (["design", "--features", "64"], "design: expected --features N --params N, got --features 64"),
        (["random"], "size: expected --features N or --shape OUT,IN, got neither"),
        (["random", "--features", "64", "--shape", "64,64"], "size: expected --features N or --shape OUT,IN, got both"),
        (["random", "--shape", "64"], "shape: expected OUT,IN, got '64'"),
        (["barabasi_albert", "--shape", "64,64"], "size: expected --features N (barabasi_albert is square), got --sh"),
        (["watts_strogatz"], "size: expected --features N (watts_strogatz is square), got none"),
        (
            ["random", "--features", "64", "--m", "3"],
            "--m: expected one of the patterns that take it (barabasi_albert)",
        ),
        (["dense", "--features", "64", "--out", "/no/such/folder/p.png"], "out: expected a PNG file to write"),
    ],
    ids=lambda value: "-".join(value).replace("/", ".") if isinstance(value, list) else "",
)
def test_a_mistake_about_a_layout_ends_in_one_line(arguments, message):
    if "--out" in arguments:
        pytest.importorskip("matplotlib")
    assert message in error("layout", *arguments)


def test_a_large_grid_is_drawn_in_cells_without_its_mask():
    layout = bs.BlockLayout.from_indices([0, 0, 249_999], [0, 1, 249_999], (250_000, 250_000), block_size=1)
    image, step = cells(layout)
    assert step == 489
    assert image.shape == (512, 512)
    assert (image > 0).sum() == 2
    assert image[0, 0] == 1
    assert image[511, 511] >= 0.5
