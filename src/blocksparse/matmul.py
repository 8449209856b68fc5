"""The product of OpenAI's blocksparse (2017), on torch tensors."""

from .compat.matmul import BlocksparseMatMul

__all__ = ["BlocksparseMatMul"]
