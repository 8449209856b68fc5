"""Data loaders: text as bytes, labelled texts, images in the idx format, tables of numbers; downloads.

All share these arguments: `data_dir` is a folder with the published files, or with the data set's folder; without it
they are downloaded once. `progress` is called after each chunk of a download with bytes and total. `seed` makes all
random choices. Unknown names, missing or broken files and failed downloads raise a `BlockSparseError`, with the line
if there is one.
"""
