"""Tokenizers for the tests of the data room: one token per character, with and without BOS and chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config

from penstock.data.tokenizer import make_byte_tokenizer

CHAT_TEMPLATE = (
    "<eos>{% for message in messages %}{{ message.role[0] + '.' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a.' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: the configuration of a Qwen3 model and the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    Qwen3Config(vocab_size=make_byte_tokenizer(folder)).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def bos_tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    """Like Llama's: it puts a BOS (here `<eos>`) before every text, and so does its chat template."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
