"""What the loader hands the packer: documents one by one, or many of them in one token array.

A `FlatSourceBatch` costs the packer next to nothing, and a worker process little to hand over. Three
documents of 3, 0 and 2 tokens::

    tokens    11 12 13 31 32
    lengths   3 0 2
    numbers   7 8 9        for keyed masks only
    loss_mask 0 1 1 0 1    for fine-tuning only: which tokens are to be learned

`flat_source_batch` makes one from documents: give it to a DataLoader as `collate_fn`, and the work is done in
its workers.
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
        tokens: uint16, uint32 or any other integers, `(tokens,)`: ids of all documents.
        lengths: integers `(documents,)`, in tokens; 0 is passed over.
        numbers: integers `(documents,)`, what the source calls each; None where keyed masks are not drawn.
        loss_mask: uint8, bool or other integers, `(tokens,)`: 1 for a token that is to be learned, 0 for others; None
            where the objective is not `"sft"`.
    """

    tokens: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    numbers: NDArray[np.integer[Any]] | None = None
    loss_mask: NDArray[np.integer[Any] | np.bool_] | None = None


SourceBatch = FlatSourceBatch | Sequence[Mapping[str, Any]]
"""A flat one, or `{"input_ids": ids}` per document, with `"document": number` for keyed masks, and with
`"loss_mask": mask` for fine-tuning.
"""


def flat_source_batch(
    documents: Sequence[Mapping[str, Any]],
    vocab_size: int | None = None,
    numbered: bool = False,
    loss_masked: bool = False,
) -> FlatSourceBatch:
    """Put documents end to end; a `collate_fn`, as `functools.partial(flat_source_batch, vocab_size=50368)`.

    Args:
        documents: `{"input_ids": ids}` each; ids are a list, numpy array or CPU tensor of integers,
            one-dimensional.
        vocab_size: ids lie below it and are stored in 16 or 32 bits accordingly; None for any id, as int64.
        numbered: each has `"document": number` too, which is kept, for keyed masks.
        loss_masked: each has `"loss_mask": mask` too, which is kept, for fine-tuning: 0 or 1 for each of its ids.

    Raises:
        TypeError: `documents`, a document, its number or its mask is something else, or there are masks that are not to
            be kept.
        ValueError: an id is negative, or not below `vocab_size` or 2**63; `vocab_size` is not at least 1; a mask is
            not as long as its document, or holds something else.
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
            "documents have a loss_mask, which is not kept here: it takes loss_masked=True, or objective='sft'"
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
    """The parts of a source batch, if they are what they should be; zeros for numbers that are not wanted.

    Args:
        source_batch: what the loader gave.
        numbered: it must have numbers.
        loss_masked: it must have a loss mask; the one that is given is empty otherwise.

    Raises:
        TypeError: a part is not made of one-dimensional integers, or is missing, or there is a mask that is not heeded.
        ValueError: parts are not equally long where they should be, or a mask holds something else than 0 and 1.
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
            else "this FlatSourceBatch has a loss mask, which no objective but 'sft' heeds"
        )
    # A DataLoader that does not batch makes tensors of them.
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
            number for number in (document.get("document") for document in documents) if not _is_number(number)
        )
        raise TypeError(
            f"keyed masks need the number of each document, below 2**63, as {{'input_ids': ids, 'document': number}}; "
            f"got {wrong!r:.80} for one"
        ) from error


def _loss_mask(documents: Sequence[Mapping[str, Any]], lengths: NDArray[np.int64]) -> LossMask:
    try:
        return concatenate_loss_masks([document["loss_mask"] for document in documents], lengths)
    except KeyError as error:
        raise TypeError(
            "fine-tuning needs the loss mask of each document, as {'input_ids': ids, 'loss_mask': mask}; one has none"
        ) from error


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and -(2**63) <= operator.index(value) < 2**63
