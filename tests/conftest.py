"""Without a GPU the Triton kernels are tested in Triton's interpreter, which has to be asked for before they load."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
