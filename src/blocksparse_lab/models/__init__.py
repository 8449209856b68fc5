"""Networks."""

from .pixelcnn import PixelCNN

__all__ = ["PixelCNN"]
