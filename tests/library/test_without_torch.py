"""Layouts, patterns and the compiled core in a process that cannot import PyTorch."""

import json
import subprocess
import sys

import pytest

import blocksparse as bs
from blocksparse.ops import cpu_core

SCRIPT = """
import json, pickle, sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
import numpy as np
import blocksparse as bs
from blocksparse import compiled_core
from blocksparse.state_indices import layout_of_indices

layout = bs.patterns.random((96, 64), block_size=16, density=0.5, seed=0)
assert pickle.loads(pickle.dumps(layout)) == layout == bs.BlockLayout(layout.mask(), 16)
assert layout_of_indices(layout.crow_indices(), layout.col_indices(), layout.grid, layout.block_shape) == layout
new, source = layout.replaced(drop=[1], rows=[], cols=[])
results = layout.mask(), layout.crow_indices(), layout.col_indices(), source, new.T.col_of_block, layout.transpose_order
assert all(type(array) is np.ndarray for array in results)
errors = []
for call in (lambda: bs.linear, lambda: layout.to_torch_bsr(None), lambda: bs.lineal):
    try:
        call()
    except (AttributeError, bs.BlockSparseError) as error:
        errors.append(str(error))
print(json.dumps([[array.tolist() for array in results], errors, list(compiled_core.isas())]))
"""


@pytest.mark.skipif(cpu_core.unavailable() is not None, reason="the compiled core is not there")
def test_layouts_serve_a_process_without_torch():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    arrays, errors, isas = json.loads(result.stdout)
    layout = bs.patterns.random((96, 64), block_size=16, density=0.5, seed=0)
    new, source = layout.replaced(drop=[1], rows=[], cols=[])
    expected = layout.mask(), layout.crow_indices(), layout.col_indices(), source, new.T.col_of_block
    assert arrays == [array.tolist() for array in (*expected, layout.transpose_order)]
    assert errors == [
        "blocksparse.linear needs PyTorch: pip install torch. For JAX, use blocksparse.jax",
        "This needs PyTorch: pip install torch.",
        "module 'blocksparse' has no attribute 'lineal'",
    ]
    assert isas == [*cpu_core.isas()]
