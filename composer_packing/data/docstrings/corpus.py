"""The built-in corpus: documentation, tokenized once into a cache folder and read from there.

A corpus is a folder that appears whole or not at all::

    docs-3f9a0c41d2b7/
      tokenizer.json        byte-level BPE, trained on the train split
      train.tokens.npy      ids of all documents end to end, uint16 or uint32
      train.offsets.npy     int64 (documents + 1,), where each begins
      val.tokens.npy        the held-out documents
      val.offsets.npy
      corpus.json           counts, for people

A second folder, `examples-3f9a0c41d2b7`, holds examples for fine-tuning, tokenized by the same tokenizer, with
`train.loss_mask.npy` and `val.loss_mask.npy`. Texts that one folder holds out are held out by the other.

Its name holds a fingerprint of the contents of the files it was read from and of the settings, so that other
packages or another vocabulary give another folder, and the same ones give the same bytes.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from composer_packing.common.errors import ConfigError
from composer_packing.common.folders import build_once
from composer_packing.data.array_documents import DocumentDataset
from composer_packing.data.chat_examples import ExampleTokenizer
from composer_packing.data.docstrings.extract import documents, examples, source_files
from composer_packing.data.prepare.record_text import held_out
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, train_tokenizer
from composer_packing.packing.token_arrays import token_dtype

log = logging.getLogger(__name__)

Item = TypeVar("Item")

SPLITS = ("train", "val")

FORMAT = 2
"""Part of the fingerprint: raise it when the same input should give other bytes."""

VAL_SHARE = 0.02
"""Share of documents that is held out."""


@dataclass(frozen=True)
class Corpus:
    """A finished corpus folder.

    Attributes:
        folder: where it is.
        has_examples: it holds examples with a loss mask.
    """

    folder: Path
    has_examples: bool = False

    @property
    def tokenizer_file(self) -> Path:
        """Where the tokenizer is kept."""
        return self.folder / "tokenizer.json"

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer the documents were tokenized with; it may have found fewer words than it was allowed."""
        return TextTokenizer(fast_tokenizer(Tokenizer.from_file(str(self.tokenizer_file))))

    def split(self, name: str) -> tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.int64], NDArray[np.uint8] | None]:
        """Ids of all documents of a split, int64 `(documents + 1,)` offsets, and of examples the loss mask.

        Ids and mask are memory-mapped.

        Raises:
            ConfigError: the files are not what was built.
        """
        try:
            tokens = np.load(self.folder / f"{name}.tokens.npy", mmap_mode="r")
            offsets = np.load(self.folder / f"{name}.offsets.npy")
            loss_mask = np.load(self.folder / f"{name}.loss_mask.npy", mmap_mode="r") if self.has_examples else None
            sound = offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) >= 0).all()
            sound &= loss_mask is None or len(loss_mask) == len(tokens)
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise ConfigError(f"{self.folder}: is damaged ({error}); delete it and it is built again") from error
        if not sound:
            raise ConfigError(f"{self.folder}: is damaged (its files differ); delete it and it is built again")
        return tokens, offsets, loss_mask

    def documents(self, split: str, max_seq_len: int) -> DocumentDataset:
        """A split as a dataset, no document of it longer than `max_seq_len`.

        Raises:
            ConfigError: as `split` says, or nothing is left of all examples.
        """
        tokens, offsets, loss_mask = self.split(split)
        dataset = DocumentDataset(tokens, offsets, max_seq_len, loss_mask)
        if dataset.num_dropped and not len(dataset):
            raise ConfigError(
                f"max_seq_len={max_seq_len}: the first so many tokens of none of {dataset.num_dropped} examples of "
                f"{split} hold anything of a response; raise it"
            )
        return dataset


