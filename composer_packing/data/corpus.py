"""The built-in corpus: documentation, tokenized once into a cache folder and read from there.

A corpus is a folder that appears whole or not at all::

    docs-3f9a0c41d2b7/
      tokenizer.json        byte-level BPE, trained on the train split
      train.tokens.npy      ids of all documents end to end, uint16 or uint32
      train.offsets.npy     int64 (documents + 1,), where each begins
      val.tokens.npy        the held-out documents
      val.offsets.npy
      corpus.json           counts, for people

Its name holds a fingerprint of the contents of the files it was read from and of the settings, so that other
packages or another vocabulary give another folder, and the same ones give the same bytes.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from composer_packing.config import ConfigError
from composer_packing.data.documentation import documents, source_files
from composer_packing.source_batch import token_dtype

log = logging.getLogger(__name__)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens; the place is the id."""

SPECIAL_TOKEN_IDS = range(len(SPECIAL_TOKENS))
PAD_TOKEN_ID = SPECIAL_TOKENS.index("[PAD]")
MASK_TOKEN_ID = SPECIAL_TOKENS.index("[MASK]")

SPLITS = ("train", "val")

FORMAT = 1
"""Part of the fingerprint: raise it when the same input should give other bytes."""

VAL_PERCENT = 2
"""Share of documents that is held out."""


@dataclass(frozen=True)
class Corpus:
    """A finished corpus folder."""

    folder: Path

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the documents were tokenized with."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def vocab_size(self) -> int:
        """Ids of the documents lie below it; the tokenizer may have found fewer words than it was allowed."""
        return int(self.tokenizer.get_vocab_size())

    def split(self, name: str) -> tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.int64]]:
        """Ids of all documents of a split, memory-mapped, and int64 `(documents + 1,)` offsets.

        Raises:
            ConfigError: the files are not what was built.
        """
        try:
            tokens = np.load(self.folder / f"{name}.tokens.npy", mmap_mode="r")
            offsets = np.load(self.folder / f"{name}.offsets.npy")
            sound = offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) >= 0).all()
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise ConfigError(f"{self.folder}: is damaged ({error}); delete it and it is built again") from error
        if not sound:
            raise ConfigError(f"{self.folder}: is damaged (offsets and tokens differ); delete it and it is built again")
        return tokens, offsets


def open_or_build(cache_folder: Path, vocab_size: int) -> Corpus:
    """The corpus in `cache_folder`, built first where it is not there yet.

    Runs that ask at the same time wait for the one that builds. A build that was killed leaves a folder
    ending in `.building`, which the next build removes.

    Raises:
        OSError: the cache folder cannot be made or written.
    """
    files = source_files()
    folder = cache_folder / f"docs-{_fingerprint(files, vocab_size)}"
    if folder.exists():
        return Corpus(folder)
    cache_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                _build([path for _, path in files], vocab_size, building)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
            os.rename(building, folder)
    return Corpus(folder)


def _fingerprint(files: Sequence[tuple[str, Path]], vocab_size: int) -> str:
    fingerprint = hashlib.sha256(f"{FORMAT} {vocab_size} {VAL_PERCENT} {tokenizers.__version__}".encode())
    for name, path in files:
        fingerprint.update(f"\n{name} ".encode())
        fingerprint.update(hashlib.sha256(path.read_bytes()).digest())
    return fingerprint.hexdigest()[:12]


def _build(files: Sequence[Path], vocab_size: int, folder: Path) -> None:
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in documents(tqdm(files, desc="reading documentation", unit="file", mininterval=1.0)):
        texts[_split_of(text)].append(text)
    tokenizer = train_tokenizer(texts["train"], vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    counts = {}
    for split in SPLITS:
        lengths = _tokenize(tokenizer, texts[split], folder / f"{split}.tokens.npy", split)
        np.save(folder / f"{split}.offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        counts[split] = {"documents": len(lengths), "tokens": sum(lengths)}
    (folder / "corpus.json").write_text(json.dumps(counts | {"vocab_size": tokenizer.get_vocab_size()}, indent=2))
    log.info("built the corpus in %s: %s", folder, counts)


def _split_of(text: str) -> str:
    """`val` for a fixed share of texts, by a hash that does not change with their number or order."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "val" if int.from_bytes(digest[:8], "big") % 100 < VAL_PERCENT else "train"


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE that puts [CLS] before and [SEP] behind every document."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
        length=len(texts),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _tokenize(tokenizer: Tokenizer, texts: Sequence[str], path: Path, split: str) -> list[int]:
    """Write the ids of all texts to `path` and give the length of each in tokens."""
    dtype = token_dtype(tokenizer.get_vocab_size())
    ids, lengths = [], []
    step = 256
    for at in tqdm(range(0, len(texts), step), desc=f"tokenizing {split}", unit="batch", mininterval=1.0):
        for encoding in tokenizer.encode_batch_fast(texts[at : at + step]):
            ids.append(np.array(encoding.ids, dtype))
            lengths.append(len(encoding.ids))
    np.save(path, np.concatenate(ids) if ids else np.empty(0, dtype))
    return lengths
