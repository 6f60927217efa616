"""ModernBERT (Warner et al., 2024) on one packed row. There is no batch dimension.

- Layers have a norm before attention and before the feed-forward, and no biases. The feed-forward is gated.
- Rotary positions restart with every document.
- By default every third layer attends to whole documents, and all other layers attend within a window.
- The decoder shares its weights with the embedding.
- With causal attention the same model predicts next tokens.

Names and shapes of the parameters are those of Hugging Face's `ModernBertForMaskedLM`, so weights can be moved in both
directions. Only attention looks at where documents start and end. All other layers treat each token of the row alone.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from composer_packing.batch.contract import IGNORE_INDEX
from composer_packing.model.attention import Segments, attend
from composer_packing.model.config import ModernBertConfig


class LanguageModelOutput(NamedTuple):
    """Output of the model for one row.

    Attributes:
        logits: `(targets, vocab_size)` at the targets. Without labels `(row_len, vocab_size)`, one for each slot.
        targets: labels of the targets, int64 `(targets,)`. None without labels.
        loss: mean cross entropy over the targets, in nats. None without labels. A row without targets has a loss of 0
            with a zero gradient.
    """

    logits: Tensor
    targets: Tensor | None
    loss: Tensor | None


def _norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


class Embeddings(nn.Module):
    """Token embedding, followed by a norm."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ids `(row_len,)` to `(row_len, hidden_size)`."""
        embedded: Tensor = self.norm(self.tok_embeddings(input_ids))
        return embedded


class Attention(nn.Module):
    """Self-attention within documents, with rotary positions: global or windowed, to both sides or causal."""

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
        """Map `(row_len, hidden_size)` to the same shape."""
        qkv = self.Wqkv(hidden).unflatten(-1, (3, self.heads, -1))
        attended = attend(rotary.turn(qkv), segments, self.window, self.causal)
        out: Tensor = self.out_drop(self.Wo(attended.flatten(1)))
        return out


class MLP(nn.Module):
    """Feed-forward, gated by GELU."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(row_len, hidden_size)` to the same shape."""
        value, gate = self.Wi(hidden).chunk(2, dim=-1)
        out: Tensor = self.Wo(F.gelu(value) * gate)
        return out


class Layer(nn.Module):
    """Attention, then feed-forward. Each comes after a norm, and its output is added to the residual stream."""

    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        # The first attention follows the norm of the embedding and needs no other.
        self.attn_norm = nn.Identity() if layer == 0 else _norm(config)
        self.attn = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, segments: Segments, rotary: "Rotary") -> Tensor:
        """Map `(row_len, hidden_size)` to the same shape."""
        hidden = hidden + self.attn(self.attn_norm(hidden), segments, rotary)
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class Rotary:
    """Rotations of queries and keys by the positions of one row (Su et al., 2021), in fp32.

    Args:
        position: position of each token in its document, `(row_len,)`.
        head_dim: width of a head.
        theta: rotary base.
    """

    def __init__(self, position: Tensor, head_dim: int, theta: float) -> None:
        exponents = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim
        angles = position[:, None].float() * theta**-exponents
        self.cos = torch.cat([angles, angles], dim=-1).cos()[:, None, None]  # the same for q and k and all heads
        self.sin = torch.cat([angles, angles], dim=-1).sin()[:, None, None]

    def turn(self, qkv: Tensor) -> Tensor:
        """Return `qkv`, `(row_len, 3, heads, head_dim)`, with queries and keys rotated and its dtype kept."""
        query_key, value = qkv[:, :2], qkv[:, 2:]
        first, second = query_key.chunk(2, dim=-1)
        turned = query_key * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([turned.to(qkv.dtype), value], dim=1)


class ModernBertModel(nn.Module):
    """The encoder: maps the ids of a row to hidden states."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([Layer(config, layer) for layer in range(config.num_hidden_layers)])
        self.final_norm = _norm(config)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Return the hidden states of one row.

        Args:
            input_ids: int64 `(row_len,)`.
            cu_seqlens: int32 `(segments + 1,)`.
            max_seqlen: length of the longest segment.

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
    """Linear layer, GELU and norm before the decoder."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = _norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(tokens, hidden_size)` to the same shape."""
        out: Tensor = self.norm(F.gelu(self.dense(hidden)))
        return out


class ModernBertForMaskedLM(nn.Module):
    """Encoder, prediction head and decoder. With labels, logits are computed at the targets only.

    The label of a slot is what this slot must predict. The model shifts no labels, also when it predicts next tokens.
    """

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.model = ModernBertModel(config)
        self.head = PredictionHead(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight
        self._init_weights(config)

    def _init_weights(self, config: ModernBertConfig) -> None:
        """Draw weights from a truncated normal.

        As in Megatron-LM, matrices that write into the residual stream start smaller, the more layers there are.
        """
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
        """Return logits and loss of one row.

        Args:
            input_ids: int64 `(row_len,)`.
            cu_seqlens: int32 `(segments + 1,)`.
            max_seqlen: length of the longest segment.
            labels: int64 `(row_len,)`, with `IGNORE_INDEX` in slots without a target.
            num_targets: number of targets in `labels`. If it is None, targets are counted, which waits for the device.
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
