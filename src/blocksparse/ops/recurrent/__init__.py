"""Recurrences over whole sequences: a product per step, fused gates, and one product for each weight's gradient."""

from .lstm import LSTM, JoinedLSTM, unrolled
from .multiplicative_lstm import MultiplicativeLSTM
from .op import Steps, gather_rows, linear_of, scan
from .small_world_lstm import SmallWorldLSTM

__all__ = [
    "LSTM",
    "JoinedLSTM",
    "MultiplicativeLSTM",
    "SmallWorldLSTM",
    "Steps",
    "gather_rows",
    "linear_of",
    "scan",
    "unrolled",
]
