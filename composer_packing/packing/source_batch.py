"""Source batches: what the loader hands the packer, as documents one by one or as one array of many documents.

A `FlatSourceBatch` holds many documents in one array. The packer reads it fastest, and a worker process hands it over
fastest. Three documents of 3, 0 and 2 tokens::

    tokens     11 12 13 31 32
    lengths    3 0 2
    numbers    7 8 9           only for keyed masks
    loss_mask  0 1 1 0 1       only for fine-tuning: 1 for a token to learn

`flat_source_batch` makes a flat source batch from documents. As the `collate_fn` of a DataLoader, it does so in the
worker processes.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.errors import one_line
from composer_packing.packing.document_table import LossMask
from composer_packing.packing.token_arrays import check_ids, concatenate_ids, concatenate_loss_masks


class FlatSourceBatch(NamedTuple):
    """Documents end to end.

    Attributes:
        tokens: integers `(tokens,)`, the ids of all documents; uint16 and uint32 are the fastest types.
        lengths: integers `(documents,)`, tokens of each document; a document of 0 tokens is passed over.
        numbers: integers `(documents,)`, the number that the source gives each document. Keyed masks need it.
        loss_mask: integers or bools `(tokens,)`, 1 for a token to learn and 0 for another. Only the objective `"sft"`
            has it.
    """

    tokens: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    numbers: NDArray[np.integer[Any]] | None = None
    loss_mask: NDArray[np.integer[Any] | np.bool_] | None = None


SourceBatch = FlatSourceBatch | Sequence[Mapping[str, Any]]
"""A flat source batch, or a document per item: `{"input_ids": ids}`. Keyed masks need `"document": number` as well, and
fine-tuning needs `"loss_mask": mask`.
"""


def flat_source_batch(
    documents: Sequence[Mapping[str, Any]],
    vocab_size: int | None = None,
    numbered: bool = False,
    loss_masked: bool = False,
) -> FlatSourceBatch:
    """Put documents end to end. As a `collate_fn`: `functools.partial(flat_source_batch, vocab_size=50368)`.

    Args:
        documents: `{"input_ids": ids}` each. Ids are a one-dimensional list, numpy array or CPU tensor of integers.
        vocab_size: all ids must lie below it. Ids are stored as uint16 or uint32 if `vocab_size` allows it. None for
            any id, stored as int64.
        numbered: keep the number of each document, `"document": number`, for keyed masks.
        loss_masked: keep the loss mask of each document, `"loss_mask": mask`, for fine-tuning. A mask has a 0 or 1 for
            each id of its document.

    Raises:
        TypeError: `documents`, a document, its number or its loss mask has another type, or a document has a loss mask
            that is not kept.
        ValueError: an id is negative, or not below `vocab_size` or 2**63; `vocab_size` is below 1; a loss mask is not
            as long as its document, or holds another value than 0 and 1.
    """
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"{vocab_size=} must be at least 1")
    try:
        ids = [document["input_ids"] for document in documents]
    except (TypeError, KeyError, IndexError) as error:
        raise TypeError(
            f"a source batch must be a list of {{'input_ids': ids}}, one per document; got {one_line(documents)}"
        ) from error
    tokens, lengths = concatenate_ids("input_ids", ids, vocab_size)
    if not loss_masked and any("loss_mask" in document for document in documents):
        raise TypeError("documents have a loss_mask, which is only kept with loss_masked=True or objective='sft'")
    return FlatSourceBatch(
        tokens,
        lengths,
        _numbers_of(documents) if numbered else None,
        _loss_masks_of(documents, lengths) if loss_masked else None,
    )


def validate_source_batch(
    source_batch: FlatSourceBatch, numbered: bool, loss_masked: bool
) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64], NDArray[np.int64], LossMask]:
    """Tokens, lengths, numbers and loss mask of a source batch, after checking their types and sizes.

    Args:
        source_batch: what the loader gave.
        numbered: the source batch must have numbers. Without it, zeros are returned for numbers.
        loss_masked: the source batch must have a loss mask. Without it, it must have none, and an empty loss mask is
            returned.

    Raises:
        TypeError: a part is not made of one-dimensional integers, or is missing, or there is an unwanted loss mask.
        ValueError: two parts do not have the same length, or the loss mask holds another value than 0 and 1.
    """
    if numbered and source_batch.numbers is None:
        raise TypeError(
            "keyed masks need the number of each document, and this FlatSourceBatch has no numbers; "
            "flat_source_batch(..., numbered=True) keeps them"
        )
    if loss_masked != (source_batch.loss_mask is not None):
        raise TypeError(
            "objective='sft' needs a loss mask, and this FlatSourceBatch has none; "
            "flat_source_batch(..., loss_masked=True) keeps it"
            if loss_masked
            else "this FlatSourceBatch has a loss mask, which is only used with objective='sft'"
        )
    wanted = ("tokens", "lengths", *["numbers"] * numbered, *["loss_mask"] * loss_masked)
    # A DataLoader that does not batch turns the arrays into tensors.
    parts = {name: np.asarray(getattr(source_batch, name)) for name in wanted}
    for name, part in parts.items():
        kinds = "iub" if name == "loss_mask" else "iu"
        if part.ndim != 1 or part.dtype.kind not in kinds or not part.dtype.isnative:
            what = f"{part.dtype} {part.shape}: {str(part)[:80]}"
            raise TypeError(f"FlatSourceBatch.{name} must be a one-dimensional array of integers; got {what}")
    tokens, lengths = parts["tokens"], parts["lengths"]
    numbers = parts["numbers"] if numbered else np.zeros(len(lengths), np.int64)
    loss_mask = parts.get("loss_mask", np.empty(0, np.uint8))
    if len(numbers) != len(lengths):
        raise ValueError(f"a FlatSourceBatch has {len(numbers)} numbers for {len(lengths)} documents")
    if loss_masked and len(loss_mask) != len(tokens):
        raise ValueError(f"a FlatSourceBatch has a loss mask of {len(loss_mask)} for {len(tokens)} tokens")
    if len(loss_mask):
        check_ids(int(loss_mask.min()), int(loss_mask.max()), 2, "values of a loss mask")
    return (
        tokens,
        np.ascontiguousarray(lengths, np.int64),
        np.ascontiguousarray(numbers, np.int64),
        np.ascontiguousarray(loss_mask, np.uint8),
    )


def _numbers_of(documents: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
    try:
        numbers = (operator.index(document["document"]) for document in documents)
        return np.fromiter(numbers, np.int64, len(documents))
    except (TypeError, KeyError, OverflowError) as error:
        wrong = next(
            number for number in (document.get("document") for document in documents) if not _is_number(number)
        )
        raise TypeError(
            f"keyed masks need the number of each document, below 2**63, as {{'input_ids': ids, 'document': number}}; "
            f"one document has {wrong!r:.80}"
        ) from error


def _loss_masks_of(documents: Sequence[Mapping[str, Any]], lengths: NDArray[np.int64]) -> LossMask:
    try:
        return concatenate_loss_masks([document["loss_mask"] for document in documents], lengths)
    except KeyError as error:
        raise TypeError(
            "fine-tuning needs the loss mask of each document, as {'input_ids': ids, 'loss_mask': mask}; one document "
            "has none"
        ) from error


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and -(2**63) <= operator.index(value) < 2**63
