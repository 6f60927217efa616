import dataclasses
from typing import Any, TypeVar

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_packing.batch.contract import IGNORE_INDEX
from composer_packing.model.config import ModernBertConfig
from composer_packing.model.modernbert import ModernBertForMaskedLM
from tests.tools.models import away_from_its_start, hugging_face, small

Module = TypeVar("Module", bound=torch.nn.Module)

configs = st.builds(
    lambda heads, head_dim, **others: ModernBertConfig(
        hidden_size=heads * head_dim, num_attention_heads=heads, **others
    ),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6, 8, 16]),
    vocab_size=st.integers(20, 70),
    intermediate_size=st.integers(1, 40),
    num_hidden_layers=st.integers(1, 5),
    global_attn_every_n_layers=st.integers(1, 4),
    local_attention=st.sampled_from([2, 4, 10, 128]),
    global_rope_theta=st.sampled_from([10_000.0, 160_000.0]),
    local_rope_theta=st.sampled_from([100.0, 10_000.0]),
    norm_eps=st.sampled_from([1e-5, 1e-3]),
)


def row_of(lengths: list[int], vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, int]:
    ids = torch.randint(vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)


def check_that_logits_are_theirs(ours: ModernBertForMaskedLM, theirs: Any, lengths: list[int], seed: int) -> None:
    """Compare our logits for documents in one row with their logits for each document alone."""
    ids, cu_seqlens, longest = row_of(lengths, ours.model.config.vocab_size, seed)
    with torch.no_grad():
        packed = ours(ids, cu_seqlens, longest).logits
        alone = torch.cat([theirs(input_ids=document[None]).logits[0] for document in ids.split(lengths)])
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


