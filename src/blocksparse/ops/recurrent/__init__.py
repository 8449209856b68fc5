"""Recurrences over whole sequences: one product per step, fused gates, and one product per weight's gradient."""

from .graph import KINDS
from .hidden import HIDDEN, hidden_states
from .int8_lstm import Int8LSTM
from .lstm import LSTM
from .multiplicative_lstm import MultiplicativeLSTM
from .op import gather_rows, linear_of, scan
from .recurrence import Steps, Times
from .small_world_lstm import SmallWorldLSTM

__all__ = [
    "HIDDEN",
    "LSTM",
    "Int8LSTM",
    "MultiplicativeLSTM",
    "SmallWorldLSTM",
    "Steps",
    "Times",
    "gather_rows",
    "hidden_states",
    "linear_of",
    "scan",
]

KINDS |= {kind.__name__: kind for kind in (LSTM, Int8LSTM, MultiplicativeLSTM, SmallWorldLSTM)}
KINDS |= {kind.__name__: kind for kind in HIDDEN.values()}
