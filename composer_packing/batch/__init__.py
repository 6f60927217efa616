"""A packed batch: what it holds, how it is handed over and how it is split.

In come packed batches, from the packer of the `packing` room. Out go the same batches, packed ahead on a background
thread (`background`), in step with the other ranks (`lockstep`), and split into rows and counted for the trainer
(`microbatches`). `contract` lists the keys of a batch with their shapes and types.
"""