@settings(max_examples=30)
@given(configs, st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_logits_equal_hugging_faces_for_each_document_alone(
    config: ModernBertConfig, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    ours = away_from_its_start(ModernBertForMaskedLM(config)).eval()
    theirs = hugging_face(config)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    check_that_logits_are_theirs(ours, theirs, lengths, seed)


def hugging_face_decoder(ours: ModernBertForMaskedLM) -> transformers.ModernBertDecoderForCausalLM:
    """Return Hugging Face's causal form of the model with our weights.

    Its window counts the token itself. It has one matrix each for queries, keys and values, and only one rotary base.
    """
    config = ours.model.config
    names = set(vars(config)) - {"attn_out_dropout", "causal", "local_attention"}
    theirs = transformers.ModernBertDecoderForCausalLM(
        transformers.ModernBertDecoderConfig(
            **{name: getattr(config, name) for name in names},
            local_attention=2 * (config.local_attention // 2 + 1),
            attn_implementation="eager",
            **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
        )
    ).eval()
    weights = {}
    for name, weight in ours.state_dict().items():
        if name.endswith("Wqkv.weight"):
            for part, third in zip("qkv", weight.chunk(3), strict=True):
                weights[name.replace("Wqkv", f"{part}_proj")] = third
        else:
            weights[f"lm_{name}" if name.startswith("head.") else name] = weight
    theirs.load_state_dict(weights, strict=True)
    return theirs


@settings(max_examples=20)
@given(configs, st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_causal_logits_equal_those_of_hugging_faces_decoder_for_each_document_alone(
    config: ModernBertConfig, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    config = dataclasses.replace(config, causal=True, local_rope_theta=config.global_rope_theta)
    ours = away_from_its_start(ModernBertForMaskedLM(config)).eval()
    check_that_logits_are_theirs(ours, hugging_face_decoder(ours), lengths, seed)


@given(st.lists(st.integers(1, 25), min_size=1, max_size=5), st.data())
def test_changing_a_token_of_a_causal_model_changes_no_bit_before_it_or_in_another_document(
    lengths: list[int], data: st.DataObject
) -> None:
    model = ModernBertForMaskedLM(small(causal=True)).eval()
    ids, cu_seqlens, longest = row_of(lengths, 50)
    changed = data.draw(st.integers(0, len(ids) - 1))
    other = ids.clone()
    other[changed] = (ids[changed] + 1) % 50
    with torch.no_grad():
        moved = (model(ids, cu_seqlens, longest).logits != model(other, cu_seqlens, longest).logits).any(1)
    end = int(cu_seqlens[cu_seqlens > changed][0])
    assert not moved[:changed].any()
    assert not moved[end:].any()
    assert moved[changed]


def test_names_and_shapes_are_hugging_faces_and_weights_load_in_both_directions() -> None:
    ours, theirs = ModernBertForMaskedLM(small()), hugging_face(small())
    assert {name: p.shape for name, p in ours.state_dict().items()} == {
        name: p.shape for name, p in theirs.state_dict().items()
    }
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert ours.decoder.weight is ours.model.embeddings.tok_embeddings.weight, "still tied"


def test_the_defaults_are_the_base_model() -> None:
    with torch.device("meta"):
        model = ModernBertForMaskedLM(ModernBertConfig())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(149e6, rel=0.01)
    layers = [layer.attn.window for layer in model.model.layers]
    assert layers == [None, 64, 64] * 7 + [None]


def test_changing_one_document_changes_no_bit_of_the_logits_of_others() -> None:
    model = ModernBertForMaskedLM(small()).eval()
    ids, cu_seqlens, longest = row_of([9, 31, 1, 20], 50)
    other = ids.clone()
    other[9:40] = (ids[9:40] + 1) % 50
    with torch.no_grad():
        moved = (model(ids, cu_seqlens, longest).logits != model(other, cu_seqlens, longest).logits).any(1)
    assert moved.tolist() == [False] * 9 + [True] * 31 + [False] * 21


def test_the_order_of_documents_in_a_row_does_not_matter() -> None:
    model = ModernBertForMaskedLM(small()).eval()
    ids, cu_seqlens, longest = row_of([9, 31], 50)
    swapped = torch.cat([ids[9:], ids[:9]])
    with torch.no_grad():
        one = model(ids, cu_seqlens, longest).logits
        other = model(swapped, torch.tensor([0, 31, 40]).int(), longest).logits
    torch.testing.assert_close(one, torch.cat([other[31:], other[:31]]))


def test_logits_are_made_at_the_targets_only_and_the_loss_is_their_mean() -> None:
    model = ModernBertForMaskedLM(small()).eval()
    ids, cu_seqlens, longest = row_of([12, 8], 50)
    labels = torch.full((20,), IGNORE_INDEX)
    labels[[2, 13, 19]] = torch.tensor([7, 8, 9])
    everywhere = model(ids, cu_seqlens, longest).logits
    for count in (None, 3):
        output = model(ids, cu_seqlens, longest, labels, count)
        assert output.targets.tolist() == [7, 8, 9]
        torch.testing.assert_close(output.logits, everywhere[[2, 13, 19]])
        by_hand = -everywhere.log_softmax(-1)[[2, 13, 19], [7, 8, 9]].mean()
        torch.testing.assert_close(output.loss, by_hand)


def test_a_row_without_targets_has_a_finite_loss_and_zero_gradients() -> None:
    model = ModernBertForMaskedLM(small())
    ids, cu_seqlens, longest = row_of([12, 8], 50)
    loss = model(ids, cu_seqlens, longest, torch.full((20,), IGNORE_INDEX), 0).loss
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_the_gradient_of_a_row_is_that_of_its_documents() -> None:
    model = ModernBertForMaskedLM(small(attn_out_dropout=0.0)).double()
    lengths = [12, 1, 30, 7]
    ids, cu_seqlens, longest = row_of(lengths, 50)
    labels = torch.where(torch.rand(50, generator=torch.Generator().manual_seed(1)) < 0.3, ids, IGNORE_INDEX)
    model(ids, cu_seqlens, longest, labels).loss.backward()
    packed = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    targets = int((labels != IGNORE_INDEX).sum())
    for document, wanted in zip(ids.split(lengths), labels.split(lengths), strict=True):
        count = int((wanted != IGNORE_INDEX).sum())
        alone = model(document, torch.tensor([0, len(document)]).int(), len(document), wanted).loss
        (alone * count / targets).backward()
    for one, other in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


def test_an_untrained_model_gives_all_tokens_about_the_same_probability() -> None:
    torch.manual_seed(0)
    model = ModernBertForMaskedLM(small(vocab_size=1000, hidden_size=64))
    ids, cu_seqlens, longest = row_of([100, 100], 1000)
    loss = model(ids, cu_seqlens, longest, ids).loss
    assert loss.item() == pytest.approx(torch.tensor(1000.0).log().item(), abs=0.2)


def test_dropout_is_on_the_attention_output_in_training_only() -> None:
    model = ModernBertForMaskedLM(small(attn_out_dropout=0.5))
    row = row_of([20], 50)
    assert not torch.equal(model(*row).logits, model(*row).logits)
    model.eval()
    assert torch.equal(model(*row).logits, model(*row).logits)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"num_attention_heads": 3}, "num_attention_heads=3"), ({"local_attention": 1}, "local_attention=1")],
)
def test_an_impossible_shape_is_an_error(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changed)
