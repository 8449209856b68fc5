"""Training runs as plain functions; the command line shows them.

What all of them share is said here. `run` is a run's folder, which may have a run that resumes; `seed` draws weights,
orders and whatever else is drawn, and leaves PyTorch's generators alone; `device` is "cpu" or "cuda"; `progress` is
called with the work done and the total. Numbers out of range, data that do not fit, and models for which there is no
memory raise a `BlockSparseError` before anything is trained.
"""
