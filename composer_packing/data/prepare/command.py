"""Tokenize texts into MDS shards: `python -m composer_packing.prepare INPUT... --tokenizer NAME --out FOLDER`."""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tqdm.contrib.logging import logging_redirect_tqdm

from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError, join_lines
from composer_packing.common.folders import build_once
from composer_packing.config.sources import DOCUMENT_PER, ON_ERROR
from composer_packing.data.prepare.files import check_apart, find_files
from composer_packing.data.prepare.pipeline import LONG, Preparing, write_shards
from composer_packing.data.prepare.stats import TOKENIZER
from composer_packing.data.prepare.tokenizer_sample import sample_texts
from composer_packing.data.tokenizer import (
    SPECIAL_TOKENS,
    TextTokenizer,
    fast_tokenizer,
    load_tokenizer,
    train_tokenizer,
)


def main(arguments: list[str]) -> int:
    """Run the command; the exit code is 0, or 2 for what the user can mend."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("composer_packing").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _terminated)
    start = time.monotonic()
    try:
        with logging_redirect_tqdm():
            stats = prepare(options)
        print(closing_line(options.out, stats, time.monotonic() - start), flush=True)
    except ConfigError as error:
        print(f"prepare: {join_lines(error)}", file=sys.stderr)  # a name may hold a line end
        return 2
    except OSError as error:
        print(f"prepare: {error.filename or options.out}: {error.strerror or error}; mend that", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Build the folder; returns what its `stats.json` holds.

    Raises:
        ConfigError: something will not do, or the folder is there already.
        OSError: the folder cannot be made or written.
    """
    names = ("val_share", "text_field", "document_per", "on_error", "long", "max_seq_len", "processes")
    given = {name: getattr(options, name) for name in names}
    settings = Preparing(**{name: value for name, value in given.items() if value is not None})
    train = find_files(options.inputs)
    val = find_files(options.val) if options.val else []
    check_apart(train, val)
    if is_address(options.out) or not options.out.isprintable():
        raise ConfigError(f"out={options.out!r}: is no name of a folder here; give one, and copy it where it should be")
    smallest = 256 + len(SPECIAL_TOKENS)
    if options.train_tokenizer is not None and options.train_tokenizer < smallest:
        raise ConfigError(
            f"train_tokenizer={options.train_tokenizer}: must be at least {smallest}, for bytes and special tokens"
        )
    out, stats = Path(os.path.abspath(options.out)), dict[str, Any]()

    def build(folder: Path) -> None:
        if options.tokenizer is not None:
            tokenizer = load_tokenizer(options.tokenizer)
        else:
            texts = sample_texts(train, val, settings)
            tokenizer = TextTokenizer(fast_tokenizer(train_tokenizer(texts, options.train_tokenizer)))
        tokenizer.save(folder / TOKENIZER)
        # From here on work is shared out over processes, or one is all that was asked for.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        stats.update(write_shards(folder, train, val, settings, tokenizer))

    build_once(out, build)
    if not stats:
        raise ConfigError(f"out={options.out}: exists already; give another, or delete it")
    return stats


def closing_line(out: str, stats: Mapping[str, Any], seconds: float) -> str:
    """What was made, in one line."""
    splits = {split: stats[split] for split in ("train", "val")}
    tokens = sum(split["tokens"] for split in splits.values())
    parts = [
        *(f"{name} {split['documents']:,} documents, {split['tokens']:,} tokens" for name, split in splits.items()),
        f"skipped {_counted(stats['skipped'])}",
        f"mended {_counted(stats['mended'])}",
        f"{seconds:.1f} s, {tokens / seconds:,.0f} tokens/s",
    ]
    if long := stats["long"]["documents"]:
        what = {
            "cut": f"{stats['long']['tokens_cut_off']:,} tokens cut off",
            "chunk": f"{stats['long']['chunks']:,} chunks",
        }
        parts.insert(2, f"long {long:,} documents, {what[stats['settings']['long']]}")
    return f"{out}: {'; '.join(parts)}"


def _counted(counts: Mapping[str, int]) -> str:
    if not counts:
        return "none"
    return f"{sum(counts.values()):,} ({', '.join(f'{reason} {count:,}' for reason, count in counts.items())})"


def _terminated(number: int, frame: object) -> NoReturn:
    """Leave as an error does, so that what is half done is removed."""
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m composer_packing.prepare",
        description="Tokenize texts into MDS shards, on all cores. The folder appears whole or not at all.",
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".txt, .jsonl (or .gz, .zst of these), .parquet, a folder of them, "
        "or a folder that save_to_disk of Hugging Face datasets wrote",
    )
    add("--out", required=True, metavar="FOLDER", help="folder that is made: train, val, tokenizer and stats.json")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--tokenizer", metavar="NAME", help="folder that save_pretrained wrote, or a name on the hub")
    either.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE of that many entries on the train split instead",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--val-share", type=float, metavar="SHARE", help="share of documents held out (0.01)")
    either.add_argument("--val", nargs="+", metavar="INPUT", help="documents to evaluate on; none is held out then")
    add("--text-field", metavar="NAME", help="field or column with the text (text)")
    add("--document-per", choices=DOCUMENT_PER, help="what a document of a .txt is (file)")
    add("--long", choices=LONG, help="what becomes of documents longer than --max-seq-len (keep)")
    add("--max-seq-len", type=int, metavar="TOKENS", help="tokens of a document at most, for cut and chunk")
    add("--on-error", choices=ON_ERROR, help="what is done about a record that cannot be read (stop)")
    add("--processes", type=int, metavar="N", help="processes that share the work (one per core)")
    return parser
