"""Recurrences over whole sequences: a product per step, fused gates, and one product for each weight's gradient."""

from .lstm import LSTM
from .multiplicative_lstm import MultiplicativeLSTM
from .product import linear_of
from .scan import scan
from .small_world_lstm import SmallWorldLSTM
from .steps import Steps

__all__ = ["LSTM", "MultiplicativeLSTM", "SmallWorldLSTM", "Steps", "linear_of", "scan"]
