"""The tokenizer of a run: makes ids of texts, and knows the special ids that packing and masking need."""

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
"""Special tokens of the tokenizers that `train_tokenizer` trains. A token's index is its id."""


class Vocabulary(NamedTuple):
    """What packing and masking need to know about a tokenizer.

    Attributes:
        size: all ids lie below this number.
        pad_token_id: 0 if the tokenizer has no padding token. Padding is recognized by its position, not by its id.
        mask_token_id: None if the tokenizer has no mask token.
        special_token_ids: ids that are neither masked nor drawn as random words, sorted.
    """

    size: int
    pad_token_id: int
    mask_token_id: int | None
    special_token_ids: Sequence[int]


class TextTokenizer:
    """A fast tokenizer that never cuts or pads a text. It adds its special tokens to each text.

    Args:
        tokenizer: a fast tokenizer of transformers. Unlike one of the library tokenizers, it knows which token is the
            mask, the padding and so on.

    Attributes:
        named: the tokenizer as given.
        vocabulary: size of the vocabulary, and special ids.
        text: JSON of `tokenizer.json` and of the names of the special tokens.
        fingerprint: of `text`, 16 hexadecimal digits. Checkpoints and prepared data hold the value.
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
        """All ids lie below this number."""
        return self.vocabulary.size

    @property
    def num_special_tokens(self) -> int:
        """How many special tokens the tokenizer adds to a text."""
        return int(self._backend.num_special_tokens_to_add(is_pair=False))

    def __call__(self, texts: Sequence[str]) -> tuple[Tokens, NDArray[np.int64]]:
        """Tokenize texts, on all cores unless the environment has `TOKENIZERS_PARALLELISM=false`.

        Returns:
            uint16, uint32 or int64 `(tokens,)`, the ids of all texts end to end, in the narrowest of these types; and
            int64 `(texts,)`, the number of tokens of each text.
        """
        encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        return concatenate_ids("input_ids", encoded, self.vocab_size)

    def tokenize_in_pieces(self, texts: Sequence[str], max_seq_len: int) -> list[list[list[int]]]:
        """Tokenize texts into pieces of at most `max_seq_len` tokens. Every piece has special tokens of its own.

        Returns:
            For each text its pieces, and for each piece its ids.
        """
        self._backend.enable_truncation(max_seq_len)
        try:
            encoded = self._backend.encode_batch(texts)
        finally:
            self._backend.no_truncation()
        return [[encoding.ids, *(piece.ids for piece in encoding.overflowing)] for encoding in encoded]

    def save(self, folder: Path) -> None:
        """Write the tokenizer into a folder, from which `load_tokenizer` reads it."""
        self.named.save_pretrained(folder)


def load_tokenizer(name_or_folder: str) -> TextTokenizer:
    """Read a tokenizer from a folder that `save_pretrained` wrote, or get it by its name from the Hugging Face hub.

    Raises:
        ConfigError: the tokenizer cannot be read, or is not a fast one.
    """
    form = (
        "give a folder that save_pretrained wrote, with tokenizer.json and tokenizer_config.json, or a name on the hub"
    )
    if not os.path.isdir(name_or_folder) and (os.path.exists(name_or_folder) or name_or_folder.startswith(("/", "."))):
        raise ConfigError(f"tokenizer={name_or_folder}: there is no such folder; {form}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_folder)
    except Exception as error:  # transformers passes on errors of any kind
        raise ConfigError(f"tokenizer={name_or_folder}: cannot be read ({one_line(error, 120)}); {form}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"tokenizer={name_or_folder}: is a {type(tokenizer).__name__}, which is not a fast tokenizer; "
            f"give one with a tokenizer.json"
        )
    return TextTokenizer(tokenizer)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that adds [CLS] before and [SEP] after every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,  # without a terminal, progress is printed as empty lines
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer of `train_tokenizer` for transformers, and name its special tokens."""
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
