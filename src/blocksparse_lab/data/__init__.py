"""Loaders: text as bytes, labelled texts, images in the idx format, tables of numbers; downloads.

What all of them share is said here. `data_dir` is a folder that has the files as published, or the data set's own
folder in it; without one they are downloaded, once. `progress` is called after each chunk of a download with the bytes
so far and the total, and `seed` draws what is drawn. A name that is unknown, a file that is missing, broken or not what
its name says, and a download that fails raise a `BlockSparseError`, with the line where there is one.
"""
