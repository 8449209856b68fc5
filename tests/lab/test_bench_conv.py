"""Measuring convolutions: every pass right and timed, what is refused, what is written."""

import json
from functools import partial

import pytest
import torch

import blocksparse as bs
import command
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.conv import ConvBench, ConvCase
from blocksparse_lab.bench.conv_specs import LAYERS, REACH, ConvSpec
from blocksparse_lab.bench.linear_specs import DTYPES, PASSES

SMALL = {"out_channels": 32, "in_channels": 48, "size": 6, "images": 2, "block": 8, "density": 0.4}


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        *((dtype, {}) for dtype in DTYPES),
        *(("float32", changes) for changes in ({"stride": 2}, {"kernel": 1, "padding": 0}, {"density": 0})),
    ],
    ids=str,
)
@pytest.mark.parametrize("pass_", PASSES)
def test_every_pass_is_right_and_timed(pass_, dtype, changes):
    result = ConvBench(rounds=1, budget=0.01).run(ConvSpec(**{**SMALL, "pass_": pass_, "dtype": dtype, **changes}))
    assert result.peers == ["dense"]
    assert result.speedup("dense").median > 0
    assert json.dumps(result.as_dict())


@pytest.mark.parametrize("pass_", PASSES)
def test_grouped_convolution_is_the_block_diagonal_one(pass_):
    spec = ConvSpec(32, 32, size=6, images=2, block=8, pattern="block-diagonal", dtype="float64", pass_=pass_)
    problem = ConvCase(spec, seed=0)
    ours, theirs = problem.call(OURS)(), problem.call("grouped")()
    if pass_ == "forward":
        torch.testing.assert_close(ours, theirs)
    elif pass_ == "dgrad":
        torch.testing.assert_close(ours.movedim(-1, 1), theirs[0])
    elif pass_ == "wgrad":
        torch.testing.assert_close(ours.flatten(0, 1), theirs[1])
    else:
        torch.testing.assert_close(ours[0], theirs[0])
        torch.testing.assert_close(ours[1].flatten(0, 1), theirs[1])


def test_a_random_pattern_has_no_grouped_peer():
    result = ConvBench(("dense", "grouped"), rounds=1, budget=0.01).run(ConvSpec(**SMALL))
    assert result.peers == ["dense"]
    assert "block-diagonal" in result.refused["grouped"]


def test_a_wrong_result_stops_the_run(monkeypatch):
    right = ConvCase.call
    monkeypatch.setattr(ConvCase, "call", lambda case, name, copy=0: lambda: right(case, name)() + 0.1)
    with pytest.raises(bs.BlockSparseError, match="relative L2 error of at most 2e-06 against float64, got"):
        ConvBench(rounds=1).run(ConvSpec(**SMALL))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "size: expected a positive int"),
        ({"out_channels": 30}, "out_channels: expected a multiple of the block size 8"),
        ({"padding": -1}, "padding: expected"),
        ({"kernel": 9}, "kernel: expected"),
        ({"density": 2}, "density: expected"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"pass_": "sideways"}, "pass: expected one of"),
        ({"pattern": "plaid"}, "pattern: expected one of"),
    ],
)
def test_bad_specs(changes, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        ConvSpec(**{**SMALL, **changes})


def test_named_shapes():
    assert {"reach", "resnet50-conv4-3x3", "pixelcnn-16"} <= set(LAYERS)
    assert all(target.spec.block == 32 for target in REACH)


run = partial(command.run, "bench", "conv2d", columns=200)


@pytest.mark.parametrize("pattern", ["random", "block-diagonal"])
def test_the_command_writes_what_it_says(tmp_path, pattern):
    quick = ["--layer", "resnet50-conv5-3x3", "--images", 1, "--rounds", 1, "--budget", 0.01, "--densities", "0.1"]
    out = run(*quick, "--pass", "forward,wgrad", "--pattern", pattern, "--out", tmp_path).stdout
    assert "forward float32, 512x512, 3x3 on 7x7" in out
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    assert [result["pass"] for result in content["results"]] == ["forward", "wgrad"]
    assert content["what"] == "block-sparse 2-D convolutions"
    assert len(list(tmp_path.glob("*.png"))) == (2 if pattern == "random" else 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--layer", "alexnet"], "layer: expected one of"), (["--against", "winograd"], "against: expected some of")],
)
def test_mistakes_end_in_one_line(arguments, message):
    assert message in run(*arguments, code=1).stderr
