"""The packer: source batches of documents go in, packed and labelled batches come out.

A document is read (`source_batch`), checked and copied (`token_arrays`, `ingest`) and waits (`waiting_buffer`, with
its entry in a `document_table`). A strategy chooses its row (`best_fit`, `subset_sum`), `layout` orders the rows, and
`row_writer` writes the tensors with the labels of the objective (`labels`). `schedules` gives the rows and the mask
ratio of each batch, `options` the policies, and `settings` groups them all. `sequence_packer` runs all of this and
saves its state; `token_account` says where each token went and `epoch_end` reports it. `blocks` packs a whole list of
samples at once.

Imports numpy, numba and PyTorch, never Composer or transformers.
"""
