"""Loaders: text as bytes, labelled texts, images in the idx format; downloads."""
