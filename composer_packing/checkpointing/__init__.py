"""Stopping and resuming: how a run ends with a checkpoint, and how the next run starts from a checkpoint.

- `run_folder`: the folder of a run: its lock, and the checkpoint from which the run starts.
- `find`: the last whole checkpoint in a folder or store; `object_store`: listing and copying from a store.
- `identity`: what a checkpoint says about its run, and what must match before another run starts from it.
- `packed_dataset`: saves the position of every rank in the data, and restores it, also on other ranks.
- `resumption`: restores random numbers.
- `saving`: how Composer writes checkpoints, what its errors mean, and where the last checkpoint is.
- `sigterm`: ends a run with a checkpoint when a scheduler sends SIGTERM.
"""
