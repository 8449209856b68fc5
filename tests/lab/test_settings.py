"""Settings of a run: learning rates of steps, and errors."""

from dataclasses import replace

import pytest

from blocksparse import BlockSparseError
from blocksparse_lab.training.optimizers import learning_rate
from blocksparse_lab.training.settings import Settings


def test_the_learning_rate():
    def rates(decay, warmup=2):
        settings = Settings(steps=6, warmup=warmup, learning_rate=2.0, decay=decay)
        return [learning_rate(settings, step) for step in range(6)]

    assert rates("none") == [1, 2, 2, 2, 2, 2]
    assert rates("none", warmup=0) == [2] * 6
    assert rates("linear") == [1, 2, 2, 1.5, 1, 0.5]
    assert rates("cosine") == pytest.approx([1, 2, 2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5])
    assert rates("linear", warmup=9) == pytest.approx([2 * step / 9 for step in range(1, 7)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": "sharp"}, "decay: expected one of linear, cosine, none, got 'sharp'"),
        ({"dtype": "float16"}, "dtype: expected one of float32, bfloat16"),
        ({"steps": 0}, "steps: expected an int, 1 or more, got 0"),
        ({"steps": 2.5}, "steps: expected an int, 1 or more, got 2.5"),
        ({"eval_every": "10"}, "eval_every: expected an int, 0 or more, got '10'"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a number, not negative, got nan"),
        ({"ema": 1.0}, "ema: expected a number from 0 to below 1"),
        ({"momentum": 1.0}, "momentum: expected a number from 0 to below 1"),
        ({"optimizer": "lbfgs"}, "optimizer: expected one of adam, sgd, adagrad, got 'lbfgs'"),
        ({"seed": -1}, "seed: expected"),
    ],
)
def test_invalid_settings(changes, message):
    with pytest.raises(BlockSparseError) as error:
        replace(Settings(steps=24), **changes)
    assert message in str(error.value)
