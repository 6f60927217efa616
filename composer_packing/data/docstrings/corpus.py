"""The built-in corpus: docstrings written as JSON lines and prepared as anyone's data is.

Folders in the cache appear whole or not at all::

    docs-3f9a0c41d2b7/            what was read
      docs/train.jsonl            {"text": docstring}
      docs/val.jsonl              the docstrings that are held out
      examples/train.jsonl        {"prompt": signature, "response": docstring}
      examples/val.jsonl          examples whose docstring is held out
      tokenizer/                  byte-level BPE, trained on docs/train.jsonl
    docs-3f9a0c41d2b7-256/        shards of the docstrings, none longer than 256 tokens
    examples-3f9a0c41d2b7-256/    shards of the examples, with loss masks

The names hold a fingerprint of the settings and of the files that were read. Other packages or another vocabulary give
another folder, and the same ones give the same bytes.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tqdm import tqdm

from composer_packing.common.folders import build_once
from composer_packing.config.prepare import PrepareConfig
from composer_packing.data.docstrings.extract import documented, signature_of, source_files
from composer_packing.data.prepare.pipeline import SPLITS, write_shards
from composer_packing.data.prepare.record_text import held_out
from composer_packing.data.prepare.stats import TOKENIZER
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, load_tokenizer, train_tokenizer

log = logging.getLogger(__name__)

FORMAT = 3
"""Part of the fingerprint. Raise it when the same files should give different bytes."""

VAL_SHARE = 0.02
"""Share of the docstrings that is held out."""

KINDS = ("docs", "examples")


def prepare_docstrings(cache_folder: Path, vocab_size: int, max_seq_len: int, has_examples: bool = False) -> Path:
    """The folder with the prepared corpus. The first run that needs the folder fills it.

    A docstring that is longer than `max_seq_len` is split into several documents. An example is cut at that length,
    and dropped if nothing of its response is left.

    Args:
        cache_folder: holds such folders.
        vocab_size: entries of the tokenizer; fewer if the docstrings have fewer words.
        max_seq_len: tokens that a document has at most.
        has_examples: prepare examples for fine-tuning instead of docstrings.

    Raises:
        ConfigError: no example is left after cutting.
        OSError: the cache folder cannot be made or written.
    """
    files = source_files()
    fingerprint = _fingerprint(files, vocab_size)
    source = cache_folder / f"docs-{fingerprint}"
    build_once(source, lambda folder: _extract(folder, [path for _, path in files], vocab_size))
    kind = KINDS[has_examples]
    prepared = cache_folder / f"{kind}-{fingerprint}-{max_seq_len}"
    build_once(prepared, lambda folder: _prepare(folder, source, kind, max_seq_len))
    return prepared


def _fingerprint(files: Sequence[tuple[str, Path]], vocab_size: int) -> str:
    fingerprint = hashlib.sha256(f"{FORMAT} {vocab_size} {VAL_SHARE} {tokenizers.__version__}".encode())
    for name, path in files:
        fingerprint.update(f"\n{name} ".encode())
        fingerprint.update(hashlib.sha256(path.read_bytes()).digest())
    return fingerprint.hexdigest()[:12]


def _extract(folder: Path, files: Sequence[Path], vocab_size: int) -> None:
    """Write docstrings, examples and the tokenizer."""
    lines: dict[tuple[str, str], list[str]] = {(kind, split): [] for kind in KINDS for split in SPLITS}
    texts = []
    for text, node in documented(tqdm(files, desc="reading docstrings", unit="file", mininterval=1.0)):
        split = "val" if held_out(text, VAL_SHARE) else "train"
        lines["docs", split].append(json.dumps({"text": text}))
        if signature := signature_of(node):
            lines["examples", split].append(json.dumps({"prompt": f"{signature}\n", "response": text}))
        if split == "train":
            texts.append(text)
    for (kind, split), some in lines.items():
        (folder / kind).mkdir(exist_ok=True)
        _file(folder, kind, split).write_text("".join(f"{line}\n" for line in some))
    TextTokenizer(fast_tokenizer(train_tokenizer(texts, vocab_size))).save(folder / TOKENIZER)


def _prepare(folder: Path, source: Path, kind: str, max_seq_len: int) -> None:
    """Make shards of what `_extract` wrote."""
    is_examples = kind == "examples"
    settings = PrepareConfig(
        examples=is_examples,
        long="cut" if is_examples else "split",
        max_seq_len=max_seq_len,
        on_error="skip",
        keep_blank=True,
        processes=1,  # which is done before others would have started
    )
    tokenizer = load_tokenizer(str(source / TOKENIZER))
    tokenizer.save(folder / TOKENIZER)
    train, val = ([_file(source, kind, split)] for split in SPLITS)
    stats = write_shards(folder, train, val, settings, tokenizer)
    log.info("prepared %s of the docstrings: %s", kind, {split: stats[split]["documents"] for split in SPLITS})


def _file(folder: Path, kind: str, split: str) -> Path:
    return folder / kind / f"{split}.jsonl"
