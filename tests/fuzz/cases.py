"""Draw cases from (seed, index), and run them."""

from __future__ import annotations

from random import Random

import numpy as np
import torch

from blocksparse import BlockSparseError

from . import attention, convolutions, elementwise, mistakes, products, recurrent
from .calls import Calls, Fault

# Families of cases: weight, function that draws, function that runs.
FAMILIES = {
    "linear": (8, products.draw_linear, products.run),
    "csr": (5, products.draw_csr, products.run),
    "int8": (2, products.draw_int8, products.run_int8),
    "conv": (8, convolutions.draw, convolutions.run),
    "gates": (3, elementwise.draw_gates, elementwise.run_gates),
    "dropout": (1, elementwise.draw_dropout, elementwise.run_dropout),
    "momentum": (1, elementwise.draw_momentum, elementwise.run_momentum),
    "recurrent": (2, recurrent.draw, recurrent.run),
    "attention": (2, attention.draw, attention.run),
    "mistakes": (2, mistakes.draw, mistakes.run),
}


def draw(seed: int, index: int) -> dict:
    """Draw the case of this seed and index, which is the same on every machine."""
    rng = Random(f"{seed} {index}")
    (family,) = rng.choices(list(FAMILIES), [weight for weight, *_ in FAMILIES.values()])
    return {"family": family, "numbers": rng.getrandbits(32), **FAMILIES[family][1](rng)}


def run(case: dict, calls: Calls) -> None:
    """Run a case, and raise if anything goes wrong; a wrong result is a `Fault`.

    If the library must refuse the case, `case["refused"]` is "argument: reason", and the error must be about the
    argument.
    """
    torch.set_num_threads(1)
    reason = case.get("refused")
    try:
        FAMILIES[case["family"]][2](case, np.random.default_rng(case["numbers"]), calls)
    except BlockSparseError as error:
        if not reason or reason.partition(":")[0] not in str(error):
            raise
    else:
        if reason:
            raise Fault(f"not refused, {reason}")
