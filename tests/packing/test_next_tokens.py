import itertools
import logging
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from composer_packing import (
    FlatSourceBatch,
    GreedyBestFitSequencePacker,
    SequencePacker,
    SubsetSumSequencePacker,
    flat_source_batch,
)
from composer_packing.batch.background import BufferedIterable
from composer_packing.batch.contract import COUNTS, IGNORE_INDEX, Batch, check_batch, with_counts
from composer_packing.batch.microbatches import split_packed_batch
from composer_packing.model.modernbert import ModernBertForMaskedLM
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.options import Objective, OverLong, Tail
from tests.tools.models import away_from_its_start, small
from tests.tools.packers import new_packer

Example = tuple[list[int], list[int]]
"""Ids of a document, and its loss mask."""

PACKERS = [GreedyBestFitSequencePacker, SubsetSumSequencePacker]
examples = st.lists(st.integers(5, 30), max_size=25).flatmap(
    lambda ids: st.tuples(st.just(ids), st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
)
objectives = st.sampled_from([Objective.CAUSAL, Objective.SFT])


def labels_of(ids: list[int], mask: list[int], objective: Objective) -> list[int]:
    """What each token of a document predicts, computed in the simplest way."""
    following = [*ids[1:], IGNORE_INDEX][: len(ids)]
    learned = [*mask[1:], 0][: len(ids)] if objective is Objective.SFT else [1] * len(ids)
    return [token if trains else IGNORE_INDEX for token, trains in zip(following, learned, strict=True)]


def source_of(given: list[list[Example]], objective: Objective, as_flat: bool) -> list[Any]:
    masked = objective is Objective.SFT
    batches = [[{"input_ids": ids} | ({"loss_mask": mask} if masked else {}) for ids, mask in batch] for batch in given]
    return [flat_source_batch(batch, 64, loss_masked=masked) for batch in batches] if as_flat else batches


def pairs_in(batch: Batch) -> Counter[tuple[int, int]]:
    """`(input, label)` of all real tokens."""
    real = batch["attention_mask"] == 1
    return Counter(zip(batch["input_ids"][real].tolist(), batch["labels"][real].tolist(), strict=True))


def pairs_of(given: list[Example], objective: Objective) -> Counter[tuple[int, int]]:
    return Counter(pair for ids, mask in given for pair in zip(ids, labels_of(ids, mask, objective), strict=True))


def kept(given: list[Example], objective: Objective, over_long: OverLong, row_len: int) -> list[Example]:
    """The documents, or parts of documents, that should be packed."""
    if over_long is OverLong.DROP:
        given = [(ids, mask) for ids, mask in given if len(ids) <= row_len]
    if over_long is OverLong.TRUNCATE:
        given = [(ids[:row_len], mask[:row_len]) for ids, mask in given]
    return [(ids, mask) for ids, mask in given if objective is Objective.CAUSAL or any(mask[1:])]


@pytest.mark.parametrize("packer_class", PACKERS)
@given(
    given=st.lists(st.lists(examples, max_size=4), min_size=1, max_size=8),
    objective=objectives,
    over_long=st.sampled_from([OverLong.TRUNCATE, OverLong.SPLIT, OverLong.DROP]),
    row_len=st.integers(2, 30),
    as_flat=st.booleans(),
)
def test_inputs_and_labels_are_the_same_pairs_packed_and_unpacked(
    packer_class: type[SequencePacker],
    given: list[list[Example]],
    objective: Objective,
    over_long: OverLong,
    row_len: int,
    as_flat: bool,
) -> None:
    everything = list(itertools.chain(*given))
    expected = kept(everything, objective, over_long, row_len)
    if not any(ids for ids, _ in expected):
        return
    source = source_of([[([5, 6], [0, 1])], *given], objective, as_flat)  # at least one document is packed
    packer = new_packer(
        packer_class, source, 4, 2, row_len, 6, pad_token_id=0, objective=objective, over_long=over_long, tail=Tail.EMIT
    )
    batches = list(packer)
    for batch in batches:
        check_batch(batch)
        uncounted = {key: value for key, value in batch.items() if key not in COUNTS}
        assert with_counts(uncounted) == batch, "the counts that are made while writing are right"
    found = sum(map(pairs_in, batches), Counter[tuple[int, int]]())
    assert found == pairs_of([([5, 6], [0, 1]), *expected], objective)
    account = packer.token_account
    assert account.read == 2 + sum(len(ids) for ids, _ in everything)
    assert account.read == (
        account.emitted + account.waiting + account.truncated + account.dropped + account.without_targets
    )
    assert account.emitted == 2 + sum(len(ids) for ids, _ in expected)


@pytest.mark.parametrize("packer_class", PACKERS)
@given(given=st.lists(st.lists(examples, max_size=4), min_size=1, max_size=8), objective=objectives)
def test_labels_stay_with_their_tokens_from_epoch_to_epoch(
    packer_class: type[SequencePacker], given: list[list[Example]], objective: Objective
) -> None:
    """Each epoch carries documents into the next. The last epoch is long enough to bring out all earlier documents."""
    source: list[Any] = []
    packer = new_packer(
        packer_class, source, 4, 3, 9, 6, pad_token_id=0, objective=objective, over_long=OverLong.SPLIT, tail=Tail.CARRY
    )
    last = ([63] * 9, [1] * 9)
    found: Counter[tuple[int, int]] = Counter()
    given.insert(0, [([5, 6], [0, 1])])  # a first epoch without a token to learn is an error
    for epoch in [*given, [last] * 200]:
        source[:] = [source_of([epoch[at : at + 4]], objective, as_flat=True)[0] for at in range(0, len(epoch), 4)]
        for batch in packer:
            found += pairs_in(batch)
    expected = pairs_of(kept(list(itertools.chain(*given)), objective, OverLong.SPLIT, 9), objective)
    assert Counter({pair: count for pair, count in found.items() if pair[0] != 63}) == expected


def packed(given: list[Example], objective: str, row_len: int = 8, **settings: Any) -> list[Batch]:
    source = source_of([given], Objective(objective), as_flat=False)
    return list(
        new_packer(
            SubsetSumSequencePacker,
            source,
            8,
            1,
            row_len,
            16,
            pad_token_id=0,
            objective=objective,
            tail="emit",
            **settings,
        )
    )


def test_no_document_boundary_is_a_target_and_nothing_is_shifted_twice() -> None:
    (batch,) = packed([([11, 12, 13], []), ([14, 15], [])], "causal")
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15, 0, 0, 0]]
    assert batch["labels"].tolist() == [[12, 13, -100, 15, -100, -100, -100, -100]]
    assert batch["cu_seqlens"][0].tolist() == [0, 3, 5, 8]
    assert (batch["num_tokens"], batch["num_targets"], batch["num_documents"]) == ([5], [3], [2])


