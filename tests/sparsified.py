"""Small dense models, the layouts of block-sparse ones, and a check that refusals change nothing."""

import copy
import itertools

import pytest
import torch
from torch import nn

from blocksparse.errors import BlockSparseError
from blocksparse.nn.module import BlockSparseModule


def mlp(*sizes):
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def layouts_of(model):
    return {
        f"{name}.weight".removeprefix("."): module.layout
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseModule)
    }


def assert_refused(message, function, model, *args, error=BlockSparseError, **options):
    """Check that a call raises an error with this message and changes neither the model nor `optimizer=`."""
    modules, text, state = list(model.modules()), repr(model), copy.deepcopy(model.state_dict())
    parameters, groups = list(model.parameters()), getattr(options.get("optimizer"), "param_groups", [])
    trained = [list(group["params"]) for group in groups]
    with pytest.raises(error, match=message):
        function(model, *args, **options)
    assert all(old is new for old, new in zip(modules, model.modules(), strict=True))
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert repr(model) == text
    assert all(each.is_meta or torch.equal(each, state[key]) for key, each in model.state_dict().items())
    for before, group in zip(trained, groups, strict=True):
        assert all(old is new for old, new in zip(before, group["params"], strict=True))
