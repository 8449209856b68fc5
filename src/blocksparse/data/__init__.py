"""Loaders: text as bytes, images in the idx format."""