def test_only_tokens_that_the_loss_mask_marks_are_predicted() -> None:
    (batch,) = packed([([11, 12, 13, 14], [1, 0, 1, 1]), ([15, 16], [0, 1])], "sft")
    assert batch["labels"].tolist() == [[-100, 13, 14, -100, 16, -100, -100, -100]]
    assert batch["num_targets"] == [3], "no token predicts the first token"


def test_a_piece_predicts_the_first_token_of_the_next_piece() -> None:
    document = ([11, 12, 13, 14, 15], [0, 0, 1, 0, 1])
    causal = packed([document], "causal", row_len=2, over_long="split")
    assert [batch["labels"].tolist() for batch in causal] == [[[12, 13]], [[14, 15]], [[-100, -100]]]
    sft = packed([document], "sft", row_len=2, over_long="split")
    assert [batch["labels"].tolist() for batch in sft] == [[[-100, 13]], [[-100, 15]], [[-100, -100]]]


def test_a_document_of_one_token_has_no_target() -> None:
    (batch,) = packed([([11], []), ([12], [])], "causal")
    assert batch["num_targets"] == [0]
    assert batch["labels"].tolist() == [[-100] * 8]


def test_an_example_whose_whole_response_is_cut_off_is_dropped_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    cut, whole = ([11, 12, 13, 14], [0, 0, 0, 1]), ([15, 16], [0, 1])
    with caplog.at_level(logging.WARNING):
        (batch,) = packed([cut, whole], "sft", row_len=3, over_long="truncate")
    assert batch["input_ids"].tolist() == [[15, 16, 0]]
    assert "1 documents (4 tokens) were dropped: a row would hold none of their tokens to learn" in caplog.text


