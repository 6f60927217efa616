"""What a packed batch holds, and its way from the packer to the trainer.

Packed batches come in from a packer of the room `packing`. The same batches go out to the trainer, prepared ahead, in
step with the other ranks, and split into microbatches of one row.

- `contract`: the keys of a batch with shapes and dtypes, and `check_batch`, which checks them.
- `background`: a thread that keeps the next batches ready.
- `lockstep`: epochs that end after the same batch on all ranks, stopping together, and the saved state of all ranks.
- `microbatches`: splits a batch into rows, and counts tokens, documents and targets for Composer.
"""
