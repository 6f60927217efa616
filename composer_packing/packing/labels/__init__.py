"""Labels: what each slot of a packed row predicts.

`published_mlm` draws the masks of the published ModernBERT packer. `keyed_mlm` draws masks that depend only on seed,
epoch, document and position. `next_tokens` writes the next token of each token, for causal training and fine-tuning.
"""
