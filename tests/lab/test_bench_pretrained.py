"""The benchmark of a pretrained net, on one that is not trained."""

import warnings

import pytest
import torch
from torch import nn

import pretrained
from blocksparse import SparsityWarning
from trained_nets import naming_accuracy, utterances, with_noise


def test_voices_are_named_by_the_nearest_embedding():
    known = torch.eye(3, 4)
    heard = torch.cat([known, known[[1, 1, 2]]])
    assert naming_accuracy(lambda x: x, known, heard) == pytest.approx(500 / 6)
    spectra = utterances(1, speakers=2)
    assert spectra.shape == (2, 160, 40)
    assert not torch.equal(with_noise(spectra, 0), with_noise(spectra, 1))


def test_a_result_is_measured_and_written(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d((4, 32)), nn.Flatten(), nn.Linear(128, 64)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparsityWarning)
        result, compressed = pretrained.compress(model, 0.5, 0.01, 3, (1, 1))
    assert result.seed == 3
    assert result.density == compressed.density
    assert 0 <= result.accuracy <= 100
    out = tmp_path / "result.json"
    pretrained.write(out, [result])
    (again,) = pretrained.read(out)
    assert again.net == result.net == "resemblyzer"
    assert vars(again) | {"net": 0} == pytest.approx(vars(result) | {"net": 0}, rel=1e-6)
    assert len(pretrained.table([result])) == 3
    assert "| 3 |" in out.with_suffix(".md").read_text()
