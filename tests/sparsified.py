"""Small dense nets, and the layouts of block-sparse ones."""

import itertools

from torch import nn

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
