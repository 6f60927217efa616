"""Labels: what each slot of a packed row predicts.

`published_mlm` draws masks as the published ModernBERT packer does, `keyed_mlm` draws masks that depend only on seed,
epoch, document and position, and `next_tokens` writes the next token of each token for causal training and fine-tuning.
"""
