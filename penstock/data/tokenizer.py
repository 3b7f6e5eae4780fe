"""The tokenizer of a model folder; and one with one token per character, which tiny models and tests get.

That one is a byte-level BPE without merges. A word-level model would be simpler, but transformers may rebuild the
tokenizer of a Qwen3 folder as `Qwen2Tokenizer` from the vocabulary and the merges alone, whatever class the folder
names; a word-level vocabulary then encodes every text to nothing. This one stays the same under either class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.base.interrupts import interrupts_deferred
from penstock.base.model_code import Code, trusted

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PADDING_MULTIPLE = 64
DEFAULT_CHARACTERS = "0123456789+-*=. abcdefghijklmnopqrstuvwxyz[]/()"


def make_byte_tokenizer(folder: Path, characters: str = DEFAULT_CHARACTERS, special: Sequence[str] = ()) -> int:
    """Write a tokenizer for `characters` into `folder` and return its vocabulary size.

    Token 0 is `<pad>`, 1 `<eos>`, 2 `<unk>`; then one token for each byte of the characters, in their order; then
    the `special` ones, which a text has by their names; then unused tokens up to a multiple of 64, the size vLLM would
    pad the vocabulary to anyway. Nothing is added to a text: no BOS, no EOS. A character outside `characters` becomes
    `<unk>`, once for each of its UTF-8 bytes; where transformers rebuilds the tokenizer as `Qwen2Tokenizer` it is left
    out instead.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = "".join(symbol for symbol, _ in to_bytes.pre_tokenize_str(characters))
    tokens = list(dict.fromkeys([PAD, EOS, UNKNOWN, *symbols, *special]))
    tokens += [f"<unused-{index}>" for index in range(-len(tokens) % PADDING_MULTIPLE)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": [*special]} if special else {}),
    )
    fast.save_pretrained(folder)
    return len(tokens)


def load_tokenizer(model_folder: str, code: Code | None = None) -> Any:
    """Load the tokenizer of a model folder; `code` is that a folder is trusted to bring."""
    with interrupts_deferred():
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_folder, local_files_only=True, trust_remote_code=trusted(model_folder, code)
    )
