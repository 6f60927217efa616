"""The encoder: ModernBERT on one packed row.

A microbatch comes in: token ids `(row_len,)` with `cu_seqlens`, `max_seqlen` and labels. Logits at the targets and
their mean loss go out. The names and shapes of the weights are those of Hugging Face's ModernBERT.

- `config`: the shape of the model as plain numbers. It imports no PyTorch.
- `attention`: attention that keeps each token inside its own document.
- `modernbert`: the network: embeddings, layers, prediction head and loss.
"""
