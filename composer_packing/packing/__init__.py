"""The packer: source batches of documents go in, packed and labelled batches come out.

A source batch (`source_batch`, `token_arrays`) is checked and counted by the `waiting_buffer` (`token_account`), and
copied (`ingest`) into the `document_store`, with an entry per document in a `document_table`. A strategy (`best_fit`,
`subset_sum`) chooses a row for each document, `layout` orders the documents of a row, and `row_writer` writes the
tensors with the `labels` of the objective. `schedules` gives the rows and the mask ratio of each batch. All of this is
run by the `sequence_packer`, with its `settings` and `options`; `epoch_end` logs and checks an epoch. `blocks` packs a
whole list of sequences at once.

Imports numpy, numba and PyTorch, never Composer or transformers.
"""
