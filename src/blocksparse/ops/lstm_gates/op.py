"""The gates of one LSTM step as an operation: it writes into the caller's memory, and recurrences record it."""

from __future__ import annotations

from ..registry import Op
from . import cpu, reference, triton

LSTM_GATES = Op("lstm_gates", triton, cpu, reference)
