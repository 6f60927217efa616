"""The document store: documents in arrays that grow with what waits, not with what was read.

A source batch is copied to the free end of the arrays. A document that leaves is only taken out of the waiting order.
When the arrays are full, the documents that still wait are copied to the start of new arrays::

    tokens     [ aaa bb cccc dd ]   order b d
    a source batch ee f comes       no room
    tokens     [ bb dd ee f ........ ]   order b d e f

New arrays are at least twice as large as their content, so a token is copied less than once on average. What was
written in an array never changes. So the arrays and the order of a moment tell for good what waited then, and a
snapshot of them costs nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from composer_packing.packing.document_table import BLOCK, DOCUMENT, DocumentArrays, DocumentTable, Tokens
from composer_packing.packing.ingest import FreePart, copy_documents


class TokensState(TypedDict):
    """Saved tokens.

    Attributes:
        tokens: uint8, the bytes of all tokens: PyTorch cannot save every type of token.
        token_dtype: type of the tokens, as numpy calls it.
    """

    tokens: torch.Tensor
    token_dtype: str


class DocumentsState(TokensState):
    """Saved documents, in waiting order.

    Attributes:
        loss_mask: uint8 `(tokens,)`, or empty.
        documents: columns of the table by name, int64 `(documents,)` each, without `start`.
    """

    loss_mask: torch.Tensor
    documents: dict[str, torch.Tensor]


class DocumentStore:
    """Documents in waiting order.

    Args:
        token_dtype: type of the token array. `widen` makes it wider.
        loss_masked: documents have loss masks.
        longest_document: tokens of the longest document that may be stored.

    Attributes:
        documents: the arrays; entries of documents that have left are still there.
        order: int64 `(waiting,)`, indices into the table, in waiting order.
        shortest: no waiting document is shorter. It is a bound: a shorter document may have left.
        tokens_end: slots of the token array that are used.
        documents_end: entries of the table that are used.
    """

    def __init__(self, token_dtype: Any, loss_masked: bool, longest_document: int) -> None:
        self._longest_document = longest_document
        self._loss_masked = loss_masked
        self.documents = _empty_arrays(token_dtype, BLOCK, 0, loss_masked)
        self.order = np.empty(0, np.int64)
        self.shortest = longest_document
        self.tokens_end = 0
        self.documents_end = 0

    def widen(self, dtype: np.dtype[Any]) -> None:
        """Make sure that the token array can hold ids of this type."""
        types: tuple[Any, ...] = np.uint16, np.uint32, np.int64
        needed = next((wider for wider in types if np.can_cast(dtype, wider)), np.int64)
        tokens = self.documents.tokens
        if tokens.dtype.itemsize < np.dtype(needed).itemsize:
            self.documents = self.documents._replace(tokens=tokens.astype(needed))

    def free_part(self, num_tokens: int, num_documents: int) -> FreePart:
        """Make room for so many tokens and at most so many documents, and give the room."""
        if not self._has_room(num_tokens, num_documents):
            self._move_to_new_arrays(num_tokens, num_documents)
        documents, tokens_end = self.documents, self.tokens_end + num_tokens
        return FreePart(
            documents.tokens[self.tokens_end : tokens_end],
            documents.loss_mask[self.tokens_end : tokens_end],
            documents.table[self.documents_end :],
        )

    def take(self, num_tokens: int, num_documents: int, shortest: int, order: NDArray[np.int64]) -> None:
        """Take over what was written to the free part.

        Args:
            num_tokens: tokens written.
            num_documents: documents written.
            shortest: length of the shortest of these documents.
            order: the waiting order, with these documents.
        """
        self.tokens_end += num_tokens
        self.documents_end += num_documents
        self.shortest = min(self.shortest, shortest)
        self.order = order

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace all documents by saved ones.

        Args:
            state: a `DocumentsState`.
        """
        columns = {name: column.numpy() for name, column in state["documents"].items()}
        tokens, lengths = tokens_in(state), columns["length"]
        self.documents = _empty_arrays(tokens.dtype, len(tokens) + BLOCK, len(lengths), self._loss_masked)
        self.documents.tokens[: len(tokens)] = tokens
        self.documents.loss_mask[: len(tokens)] = state["loss_mask"].numpy()
        self.documents.table["start"] = np.cumsum(lengths) - lengths
        for name, column in columns.items():
            self.documents.table[name] = column
        self.order = np.arange(len(lengths))
        self.tokens_end, self.documents_end = len(tokens), len(lengths)
        self.shortest = int(lengths.min(initial=self._longest_document))

    def _has_room(self, num_tokens: int, num_documents: int) -> bool:
        tokens_end, documents_end = self.tokens_end + num_tokens, self.documents_end + num_documents
        return tokens_end + BLOCK <= len(self.documents.tokens) and documents_end <= len(self.documents.table)

    def _move_to_new_arrays(self, num_tokens: int, num_documents: int) -> None:
        """Copy the waiting documents to new arrays, larger ones if more than half of the old ones would be used."""
        self.tokens_end, self.documents_end = _num_tokens(self.documents.table, self.order), len(self.order)
        needed_slots, needed_entries = self.tokens_end + num_tokens, self.documents_end + num_documents
        slots, entries = len(self.documents.tokens), len(self.documents.table)
        if slots < 2 * needed_slots + BLOCK or entries < 2 * needed_entries:
            slots, entries = 4 * needed_slots + BLOCK, 4 * needed_entries
        self.documents = _copied(self.documents, self.order, slots, entries)
        self.order = np.arange(self.documents_end)
        lengths = self.documents.table["length"][: self.documents_end]
        self.shortest = int(lengths.min(initial=self._longest_document))


