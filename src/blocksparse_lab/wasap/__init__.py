"""WASAP-SGD and WASSP-SGD: several processes train one sparse network, then average their own."""

from .settings import Epoch, Settings
from .train import train

__all__ = ["Epoch", "Settings", "train"]
