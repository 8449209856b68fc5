"""Run the example of the 2017 README on torch tensors, and check it against the dense product.

Run: python examples/matmul_2017.py [hidden_size]
"""

import sys

import numpy as np
import torch

import blocksparse as bs
from blocksparse.matmul import BlocksparseMatMul

hidden_size = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
block_size = 32
minibatch_size = 64

# A random sparsity pattern: [blocks of inputs, blocks of outputs].
sparsity = np.random.default_rng().integers(2, size=(hidden_size // block_size, hidden_size // block_size))

bsmm = BlocksparseMatMul(sparsity, block_size=block_size)

x = torch.randn(minibatch_size, hidden_size)
w = torch.randn(bsmm.w_shape)

y = bsmm(x, w)

dense = x.double() @ bs.to_dense(w, bsmm.layout).double()
error = ((y - dense).norm() / dense.norm()).item()
print(bsmm)
print(f"y {list(y.shape)}, relative error against the dense float64 product {error:.1e}")
if error > 2e-6:
    sys.exit("the error should be below 2e-6")
