"""The tokenizer of a run: texts to ids, and the ids that packing and masking must know."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.packing.document_table import Tokens
from composer_packing.packing.token_arrays import concatenate_ids

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of the tokenizers that are trained here; the place is the id."""


class Vocabulary(NamedTuple):
    """What packing and masking must know of a tokenizer.

    Attributes:
        size: all ids lie below it.
        pad_token_id: 0 where it has none, as padding is where no document is, whatever its id.
        mask_token_id: None where it has none.
        special_token_ids: ids that are never masked nor drawn, in order.
    """

    size: int
    pad_token_id: int
    mask_token_id: int | None
    special_token_ids: Sequence[int]


class TextTokenizer:
    """A fast tokenizer. Texts are never cut or padded, and get the special tokens that it adds.

    Args:
        tokenizer: as transformers has it, which knows its special tokens by their names.

    Attributes:
        named: the tokenizer as given.
        vocabulary: its size and special ids.
        text: the tokenizer as `tokenizer.json` holds it, and the special tokens by their names.
        fingerprint: SHA-256 of that, 16 hexadecimal digits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.named = tokenizer
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.vocabulary = Vocabulary(
            size=1 + max(self._backend.get_vocab(with_added_tokens=True).values()),
            pad_token_id=tokenizer.pad_token_id or 0,
            mask_token_id=tokenizer.mask_token_id,
            special_token_ids=tuple(sorted(special)),
        )
        names = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
        self.text = json.dumps({"tokenizer": json.loads(self._backend.to_str()), "special_tokens": names})
        self.fingerprint = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def vocab_size(self) -> int:
        """All ids lie below it."""
        return self.vocabulary.size

    @property
    def num_special_tokens(self) -> int:
        """How many it adds to a text."""
        return int(self._backend.num_special_tokens_to_add(is_pair=False))

    def __call__(self, texts: Sequence[str]) -> tuple[Tokens, NDArray[np.int64]]:
        """Ids of all texts end to end, in the narrowest type for them, and how many each has.

        Texts are tokenized on all cores, unless the environment has `TOKENIZERS_PARALLELISM=false`.
        """
        encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        return concatenate_ids("input_ids", encoded, self.vocab_size)

    def in_pieces(self, texts: Sequence[str], max_seq_len: int) -> list[list[list[int]]]:
        """For each text its ids in pieces of at most `max_seq_len`, each with the special tokens that it adds."""
        self._backend.enable_truncation(max_seq_len)
        try:
            encoded = self._backend.encode_batch(texts)
        finally:
            self._backend.no_truncation()
        return [[encoding.ids, *(piece.ids for piece in encoding.overflowing)] for encoding in encoded]

    def save(self, folder: Path) -> None:
        """Write it where `load_tokenizer` reads it from."""
        self.named.save_pretrained(folder)


def load_tokenizer(name_or_folder: str) -> TextTokenizer:
    """A tokenizer from a folder that `save_pretrained` wrote, or from the Hugging Face hub by its name.

    Raises:
        ConfigError: there is none, or it is not a fast one.
    """
    form = (
        "give a folder that save_pretrained wrote, with tokenizer.json and tokenizer_config.json, or a name on the hub"
    )
    if not os.path.isdir(name_or_folder) and (os.path.exists(name_or_folder) or name_or_folder.startswith(("/", "."))):
        raise ConfigError(f"tokenizer={name_or_folder}: there is no such folder; {form}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_folder)
    except Exception as error:  # transformers raises what its parts raise
        raise ConfigError(f"tokenizer={name_or_folder}: cannot be read ({one_line(error, 120)}); {form}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"tokenizer={name_or_folder}: is a {type(tokenizer).__name__}, which is not a fast tokenizer; "
            f"give one with a tokenizer.json"
        )
    return TextTokenizer(tokenizer)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
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
            show_progress=False,  # it would print empty lines where there is no terminal
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of `train_tokenizer` as transformers knows it, with its special tokens by their names."""
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
