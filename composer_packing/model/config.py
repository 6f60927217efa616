"""The shape of the encoder as plain numbers. PyTorch is not needed to read them."""

from dataclasses import dataclass


@dataclass
class ModernBertConfig:
    """Shape of the encoder. The names are Hugging Face's where it has one; the defaults are the base model's.

    Attributes:
        vocab_size: rows of the embedding; ids lie below it.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward.
        num_hidden_layers: layers.
        num_attention_heads: heads; must divide `hidden_size` into even parts.
        global_attn_every_n_layers: layer 0 and every n-th see whole documents.
        local_attention: width of the window of the others, half to each side.
        global_rope_theta: rotary base of the global layers.
        local_rope_theta: rotary base of the windowed layers.
        norm_eps: epsilon of the layer norms.
        attn_out_dropout: dropout on the attention's output projection, in training.
        initializer_range: standard deviation of the initial weights.
        causal: a token sees only itself and what comes before it, in a windowed layer as far as half the window.
    """

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attn_out_dropout: float = 0.1
    initializer_range: float = 0.02
    causal: bool = False

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
