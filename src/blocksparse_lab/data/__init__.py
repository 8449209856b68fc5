"""Loaders: text as bytes, labelled texts, images in the idx format, tables of numbers; downloads."""
