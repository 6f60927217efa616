"""The command that makes MDS shards: `python -m composer_packing.prepare INPUT... --tokenizer NAME --out FOLDER`."""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from tqdm.contrib.logging import logging_redirect_tqdm

from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError, join_lines
from composer_packing.common.folders import build_once
from composer_packing.config.limits import OneOf, limited_keys
from composer_packing.config.prepare import PrepareConfig
from composer_packing.data.prepare.files import EXAMPLE_SUFFIXES, SUFFIXES, check_apart, find_files
from composer_packing.data.prepare.pipeline import SPLITS, write_shards
from composer_packing.data.prepare.stats import TOKENIZER
from composer_packing.data.prepare.tokenize_records import COUNTS
from composer_packing.data.prepare.tokenizer_sample import sample_texts
from composer_packing.data.tokenizer import (
    SPECIAL_TOKENS,
    TextTokenizer,
    fast_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

HELP = {
    name: text
    for name, hint in get_type_hints(PrepareConfig, include_extras=True).items()
    for text in getattr(hint, "__metadata__", ())
    if isinstance(text, str)
}
"""Settings that are options of the command, and what their help says."""


def main(arguments: list[str]) -> int:
    """Run the command. The exit code is 0, 2 for an error that the user can fix, or 130 after Ctrl-C."""
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
        print(f"prepare: {join_lines(error)}", file=sys.stderr)  # a file name may hold a line end
        return 2
    except OSError as error:
        print(f"prepare: {error.filename or options.out}: {error.strerror or error}; fix that", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Build the folder; returns the contents of its `stats.json`.

    Raises:
        ConfigError: an option is not allowed, an input cannot be read, or the folder exists already.
        OSError: the folder cannot be made or written.
    """
    settings = PrepareConfig(**{name: getattr(options, name) for name in HELP})
    suffixes = EXAMPLE_SUFFIXES if settings.examples else SUFFIXES
    train = find_files(options.inputs, suffixes)
    val = find_files(options.val, suffixes) if options.val else []
    check_apart(train, val)
    if is_address(options.out) or not options.out.isprintable():
        raise ConfigError(f"out={options.out!r}: must be a folder on this machine; copy it elsewhere afterwards")
    smallest = 256 + len(SPECIAL_TOKENS)
    if options.train_tokenizer is not None and options.train_tokenizer < smallest:
        raise ConfigError(
            f"train_tokenizer={options.train_tokenizer}: must be at least {smallest}, for bytes and special tokens"
        )
    if options.train_tokenizer is not None and settings.examples:
        raise ConfigError(
            f"train_tokenizer={options.train_tokenizer}: is trained on texts, not on examples; give tokenizer, the one "
            f"of the model that is fine-tuned"
        )
    out, stats = Path(os.path.abspath(options.out)), dict[str, Any]()

    def build(folder: Path) -> None:
        if options.tokenizer is not None:
            tokenizer = load_tokenizer(options.tokenizer)
        else:
            texts = sample_texts(train, val, settings)
            tokenizer = TextTokenizer(fast_tokenizer(train_tokenizer(texts, options.train_tokenizer)))
        tokenizer.save(folder / TOKENIZER)
        # From here on, the processes share the work, or one process is all that was asked for.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        stats.update(write_shards(folder, train, val, settings, tokenizer))

    build_once(out, build)
    if not stats:
        raise ConfigError(f"out={options.out}: exists already; give another folder, or delete this one")
    return stats


def closing_line(out: str, stats: Mapping[str, Any], seconds: float) -> str:
    """What was written and what was not, in one line."""
    total = {name: sum(stats[split][name] for split in SPLITS) for name in ("documents", "tokens", *COUNTS)}
    parts = [f"{name} {stats[name]['documents']:,} documents, {stats[name]['tokens']:,} tokens" for name in SPLITS]
    if long := total["long"]:
        is_cut = stats["settings"]["long"] == "cut"
        pieces = total["documents"] + total["dropped"] - total["given"] + long
        became = f"{total['tokens_cut_off']:,} tokens cut off" if is_cut else f"in {pieces:,} pieces"
        parts.append(f"{long:,} longer than {stats['settings']['max_seq_len']:,}, {became}")
    if dropped := total["dropped"]:
        parts.append(f"dropped {dropped:,}, with nothing to learn")
    parts += [
        f"skipped {_counted(stats['skipped'])}",
        f"repaired {_counted(stats['repaired'])}",
        f"{seconds:.1f} s, {total['tokens'] / seconds:,.0f} tokens/s",
    ]
    return f"{out}: {'; '.join(parts)}"


def _counted(counts: Mapping[str, int]) -> str:
    if not counts:
        return "none"
    return f"{sum(counts.values()):,} ({', '.join(f'{reason} {count:,}' for reason, count in counts.items())})"


def _terminated(number: int, frame: object) -> NoReturn:
    """End as an error does, so that the unfinished folder is removed."""
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m composer_packing.prepare",
        description="Turn texts, or examples for fine-tuning, into MDS shards of token ids, on all cores. "
        "The folder appears whole or not at all.",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".txt, .jsonl (also compressed: .gz, .zst), .parquet, a folder of such files, "
        "or a folder that save_to_disk of Hugging Face datasets wrote",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder: train, val, tokenizer, stats.json")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--tokenizer", metavar="NAME", help="folder that save_pretrained wrote, or a name on the hub"
    )
    tokenizer.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE with this many entries on the train split instead",
    )
    held_out = parser.add_mutually_exclusive_group()
    held_out.add_argument("--val", nargs="+", metavar="INPUT", help="documents to evaluate on, instead of a share")
    defaults = PrepareConfig()
    choices = {key.name: key.limit.choices for key in limited_keys(defaults) if isinstance(key.limit, OneOf)}
    for name, text in HELP.items():
        default: Any = getattr(defaults, name)
        how: dict[str, Any] = {"default": default, "help": text}
        if default is False:
            how["action"] = "store_true"
        else:
            how |= {"type": int if default is None else type(default), "choices": choices.get(name)}
            how["help"] += "" if default is None else f" (default: {default})"
        (held_out if name == "val_share" else parser).add_argument(f"--{name.replace('_', '-')}", **how)
    return parser
