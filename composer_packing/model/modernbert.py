"""ModernBERT (Warner et al., 2024) on one packed row: no padding to skip, no batch dimension.

The architecture: pre-norm without biases, a gated feed-forward, rotary positions that restart with every
document, global attention in every third layer and a window elsewhere, a decoder tied to the embedding.
With causal attention the same model predicts next tokens. Names and shapes of the parameters are those of Hugging
Face's `ModernBertForMaskedLM`, so that weights go both ways. Linear layers see the row's tokens as they are;
attention is `attention.attend`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from composer_packing.batch.contract import IGNORE_INDEX
from composer_packing.model.attention import Segments, attend
from composer_packing.model.config import ModernBertConfig


class LanguageModelOutput(NamedTuple):
    """What the model gives for one row.

    Attributes:
        logits: `(targets, vocab_size)` at the targets, `(row_len, vocab_size)` where there are no labels.
        targets: int64 `(targets,)`, or None.
        loss: mean cross entropy over the targets, or None. 0, with a zero gradient, where there are none.
    """

    logits: Tensor
    targets: Tensor | None
    loss: Tensor | None


def _norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


class Embeddings(nn.Module):
    """Token embedding and its norm."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`(row_len,)` ids to `(row_len, hidden_size)`."""
        embedded: Tensor = self.norm(self.tok_embeddings(input_ids))
        return embedded


class Attention(nn.Module):
    """Rotary self-attention within documents, global or windowed, to both sides or back only."""

    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.is_global = layer % config.global_attn_every_n_layers == 0
        self.window = None if self.is_global else config.local_attention // 2
        self.causal = config.causal
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_drop = nn.Dropout(config.attn_out_dropout)

    def forward(self, hidden: Tensor, segments: Segments, rotary: "Rotary") -> Tensor:
        """`(row_len, hidden_size)` to the same."""
        qkv = self.Wqkv(hidden).unflatten(-1, (3, self.heads, -1))
        attended = attend(rotary.turn(qkv), segments, self.window, self.causal)
        out: Tensor = self.out_drop(self.Wo(attended.flatten(1)))
        return out


class MLP(nn.Module):
    """Gated feed-forward with GELU."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(row_len, hidden_size)` to the same."""
        value, gate = self.Wi(hidden).chunk(2, dim=-1)
        out: Tensor = self.Wo(F.gelu(value) * gate)
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        # The embedding's norm already stands before the first attention.
        self.attn_norm = nn.Identity() if layer == 0 else _norm(config)
        self.attn = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, segments: Segments, rotary: "Rotary") -> Tensor:
        """`(row_len, hidden_size)` to the same."""
        hidden = hidden + self.attn(self.attn_norm(hidden), segments, rotary)
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class Rotary:
    """Rotations of queries and keys for the positions of one row (Su et al., 2021), in fp32.

    Args:
        position: `(row_len,)`, place of each token in its document.
        head_dim: width of a head.
        theta: rotary base.
    """

    def __init__(self, position: Tensor, head_dim: int, theta: float) -> None:
        exponents = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim
        angles = position[:, None].float() * theta**-exponents
        self.cos = torch.cat([angles, angles], dim=-1).cos()[:, None, None]  # over q and k, and heads
        self.sin = torch.cat([angles, angles], dim=-1).sin()[:, None, None]

    def turn(self, qkv: Tensor) -> Tensor:
        """Rotate queries and keys of `(row_len, 3, heads, head_dim)`; the dtype stays."""
        query_key, value = qkv[:, :2], qkv[:, 2:]
        first, second = query_key.chunk(2, dim=-1)
        turned = query_key * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([turned.to(qkv.dtype), value], dim=1)


class ModernBertModel(nn.Module):
    """The encoder: one row of ids to one row of hidden states."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([Layer(config, layer) for layer in range(config.num_hidden_layers)])
        self.final_norm = _norm(config)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Encode one row.

        Args:
            input_ids: int64 `(row_len,)`.
            cu_seqlens: int32 `(segments + 1,)`.
            max_seqlen: longest segment.

        Returns:
            `(row_len, hidden_size)`.
        """
        config = self.config
        segments = Segments(cu_seqlens, max_seqlen, len(input_ids))
        head_dim = config.hidden_size // config.num_attention_heads
        global_rotary = Rotary(segments.position, head_dim, config.global_rope_theta)
        local_rotary = Rotary(segments.position, head_dim, config.local_rope_theta)
        hidden = self.embeddings(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, segments, global_rotary if layer.attn.is_global else local_rotary)
        out: Tensor = self.final_norm(hidden)
        return out


class PredictionHead(nn.Module):
    """Dense layer, GELU and norm before the decoder."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = _norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(tokens, hidden_size)` to the same."""
        out: Tensor = self.norm(F.gelu(self.dense(hidden)))
        return out


class ModernBertForMaskedLM(nn.Module):
    """Encoder, prediction head and decoder. Logits are made at the targets only.

    A label belongs to the slot that predicts it: the model shifts nothing, whatever the objective.
    """

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.model = ModernBertModel(config)
        self.head = PredictionHead(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight
        self._init_weights(config)

    def _init_weights(self, config: ModernBertConfig) -> None:
        """Truncated normal; what writes into the residual stream starts smaller, with depth (Megatron-LM)."""
        into_stream = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
                continue
            std = into_stream if name.endswith("Wo.weight") else config.initializer_range
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        labels: Tensor | None = None,
        num_targets: int | None = None,
    ) -> LanguageModelOutput:
        """Predict one row.

        Args:
            input_ids: int64 `(row_len,)`.
            cu_seqlens: int32 `(segments + 1,)`.
            max_seqlen: longest segment.
            labels: int64 `(row_len,)`, `IGNORE_INDEX` where there is no target.
            num_targets: how many targets `labels` holds; without it they are counted, which waits for
                the device.
        """
        hidden = self.model(input_ids, cu_seqlens, max_seqlen)
        if labels is None:
            return LanguageModelOutput(self.decoder(self.head(hidden)), None, None)
        is_target = labels != IGNORE_INDEX
        size = int(is_target.sum()) if num_targets is None else num_targets
        at = torch.nonzero_static(is_target, size=size).squeeze(1)
        targets = labels.index_select(0, at)
        logits = self.decoder(self.head(hidden.index_select(0, at)))
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / max(size, 1)
        return LanguageModelOutput(logits, targets, loss)
