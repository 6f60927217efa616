"""Stopping and resuming: what a checkpoint holds, how the last one is found, and how a run goes on from it.

`run_folder` holds the folder of a run and finds its last whole checkpoint (`find`, `object_store`). `identity` says
what must agree before a run starts from a checkpoint. `packed_dataset` saves and restores the position of every rank
in the data, `resumption` restores random numbers, and `sigterm` ends a run with a checkpoint.
"""
