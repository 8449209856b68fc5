"""Training runs as plain functions, which the command line shows.

All share these arguments: `run` is a run's folder, whose run is resumed if there is one; `seed` makes all random
choices and leaves PyTorch's generators alone; `device` is "cpu" or "cuda"; `progress(done, total)` is called during
the work. Numbers out of range, data that do not fit and models too large for the memory raise a `BlockSparseError`
before training.
"""