@pytest.mark.parametrize("example", [([11, 12], [1, 0]), ([11, 12, 13, 14], [0, 0, 0, 1])])
def test_the_packer_stops_if_no_token_to_learn_is_left(example: Example) -> None:
    with pytest.raises(
        ValueError, match=r"every document was dropped: . are longer .* of 1 a row would hold no token to learn"
    ):
        packed([example], "sft", row_len=3, over_long="truncate")
    assert packed([example], "sft", row_len=3, over_long="truncate", world_size=2) == [], "another rank may have more"


def test_a_source_without_end_and_without_tokens_to_learn_is_an_error() -> None:
    source = itertools.repeat([{"input_ids": [5, 6], "loss_mask": [0, 0]}])
    packer = new_packer(GreedyBestFitSequencePacker, source, 8, 1, 8, 16, objective="sft")
    with pytest.raises(
        ValueError, match=r"1000 source batches in a row gave no document .* of 1000 a row would hold no token to learn"
    ):
        next(iter(packer))


@pytest.mark.parametrize(
    ("document", "error", "words"),
    [
        ({"input_ids": [5, 6]}, TypeError, "fine-tuning needs the loss mask of each document.*; one document has none"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, ValueError, "loss mask 0 has 1 values for 2 tokens"),
        ({"input_ids": [5, 6], "loss_mask": 1}, TypeError, "each loss mask must be a flat sequence .* got int: 1"),
        ({"input_ids": [5, 6], "loss_mask": None}, TypeError, "each loss mask must be a flat sequence .* got NoneType"),
        (
            {"input_ids": [5, 6], "loss_mask": [[0], [1, 0]]},
            TypeError,
            r"each loss mask .* got list: \[\[0\], \[1, 0\]\]",
        ),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, ValueError, "loss masks must lie between 0 and 1; got 2"),
        ({"input_ids": [5, 6], "loss_mask": [-100, 6]}, ValueError, "loss masks must lie between 0 and 1; got -100"),
        (
            {"input_ids": [5, 6], "loss_mask": [0.0, 1.0]},
            TypeError,
            "each loss mask must be a flat sequence of integers",
        ),
        ({"input_ids": [5, 6], "loss_mask": np.array([0.0, 1.0])}, TypeError, "each loss mask must be a flat sequence"),
    ],
)
def test_an_invalid_loss_mask_is_an_error_that_shows_it(
    document: dict[str, Any], error: type[Exception], words: str
) -> None:
    packer = new_packer(GreedyBestFitSequencePacker, [[document]], 8, 1, 8, 16, objective="sft")
    with pytest.raises(error, match=words):
        next(iter(packer))


def test_the_loss_mask_of_a_flat_source_batch_is_checked_too() -> None:
    flat = flat_source_batch([{"input_ids": [5, 6], "loss_mask": [False, True]}], loss_masked=True)
    assert flat.loss_mask is not None
    assert flat.loss_mask.tolist() == [0, 1]
    assert flat.loss_mask.dtype == np.uint8
    for mask, error, words in (
        (None, TypeError, "objective='sft' needs a loss mask"),
        (np.array([1]), ValueError, "a loss mask of 1 for 2 tokens"),
        (np.array([0, 7]), ValueError, "values of a loss mask must lie between 0 and 1; got 7"),
        (np.array([0.0, 1.0]), TypeError, "FlatSourceBatch.loss_mask must be a one-dimensional array of integers"),
    ):
        with pytest.raises(error, match=words):
            next(
                iter(
                    new_packer(
                        GreedyBestFitSequencePacker, [flat._replace(loss_mask=mask)], 8, 1, 8, 16, objective="sft"
                    )
                )
            )


