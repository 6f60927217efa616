"""The shape of the encoder as plain numbers. This file imports no PyTorch, so the YAML schema can be built on it."""

from dataclasses import dataclass

from composer_packing.common.resume import Resume, key


@dataclass
class ModernBertConfig:
    """Shape of the encoder. Defaults are those of ModernBERT base, and most names are Hugging Face's.

    Attributes:
        vocab_size: number of rows of the embedding. Token ids are below it.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward.
        num_hidden_layers: number of layers.
        num_attention_heads: number of heads. `hidden_size` divided by it must be a whole, even number.
        global_attn_every_n_layers: layers 0, n, 2n and so on are global: a token sees its whole document.
        local_attention: width in tokens of the window in all other layers, half of it to each side.
        global_rope_theta: rotary base of the global layers.
        local_rope_theta: rotary base of the windowed layers.
        norm_eps: epsilon of the layer norms.
        attn_out_dropout: dropout on the attention's output projection, in training only.
        initializer_range: standard deviation of the initial weights.
        causal: a token sees only itself and the tokens before it. A windowed layer reaches back half the window.

    Raises:
        ValueError: a value is out of its range, or values do not go together.
    """

    vocab_size: int = key(50368, Resume.WEIGHTS)
    hidden_size: int = key(768, Resume.WEIGHTS)
    intermediate_size: int = key(1152, Resume.WEIGHTS)
    num_hidden_layers: int = key(22, Resume.WEIGHTS)
    num_attention_heads: int = key(12, Resume.WEIGHTS)
    global_attn_every_n_layers: int = key(3, Resume.WEIGHTS)
    local_attention: int = key(128, Resume.WEIGHTS)
    global_rope_theta: float = key(160_000.0, Resume.WEIGHTS)
    local_rope_theta: float = key(10_000.0, Resume.WEIGHTS)
    norm_eps: float = key(1e-5, Resume.WEIGHTS)
    attn_out_dropout: float = key(0.1, Resume.TRAINING)
    initializer_range: float = key(0.02, Resume.FREE)
    causal: bool = key(False, Resume.TRAINING)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("attn_out_dropout", "causal") and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} must be above 0 and finite")
        if not 0 <= self.attn_out_dropout < 1:
            raise ValueError(f"attn_out_dropout={self.attn_out_dropout} must be at least 0 and below 1")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of twice "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.local_attention < 2:
            raise ValueError(f"local_attention={self.local_attention} must be at least 2")
