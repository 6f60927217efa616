"""Source batches: what the loader hands the packer, document by document or flat.

A `FlatSourceBatch` holds many documents in one token array. It costs the packer next to nothing, and a worker process
little to hand over. Three documents of 3, 0 and 2 tokens::

    tokens    11 12 13 31 32
    lengths   3 0 2
    numbers   7 8 9        for keyed masks only
    loss_mask 0 1 1 0 1    for fine-tuning only: which tokens are to be learned

`flat_source_batch` makes one from documents. As `collate_fn` of a DataLoader it runs in the workers.
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
    """Many documents in one token array.

    Attributes:
        tokens: integers of any type `(tokens,)`: the ids of all documents, one document after the other.
        lengths: integers `(documents,)`: tokens of each document. Empty documents are skipped.
        numbers: integers `(documents,)`: the source's number for each document. None without keyed masks.
        loss_mask: bool or integers `(tokens,)`: 1 for a token that is to be learned, else 0. None unless the objective
            is `"sft"`.
    """

    tokens: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    numbers: NDArray[np.integer[Any]] | None = None
    loss_mask: NDArray[np.integer[Any] | np.bool_] | None = None


SourceBatch = FlatSourceBatch | Sequence[Mapping[str, Any]]
"""A flat source batch, or a list with `{"input_ids": ids}` for each document. With keyed masks a document also has
`"document": number`, for fine-tuning also `"loss_mask": mask`.
"""


def flat_source_batch(
    documents: Sequence[Mapping[str, Any]],
    vocab_size: int | None = None,
    numbered: bool = False,
    loss_masked: bool = False,
) -> FlatSourceBatch:
    """Make a flat source batch of documents.

    As a `collate_fn`: `functools.partial(flat_source_batch, vocab_size=50368)`.

    Args:
        documents: each `{"input_ids": ids}`; the ids are a list, numpy array or CPU tensor of integers,
            one-dimensional.
        vocab_size: all ids must lie below this number; they are stored in 16 or 32 bits if these suffice. None for any
            id, stored as int64.
        numbered: keep `"document": number` of each document, for keyed masks.
        loss_masked: keep `"loss_mask": mask` of each document, for fine-tuning: 0 or 1 for each of its ids.

    Raises:
        TypeError: `documents`, a document, its number or its mask is of another kind, or documents have masks that
        would
            not be kept.
        ValueError: an id is negative, or not below `vocab_size` or 2**63; `vocab_size` is below 1; the length of a mask
            differs from its document's, or a mask holds values other than 0 and 1.
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
        raise TypeError(
            "documents have a loss_mask, which would not be kept; give loss_masked=True, or the packer objective='sft'"
        )
    return FlatSourceBatch(
        tokens,
        lengths,
        _numbers(documents) if numbered else None,
        _loss_mask(documents, lengths) if loss_masked else None,
    )


def validate_source_batch(
    source_batch: FlatSourceBatch, numbered: bool, loss_masked: bool
) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64], NDArray[np.int64], LossMask]:
    """The parts of a source batch after a check: tokens, lengths, numbers and loss mask.

    Args:
        source_batch: what the loader gave.
        numbered: the source batch must have numbers; otherwise they are returned as zeros.
        loss_masked: the source batch must have a loss mask; otherwise it must not, and the mask is returned empty.

    Raises:
        TypeError: a part is missing or is not a one-dimensional array of integers, or there is an unwanted loss mask.
        ValueError: parts that should have the same length do not, or a mask holds values other than 0 and 1.
    """
    if numbered and source_batch.numbers is None:
        raise TypeError(
            "keyed masks need the number of each document, but this FlatSourceBatch has no numbers; "
            "flat_source_batch(..., numbered=True) keeps them"
        )
    if loss_masked != (source_batch.loss_mask is not None):
        raise TypeError(
            "objective='sft' needs a loss mask, but this FlatSourceBatch has none; "
            "flat_source_batch(..., loss_masked=True) keeps it"
            if loss_masked
            else "this FlatSourceBatch has a loss mask, which only objective='sft' uses"
        )
    # The parts may be tensors: a DataLoader that does not batch converts arrays to tensors.
    wanted = ("tokens", "lengths", *["numbers"] * numbered, *["loss_mask"] * loss_masked)
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


def _numbers(documents: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
    try:
        numbers = (operator.index(document["document"]) for document in documents)
        return np.fromiter(numbers, np.int64, len(documents))
    except (TypeError, KeyError, OverflowError) as error:
        wrong = next(
            number for number in (document.get("document") for document in documents) if not _fits_int64(number)
        )
        raise TypeError(
            f"keyed masks need the number of each document, below 2**63, as {{'input_ids': ids, 'document': number}}; "
            f"one document has {wrong!r:.80}"
        ) from error


def _loss_mask(documents: Sequence[Mapping[str, Any]], lengths: NDArray[np.int64]) -> LossMask:
    try:
        return concatenate_loss_masks([document["loss_mask"] for document in documents], lengths)
    except KeyError as error:
        raise TypeError(
            "fine-tuning needs the loss mask of each document, as {'input_ids': ids, 'loss_mask': mask}; one document "
            "has no mask"
        ) from error


def _fits_int64(value: Any) -> bool:
    return hasattr(value, "__index__") and -(2**63) <= operator.index(value) < 2**63
