"""The gates of an LSTM step: the choice of their backend."""

from __future__ import annotations

from ..registry import Op
from . import cpu, reference, triton

LSTM_GATES = Op("lstm_gates", triton, cpu, reference)
