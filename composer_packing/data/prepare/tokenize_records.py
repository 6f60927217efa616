"""Chunks of records, and what is done with each, in any process: parse, check, tokenize."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.data.prepare.record_text import held_out, text_of
from composer_packing.data.prepare.records import BLOCK, Problem, Raw, Records, problem
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.token_arrays import concatenate_ids

RECORDS = 1000
"""Records of a chunk, at most; it ends with the record that makes it as large as a block, too."""


class Chunk(NamedTuple):
    """Records that a process works on at a time.

    Attributes:
        records: in order; what could not even be read is among them.
        val_share: share of them that is held out.
        size: bytes that they took up where they were read.
    """

    records: list[Raw | Problem]
    val_share: float
    size: int


class ChunkDocuments(NamedTuple):
    """What has become of a chunk.

    Attributes:
        data: uint16 or uint32 ids of all documents end to end; of texts that are not tokenized uint8, their UTF-8.
        lengths: int64 `(documents,)`, at least 1 each.
        held_out: bool `(documents,)`.
        long: how many documents were longer than they may be, tokens of them that are cut off, chunks made of them.
        problems: why others are not among them.
        mended: how many had what mended.
        size: bytes that they took up where they were read.
    """

    data: NDArray[np.unsignedinteger[Any]]
    lengths: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    long: Counter[str]
    problems: list[Problem]
    mended: Counter[str]
    size: int


def chunks(files: Sequence[Path], val_share: float, text_field: str, document_per: str) -> Iterator[Chunk]:
    """All records of files in order; a chunk may have those of several files."""
    records: list[Raw | Problem] = []
    record_bytes = 0
    bytes_behind = 0  # of files that have been read to their end since the last chunk
    for path in files:
        of_file, position = Records(path, text_field, document_per), 0
        for record in of_file:
            records.append(record)
            record_bytes += len(record[-1])
            if record_bytes >= BLOCK or len(records) == RECORDS:
                before, position = position, of_file.position
                yield Chunk(records, val_share, bytes_behind + position - before)
                records, record_bytes, bytes_behind = [], 0, 0
        bytes_behind += of_file.size - position
    yield Chunk(records, val_share, bytes_behind)


class Tokenizing:
    """Makes documents of chunks. It can be handed to another process.

    Args:
        text_field: field with the text in a line of JSON.
        tokenizer: None where documents stay texts.
        long: keep, cut or chunk.
        max_seq_len: tokens that a document or piece may have; heeded unless `long` is keep.
    """

    def __init__(self, text_field: str, tokenizer: TextTokenizer | None, long: str, max_seq_len: int | None) -> None:
        self._text_field, self._tokenizer = text_field, tokenizer
        self._long, self._max_seq_len = long, max_seq_len

    def __call__(self, chunk: Chunk) -> ChunkDocuments:
        """The documents of a chunk."""
        places: list[Raw] = []
        texts: list[str] = []
        problems: list[Problem] = []
        long, mended = Counter[str](), Counter[str]()
        for record in chunk.records:
            text = record if isinstance(record, Problem) else text_of(record, self._text_field, mended)
            if isinstance(text, Problem):
                problems.append(text)
            elif text is not None:
                assert isinstance(record, Raw)
                places.append(record)
                texts.append(text)
        data, lengths, pieces = self._documents(texts, long)
        of_text = np.repeat(np.arange(len(texts)), pieces)
        for number in of_text[lengths == 0].tolist():
            where, value = f"{places[number].path}:{places[number].line}", f"{texts[number]!r:.60}"
            problems.append(problem(where, "no token", value, "leave out what the tokenizer makes nothing of"))
        is_val = np.fromiter((held_out(text, chunk.val_share) for text in texts), np.bool_, len(texts))[of_text]
        there = lengths > 0
        return ChunkDocuments(data, lengths[there], is_val[there], long, problems, mended, chunk.size)

    def _documents(
        self, texts: Sequence[str], long: Counter[str]
    ) -> tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.int64], NDArray[np.int64]]:
        """Ids or UTF-8 end to end, the lengths, and how many documents each text gives; counts in `long`."""
        if self._tokenizer is None:
            encoded = [text.encode() for text in texts]
            lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
            return np.frombuffer(b"".join(encoded), np.uint8), lengths, np.ones(len(texts), np.int64)
        if self._long == "keep" or self._max_seq_len is None:
            tokens, lengths = self._tokenizer(texts)
            return tokens, lengths, np.ones(len(texts), np.int64)  # type: ignore[return-value]
        pieces = self._tokenizer.tokenize_in_pieces(texts, self._max_seq_len)
        for of_one in pieces:
            if len(of_one) > 1:
                long["documents"] += 1
                if self._long == "chunk":
                    long["chunks"] += len(of_one)
                else:
                    whole = sum(map(len, of_one)) - (len(of_one) - 1) * self._tokenizer.num_special_tokens
                    long["tokens_cut_off"] += whole - len(of_one[0])
                    del of_one[1:]
        ids = [piece for of_one in pieces for piece in of_one]
        tokens, lengths = concatenate_ids("input_ids", ids, self._tokenizer.vocab_size)
        return tokens, lengths, np.fromiter(map(len, pieces), np.int64, len(pieces))  # type: ignore[return-value]
