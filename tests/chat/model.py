"""A tiny random model that chats and calls tools: its tokenizer with control tokens, and its chat template.

Template and calls are laid out as in the ChatML of Qwen3; the words are ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.configs.sections.model import TinyModel

END, PAD = "<|im_end|>", "<|endoftext|>"
CONTROL = (PAD, "<|im_start|>", END)
WRAPPING = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = r"""
{%- if tools -%}
<|im_start|>system
You have tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" -%}{{ "<|im_start|>user" }}{%- endif -%}
{{ "\n<tool_response>\n" ~ message.content ~ "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor -%}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make_chat_tokenizer(folder: Path, texts: Iterable[str], words: int = 448) -> int:
    """Write a tokenizer into `folder` whose merges come from `texts`; return its vocabulary size."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    by_word = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_word, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in WRAPPING])
    missing = -tokenizer.get_vocab_size() % 64
    tokenizer.add_tokens([AddedToken(f"<|unused-{number}|>", normalized=False) for number in range(missing)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def make_chat_model(folder: Path, texts: Iterable[str], tiny: TinyModel, words: int = 448) -> None:
    """Write model and tokenizer into `folder`."""
    from penstock.data.tokenizer import load_tokenizer
    from penstock.engines.models.tiny import make_tiny_model

    count = make_chat_tokenizer(folder, texts, words)
    tokenizer = load_tokenizer(str(folder))
    make_tiny_model(folder, tiny, count, tokenizer.eos_token_id, tokenizer.pad_token_id, seed=0)
