"""Groups of records, and how each group becomes documents in any process: parse, check, tokenize, cut."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.errors import join_lines
from composer_packing.config.prepare import PrepareConfig
from composer_packing.data.chat_examples import ExampleTokenizer
from composer_packing.data.prepare.record_text import example_key, example_of, held_out, text_of
from composer_packing.data.prepare.records import BLOCK, Problem, Raw, Records
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.token_arrays import concatenate_ids, concatenate_loss_masks

RECORDS = 1000
"""Records in a group, at most. The record that makes the group as large as a block ends it, too."""

COUNTS = ("given", "long", "tokens_cut_off", "dropped")
"""What is counted of the records of a split::

    given           documents or examples, before any is cut, divided or dropped
    long            how many of them are longer than max_seq_len
    tokens_cut_off  tokens cut off the end of those that are kept
    dropped         examples in which nothing is to be learned, after cutting
"""


class RecordGroup(NamedTuple):
    """Records that a process works on at a time.

    Attributes:
        records: in order; a record that could not be read is a problem.
        val_share: share of the documents that is held out.
        size: bytes that the records take up in their files.
    """

    records: list[Raw | Problem]
    val_share: float
    size: int


class GroupDocuments(NamedTuple):
    """The documents of a group.

    Attributes:
        data: `(items,)`, all documents end to end: uint16 or uint32 ids, or uint8 of UTF-8 for texts that are not
            tokenized.
        lengths: int64 `(documents,)`, items of each, at least 1.
        loss_mask: uint8 `(items,)` for examples, 1 for a token that is to be learned; None for texts.
        held_out: bool `(documents,)`.
        counts: those of `COUNTS`, for each split.
        problems: why other records gave no document.
        repaired: how many records needed which repair.
        size: bytes that the records take up in their files.
    """

    data: NDArray[np.unsignedinteger[Any]]
    lengths: NDArray[np.int64]
    loss_mask: NDArray[np.uint8] | None
    held_out: NDArray[np.bool_]
    counts: dict[str, Counter[str]]
    problems: list[Problem]
    repaired: Counter[str]
    size: int


def record_groups(files: Sequence[Path], val_share: float, settings: PrepareConfig) -> Iterator[RecordGroup]:
    """All records of files in order. A group may hold records of several files."""
    text_field = None if settings.examples else settings.text_field
    records: list[Raw | Problem] = []
    record_bytes = 0
    bytes_before = 0  # of files that were read to their end since the last group
    for path in files:
        of_file, position = Records(path, text_field, settings.document_per), 0
        for record in of_file:
            records.append(record)
            record_bytes += len(record[-1])
            if record_bytes >= BLOCK or len(records) == RECORDS:
                before, position = position, of_file.position
                yield RecordGroup(records, val_share, bytes_before + position - before)
                records, record_bytes, bytes_before = [], 0, 0
        bytes_before += of_file.size - position
    yield RecordGroup(records, val_share, bytes_before)


class _Documents(NamedTuple):
    """Documents of texts or examples. `data`, `lengths` and `loss_mask` are those of `GroupDocuments`.

    Attributes:
        documents: int64 `(records,)`, how many documents a record gives; 0 if nothing in an example is to be learned.
        full_lengths: int64 `(records,)`, items of a record before cutting.
    """

    data: NDArray[Any]
    lengths: NDArray[np.int64]
    documents: NDArray[np.int64]
    full_lengths: NDArray[np.int64]
    loss_mask: NDArray[np.uint8] | None = None


class RecordTokenizer:
    """Makes documents of record groups. Each worker process gets a copy.

    Args:
        settings: what records are, and what happens to long documents.
        tokenizer: None for documents that stay texts.
    """

    def __init__(self, settings: PrepareConfig, tokenizer: TextTokenizer | None) -> None:
        self._settings, self._tokenizer, self._long = settings, tokenizer, settings.long
        self._max_seq_len = settings.max_seq_len or np.iinfo(np.int64).max
        self._example_tokenizer = ExampleTokenizer(tokenizer.named) if settings.examples and tokenizer else None

    def __call__(self, group: RecordGroup) -> GroupDocuments:
        """The documents of a group."""
        records: list[Raw] = []
        contents: list[Any] = []  # a text of each record, or the fields of an example
        problems: list[Problem] = []
        repaired = Counter[str]()
        for record in group.records:
            content = record if isinstance(record, Problem) else self._parse(record, repaired)
            if isinstance(content, Problem):
                problems.append(content)
            elif content is not None:
                assert isinstance(record, Raw)
                records.append(record)
                contents.append(content)
        if self._example_tokenizer is None:
            made, keys = self._tokenize_texts(contents), contents
        else:
            made, keys = self._tokenize_examples(records, contents, problems)
        of_record = np.repeat(np.arange(len(keys)), made.documents)
        for number in of_record[made.lengths == 0].tolist():
            value, cure = f"{contents[number]!r:.60}", "leave the text out"
            problems.append(Problem.at(_where(records[number]), "no token", value, cure))
        in_val = np.fromiter((held_out(key, group.val_share) for key in keys), np.bool_, len(keys))
        has_tokens = made.lengths > 0
        return GroupDocuments(
            made.data,
            made.lengths[has_tokens],
            made.loss_mask,
            in_val[of_record][has_tokens],
            {"train": self._count(made, ~in_val), "val": self._count(made, in_val)},
            problems,
            repaired,
            group.size,
        )

    def _parse(self, record: Raw, repaired: Counter[str]) -> Any:
        if self._example_tokenizer is None:
            return text_of(record, self._settings.text_field, repaired, self._settings.keep_blank)
        return example_of(record, repaired)

    def _tokenize_texts(self, texts: Sequence[str]) -> _Documents:
        if self._tokenizer is None:
            encoded = [text.encode() for text in texts]
            lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
            return _Documents(np.frombuffer(b"".join(encoded), np.uint8), lengths, np.ones_like(lengths), lengths)
        if self._long in ("cut", "chunk"):
            return self._cut_with_special_tokens(self._tokenizer, texts)
        tokens, full_lengths = self._tokenizer(texts)
        if self._long == "keep":
            return _Documents(tokens, full_lengths, np.ones_like(full_lengths), full_lengths)
        pieces = np.maximum(-(-full_lengths // self._max_seq_len), 1)
        lengths = np.full(pieces.sum(), self._max_seq_len)
        lengths[np.cumsum(pieces) - 1] = full_lengths - (pieces - 1) * self._max_seq_len
        return _Documents(tokens, lengths, pieces, full_lengths)

    def _cut_with_special_tokens(self, tokenizer: TextTokenizer, texts: Sequence[str]) -> _Documents:
        pieces = tokenizer.tokenize_in_pieces(texts, self._max_seq_len)
        special = tokenizer.num_special_tokens
        full_lengths = [sum(map(len, of_text)) - (len(of_text) - 1) * special for of_text in pieces]
        if self._long == "cut":
            pieces = [of_text[:1] for of_text in pieces]
        ids = [piece for of_text in pieces for piece in of_text]
        tokens, lengths = concatenate_ids("input_ids", ids, tokenizer.vocab_size)
        documents = np.fromiter(map(len, pieces), np.int64, len(pieces))
        return _Documents(tokens, lengths, documents, np.array(full_lengths, np.int64))

    def _tokenize_examples(
        self, records: Sequence[Raw], examples: Sequence[Mapping[str, Any]], problems: list[Problem]
    ) -> tuple[_Documents, list[str]]:
        """Documents of all examples that are sound, and their keys. The reasons of the others go into `problems`."""
        assert self._tokenizer is not None
        tokenized = self._examples_or_problems(records, examples)
        problems += [one for one in tokenized if isinstance(one, Problem)]
        good = [
            (example, one) for example, one in zip(examples, tokenized, strict=True) if not isinstance(one, Problem)
        ]
        full_lengths = np.fromiter((len(one["input_ids"]) for _, one in good), np.int64, len(good))
        cut = [{name: values[: self._max_seq_len] for name, values in one.items()} for _, one in good]
        # Nothing comes before the first token of an example, so no position predicts it.
        is_kept = np.fromiter((one["loss_mask"][1:].any() for one in cut), np.bool_, len(cut))
        kept = [one for one, is_it in zip(cut, is_kept, strict=True) if is_it]
        tokens, lengths = concatenate_ids("input_ids", [one["input_ids"] for one in kept], self._tokenizer.vocab_size)
        loss_mask = concatenate_loss_masks([one["loss_mask"] for one in kept], lengths)
        made = _Documents(tokens, lengths, is_kept.astype(np.int64), full_lengths, loss_mask)
        return made, [example_key(example) for example, _ in good]

    def _examples_or_problems(
        self, records: Sequence[Raw], examples: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any] | Problem]:
        """Tokenize all examples at once. If one of them is wrong, tokenize them one by one, to find out which."""
        assert self._example_tokenizer is not None
        try:
            return list(self._example_tokenizer(examples))
        except (TypeError, ValueError) as error:
            if len(examples) == 1:
                reason = "not an example"
                message = join_lines(str(error).removeprefix("example 0: "))
                return [Problem(reason, f"{_where(records[0])}: {reason}: {message}")]
        return [self._examples_or_problems([record], [one])[0] for record, one in zip(records, examples, strict=True)]

    def _count(self, made: _Documents, in_split: NDArray[np.bool_]) -> Counter[str]:
        """Counts of the records of a split."""
        is_dropped = made.documents == 0
        excess = np.maximum(made.full_lengths - self._max_seq_len, 0)
        cut_off = excess[in_split & ~is_dropped].sum() if self._long == "cut" else 0
        return Counter(
            given=int((in_split & (is_dropped | (made.full_lengths > 0))).sum()),
            long=int((in_split & (excess > 0)).sum()),
            tokens_cut_off=int(cut_off),
            dropped=int((in_split & is_dropped).sum()),
        )


def _where(record: Raw) -> str:
    return f"{record.path}:{record.line}"
