from typing import Any

import numpy as np
import pytest
import torch

from composer_packing import GreedyBestFitSequencePacker, KeyedMasking
from composer_packing.batch.contract import Batch, check_batch
from tests.tools.packers import new_packer


def packer(**settings: Any) -> GreedyBestFitSequencePacker:
    source = [[{"input_ids": [5 + number] * 3, "document": number} for number in range(6)]]
    return new_packer(GreedyBestFitSequencePacker, source, 6, 2, 8, 7, pad_token_id=0, mask_token_id=4, **settings)


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch["input_ids"], batch["labels"], batch["attention_mask"], *batch["cu_seqlens"]]


@pytest.mark.parametrize("keyed", [True, False])
def test_every_batch_has_memory_of_its_own(keyed: bool) -> None:
    masking = KeyedMasking(0, 100, (0, 4)) if keyed else None
    given = packer(keyed_masking=masking, mask_prob=0.5)
    first = next(iter(given))
    kept = [tensor.clone() for tensor in tensors(first)]
    for batch in given:
        check_batch(batch)
        for tensor in tensors(batch):
            tensor.fill_(-7)
    assert all(torch.equal(one, other) for one, other in zip(tensors(first), kept, strict=True))


def test_keyed_batches_have_their_counts_and_the_published_ones_exactly_the_published_keys() -> None:
    published = {"input_ids", "labels", "attention_mask", "cu_seqlens", "max_seqlen"}
    assert set(next(iter(packer()))) == published
    assert set(next(iter(packer(suppress_masking=True)))) == published - {"attention_mask"}
    counted = next(iter(packer(keyed_masking=KeyedMasking(0, 100, (0, 4)))))
    assert set(counted) == published | {
        "num_tokens",
        "num_targets",
        "num_documents",
        "longest_wait_batches",
        "displacement_documents",
    }
    assert (counted["num_tokens"], counted["num_documents"]) == ([6, 6], [2, 2])
    assert (counted["longest_wait_batches"], counted["displacement_documents"]) == (0, 0)


@pytest.mark.parametrize("name", ["pad_token_id", "mask_token_id", "ignore_token_id"])
def test_an_id_that_is_not_an_int_is_an_error_that_names_it(name: str) -> None:
    settings: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"{name}=None must be an int"):
        new_packer(GreedyBestFitSequencePacker, [], 1, 1, 8, 2, **settings)


def test_keyed_masks_need_the_ignore_index_of_the_counts_and_the_model() -> None:
    with pytest.raises(ValueError, match="ignore_token_id=-1 must be -100 with keyed_masking"):
        packer(ignore_token_id=-1, keyed_masking=KeyedMasking(0, 100, (0, 4)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pinned_memory_without_a_gpu_is_an_error() -> None:
    with pytest.raises(ValueError, match="pin_memory=True needs a GPU"):
        packer(pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_are_in_pinned_memory_if_a_gpu_is_used() -> None:
    batch = next(iter(packer(pin_memory=True)))
    assert all(tensor.is_pinned() for tensor in tensors(batch))


def test_every_tensor_is_created_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine without a GPU, with a stand-in for it."""
    pinned: list[int] = []
    empty = torch.empty

    def pinned_empty(*shape: Any, pin_memory: bool, **more: Any) -> torch.Tensor:
        assert pin_memory
        made = empty(*shape, **more)
        pinned.append(made.data_ptr())
        return made

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        pinned.append(made.data_ptr())
        return made

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = next(iter(packer(pin_memory=True)))
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors(batch)} == set(pinned)
    assert np.array_equal(batch["attention_mask"].sum(-1), [6, 6])
