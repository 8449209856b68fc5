"""Train any task in a run folder: the loop, checkpoints, logs, several processes. `recipes` has the tasks."""