def open_or_build(cache_folder: Path, vocab_size: int, has_examples: bool = False) -> Corpus:
    """The corpus in `cache_folder`, built first where it is not there yet.

    Runs that ask at the same time wait for the one that builds. A build that was killed leaves a folder
    ending in `.building`, which the next build removes.

    Args:
        cache_folder: where corpora are kept.
        vocab_size: size of the tokenizer, at most.
        has_examples: open the one with examples for fine-tuning.

    Raises:
        OSError: the cache folder cannot be made or written.
    """
    named = source_files()
    fingerprint, files = _fingerprint(named, vocab_size), [path for _, path in named]
    docs = Corpus(cache_folder / f"docs-{fingerprint}")
    build_once(docs.folder, partial(_build_documents, files, vocab_size))
    if not has_examples:
        return docs
    of_examples = Corpus(cache_folder / f"examples-{fingerprint}", has_examples=True)
    build_once(of_examples.folder, partial(_build_examples, files, docs.tokenizer_file))
    return of_examples


def _fingerprint(files: Sequence[tuple[str, Path]], vocab_size: int) -> str:
    fingerprint = hashlib.sha256(f"{FORMAT} {vocab_size} {VAL_SHARE} {tokenizers.__version__}".encode())
    for name, path in files:
        fingerprint.update(f"\n{name} ".encode())
        fingerprint.update(hashlib.sha256(path.read_bytes()).digest())
    return fingerprint.hexdigest()[:12]


def _build_documents(files: Sequence[Path], vocab_size: int, folder: Path) -> None:
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in documents(tqdm(files, desc="reading documentation", unit="file", mininterval=1.0)):
        texts[_split_of(text)].append(text)
    tokenizer = train_tokenizer(texts["train"], vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    counts, dtype = {}, token_dtype(tokenizer.get_vocab_size())
    for split in SPLITS:
        ids = [
            np.array(encoding.ids, dtype)
            for some in _chunks(texts[split], f"tokenizing {split}")
            for encoding in tokenizer.encode_batch_fast(some)
        ]
        counts[split] = _save(folder, split, ids)
    _describe(folder, counts | {"vocab_size": tokenizer.get_vocab_size()})


def _build_examples(files: Sequence[Path], tokenizer_file: Path, folder: Path) -> None:
    pairs: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for signature, text in examples(tqdm(files, desc="reading signatures", unit="file", mininterval=1.0)):
        pairs[_split_of(text)].append({"prompt": f"{signature}\n", "response": text})
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    tokenizer = fast_tokenizer(Tokenizer.from_file(str(tokenizer_file)))
    tokenize, dtype = ExampleTokenizer(tokenizer), token_dtype(len(tokenizer))
    counts = {}
    for split in SPLITS:
        made = [one for some in _chunks(pairs[split], f"tokenizing {split} examples") for one in tokenize(some)]
        counts[split] = _save(folder, split, [one["input_ids"].astype(dtype) for one in made])
        np.save(folder / f"{split}.loss_mask.npy", _joined([one["loss_mask"] for one in made], np.uint8))
    _describe(folder, counts)


def _chunks(items: Sequence[Item], what: str, size: int = 256) -> Iterator[Sequence[Item]]:
    """As many items as are tokenized at once, with a progress bar."""
    for at in tqdm(range(0, len(items), size), desc=what, unit="batch", mininterval=1.0):
        yield items[at : at + size]


def _save(folder: Path, split: str, ids: Sequence[NDArray[Any]]) -> dict[str, int]:
    """Write the documents of a split and count them."""
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in ids])]).astype(np.int64)
    np.save(folder / f"{split}.tokens.npy", _joined(ids, ids[0].dtype if ids else np.uint16))
    np.save(folder / f"{split}.offsets.npy", offsets)
    return {"documents": len(ids), "tokens": int(offsets[-1])}


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])


def _describe(folder: Path, counts: dict[str, Any]) -> None:
    (folder / "corpus.json").write_text(json.dumps(counts, indent=2))
    log.info("built the corpus in %s: %s", folder, counts)


def _split_of(text: str) -> str:
    return "val" if held_out(text, VAL_SHARE) else "train"
