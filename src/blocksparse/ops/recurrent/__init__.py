"""Recurrences over whole sequences: a product per step, fused gates, and one product for each weight's gradient."""

from .joined_lstm import JoinedLSTM, can_join
from .lstm import LSTM
from .multiplicative_lstm import MultiplicativeLSTM
from .product import linear_of
from .scan import scan
from .small_world_lstm import SmallWorldLSTM
from .steps import Steps

__all__ = ["LSTM", "JoinedLSTM", "MultiplicativeLSTM", "SmallWorldLSTM", "Steps", "can_join", "linear_of", "scan"]
