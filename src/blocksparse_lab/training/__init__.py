"""Train any task in a run folder: the loop, checkpoints, logs and several processes; `recipes` has the tasks."""
