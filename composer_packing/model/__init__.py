"""The encoder: ModernBERT on one packed row.

In comes a microbatch: `(row_len,)` token ids with `cu_seqlens` and `max_seqlen`. Out come logits at the targets and
their loss. `config` holds the shape of the model, `attention` keeps tokens inside their documents, and `modernbert` is
the network, with the parameter names of Hugging Face.
"""