@pytest.mark.parametrize("objective", list(Objective))
def test_a_source_batch_may_be_made_of_tensors(objective: Objective) -> None:
    """A DataLoader without batching gives tensors."""
    masked = objective is Objective.SFT
    tensors = FlatSourceBatch(
        torch.tensor([5, 6, 7], dtype=torch.int32),  # type: ignore[arg-type]
        torch.tensor([3]),  # type: ignore[arg-type]
        loss_mask=torch.tensor([False, True, True]) if masked else None,  # type: ignore[arg-type]
    )
    (batch,) = new_packer(
        SubsetSumSequencePacker, [tensors], 8, 1, 8, 16, pad_token_id=0, mask_prob=0.0, objective=objective, tail="emit"
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("tail", ["emit", "carry"])
def test_an_epoch_in_which_every_document_was_dropped_is_not_an_empty_source(tail: str) -> None:
    source = [[{"input_ids": [5, 6], "loss_mask": [0, 1]}]]
    packer = new_packer(SubsetSumSequencePacker, source, 8, 1, 8, 16, objective="sft", tail=tail)
    assert len(list(packer)) == 1
    source[0][0]["loss_mask"] = [0, 0]
    assert list(packer) == []
    assert packer.token_account.without_targets == 2


def test_a_rank_without_tokens_to_learn_waits_for_its_next_epoch() -> None:
    """Other ranks may have more documents. A single rank stops."""
    source = [[{"input_ids": [5, 6], "loss_mask": [0, 0]}]]
    with pytest.raises(ValueError, match="every document was dropped"):
        list(new_packer(SubsetSumSequencePacker, source, 8, 1, 8, 16, objective="sft", tail="carry"))
    packer = new_packer(SubsetSumSequencePacker, source, 8, 1, 8, 16, objective="sft", tail="carry", world_size=2)
    assert list(packer) == []
    source[0][0]["loss_mask"] = [0, 1]
    assert len(list(packer)) == 1


@pytest.mark.parametrize("objective", ["mlm", "causal"])
def test_a_loss_mask_is_never_ignored_silently(objective: str) -> None:
    documents: list[dict[str, Any]] = [{"input_ids": [5, 6], "loss_mask": [0, 1]}]
    mixed = [{"input_ids": [7, 8]}, *documents]
    for source_batch in (documents, mixed, flat_source_batch(documents, loss_masked=True)):
        with pytest.raises(TypeError, match=r"loss.mask, which"):
            next(iter(new_packer(GreedyBestFitSequencePacker, [source_batch], 8, 1, 8, 16, objective=objective)))


@pytest.mark.parametrize("objective", ["causal", "sft"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keyed_masking": KeyedMasking(0, 64, [0])}, "keyed_masking hides tokens, which objective='{}' does not"),
        (
            {"final_masking_ratio": 0.1, "masking_ratio_cooldown_tokens": 100},
            "final_masking_ratio=0.1 needs objective='mlm': objective='{}' masks nothing",
        ),
        (
            {"ignore_token_id": -1},
            "ignore_token_id=-1 must be -100 with keyed_masking, and with every objective but 'mlm'",
        ),
    ],
)
def test_settings_for_masked_tokens_are_refused_with_other_objectives(
    objective: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words.format(objective)):
        new_packer(GreedyBestFitSequencePacker, [], 8, 1, 8, 16, objective=objective, **settings)


def test_an_unknown_objective_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="objective='clm' must be one of mlm, causal, sft"):
        new_packer(GreedyBestFitSequencePacker, [], 8, 1, 8, 16, objective="clm")