def documents_state(documents: DocumentArrays, order: NDArray[np.int64]) -> DocumentsState:
    """A copy of the documents in `order`, and of nothing else."""
    own = _copied(documents, order, _num_tokens(documents.table, order), len(order))
    return {
        **as_bytes(own.tokens),
        "loss_mask": torch.from_numpy(own.loss_mask),
        "documents": {
            name: torch.from_numpy(own.table[name].copy()) for name in DOCUMENT.names or () if name != "start"
        },
    }


def redeal_documents(states: Sequence[DocumentsState], rank: int, world_size: int) -> DocumentsState:
    """The documents of one rank after those that waited on all saved ranks are dealt out again.

    The first documents in line of all ranks come first, then the second ones, and so on.

    Args:
        states: of all ranks that saved.
        rank: the rank that resumes.
        world_size: number of ranks that resume.
    """
    names = states[0]["documents"]
    columns = {name: np.concatenate([state["documents"][name].numpy() for state in states]) for name in names}
    positions_in_line = np.concatenate([np.arange(len(state["documents"]["length"])) for state in states])
    dealt = np.argsort(positions_in_line, kind="stable")[rank::world_size]
    ends = np.cumsum(columns["length"])
    slices = [slice(ends[index] - columns["length"][index], ends[index]) for index in dealt]
    tokens = np.concatenate([tokens_in(state) for state in states])
    loss_mask = np.concatenate([state["loss_mask"].numpy() for state in states])
    kept = {name: column[dealt] for name, column in columns.items()} | {"serial": np.arange(len(dealt))}
    return {
        **as_bytes(np.concatenate([tokens[:0], *(tokens[each] for each in slices)])),
        "loss_mask": torch.from_numpy(np.concatenate([loss_mask[:0], *(loss_mask[each] for each in slices)])),
        "documents": {name: torch.from_numpy(column) for name, column in kept.items()},
    }


def as_bytes(tokens: NDArray[Any]) -> TokensState:
    """Tokens as a state holds them."""
    return {"tokens": torch.from_numpy(tokens.view(np.uint8)), "token_dtype": str(tokens.dtype)}


def tokens_in(state: Mapping[str, Any]) -> NDArray[Any]:
    """Tokens of a `TokensState`, as an array."""
    dtype: Any = np.dtype(state["token_dtype"])
    return state["tokens"].numpy().view(dtype)  # type: ignore[no-any-return]


def _num_tokens(table: DocumentTable, order: NDArray[np.int64]) -> int:
    return int(table["length"][order].sum())


def _empty_arrays(dtype: Any, slots: int, entries: int, loss_masked: bool) -> DocumentArrays:
    tokens: Tokens = np.empty(slots, dtype)
    return DocumentArrays(tokens, np.empty(slots if loss_masked else 0, np.uint8), np.empty(entries, DOCUMENT))


def _copied(documents: DocumentArrays, order: NDArray[np.int64], slots: int, entries: int) -> DocumentArrays:
    """The documents in `order` at the start of new arrays of this size."""
    copy = _empty_arrays(documents.tokens.dtype, slots, entries, loss_masked=len(documents.loss_mask) > 0)
    copy_documents(documents, order, copy)
    return copy
