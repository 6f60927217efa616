"""Labels: what each slot of a packed row predicts.

`published_mlm` draws the masks of the published ModernBERT packer, the default of the library. `keyed_mlm` draws
masks that depend only on seed, epoch, document and position, the default of a YAML file. `next_tokens` writes the
next token of each token, for causal training and fine-tuning.
"""