def some_examples(count: int = 60, longest: int = 25) -> list[Example]:
    """Examples of 2 to `longest` tokens, of which about a tenth are to be learned."""
    rng = np.random.default_rng(0)
    given = []
    for length in rng.integers(2, longest + 1, count):
        mask = rng.random(length) < 0.1
        mask[-1] |= not mask[1:].any()
        given.append((rng.integers(5, 50, length).tolist(), mask.astype(int).tolist()))
    return given


@pytest.mark.parametrize("objective", list(Objective)[1:])
def test_workers_and_the_thread_hand_over_the_same_batches(objective: Objective) -> None:
    masked = objective is Objective.SFT
    documents = [{"input_ids": ids} | ({"loss_mask": mask} if masked else {}) for ids, mask in some_examples()]

    def batches(workers: int) -> list[Batch]:
        flatten = partial(flat_source_batch, vocab_size=50, loss_masked=masked)
        loader: DataLoader[Any] = DataLoader(documents, 8, num_workers=workers, collate_fn=flatten)  # type: ignore[arg-type]
        packer = new_packer(SubsetSumSequencePacker, loader, 8, 2, 60, 16, objective=objective, tail="emit")
        ahead = BufferedIterable(packer, 2)
        made = list(ahead)
        ahead.close()
        return made

    given = batches(0)
    for one, other in zip(given, batches(2), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("input_ids", "labels", "attention_mask"))
        assert [one[key] for key in COUNTS[:3]] == [other[key] for key in COUNTS[:3]]
    assert sum(map(pairs_in, given), Counter[tuple[int, int]]()) == pairs_of(some_examples(), objective)


@pytest.mark.parametrize("objective", list(Objective)[1:])
@pytest.mark.parametrize("row_len", [100, 10])
def test_packed_rows_have_the_loss_and_gradient_of_the_separate_documents(objective: Objective, row_len: int) -> None:
    """Every target has the same weight, whatever its row is and however many targets its document has.

    In short rows, documents come in pieces, and the last token of a piece predicts the next piece.
    """
    torch.manual_seed(0)
    model = away_from_its_start(ModernBertForMaskedLM(small(causal=True, attn_out_dropout=0.0)))
    given = some_examples()
    targets = sum(label != IGNORE_INDEX for ids, mask in given for label in labels_of(ids, mask, objective))

    def gradient() -> torch.Tensor:
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return flat

    alone = 0.0
    for ids, mask in given:
        labels = labels_of(ids, mask, objective)
        for at in range(0, len(ids), row_len):
            piece = torch.tensor(ids[at : at + row_len])
            logits = model(piece, torch.tensor([0, len(piece)]).int(), len(piece)).logits
            loss = torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels[at : at + row_len]), reduction="sum", ignore_index=IGNORE_INDEX
            )
            (loss / targets).backward()
            alone += loss.item() / targets
    expected = gradient()

    source = source_of([given], objective, as_flat=True)
    packer = new_packer(
        SubsetSumSequencePacker,
        source,
        64,
        4,
        row_len,
        128,
        pad_token_id=0,
        objective=objective,
        over_long="split",
        tail="emit",
    )
    together = 0.0
    for batch in packer:
        for micro in split_packed_batch(batch, 1):
            row = (micro["input_ids"], micro["cu_seqlens"], micro["max_seqlen"])
            loss = model(*row, micro["labels"], micro["num_targets"]).loss * micro["num_targets"] / targets
            loss.backward()
            together += loss.item()
    assert together == pytest.approx(alone, rel=1e-5)
    assert (gradient() - expected).norm() / expected.norm() < 1e-5


def test_a_model_that_shifts_labels_itself_must_be_told_that_they_are_shifted() -> None:
    """Otherwise causal models of Hugging Face would predict the token after the next."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    ids = list(range(11, 19))
    (batch,) = packed([(ids, [])], "causal")
    labels = batch["labels"]
    ours = theirs(input_ids=batch["input_ids"], labels=labels, shift_labels=labels).loss
    usual = theirs(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    torch.testing.assert_close(ours, usual)
