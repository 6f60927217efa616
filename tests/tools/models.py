"""Small models."""

from typing import TypeVar

import torch
import transformers

from composer_packing.model.config import ModernBertConfig

Module = TypeVar("Module", bound=torch.nn.Module)


def small(**changed: int | float) -> ModernBertConfig:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    return ModernBertConfig(**(sizes | {"num_attention_heads": 2, "local_attention": 6} | changed))  # type: ignore[arg-type]


def hugging_face(config: ModernBertConfig) -> transformers.ModernBertForMaskedLM:
    theirs = transformers.ModernBertConfig(
        **{name: value for name, value in vars(config).items() if name not in ("attn_out_dropout", "causal")},
        attn_implementation="eager",
        reference_compile=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return transformers.ModernBertForMaskedLM(theirs).eval()


def away_from_its_start(model: Module) -> Module:
    """With random norms and biases too, or they would test nothing."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() < 2), std=0.2)
    return model
