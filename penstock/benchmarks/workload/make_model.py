"""Makes a random-weight model folder in the shape of Qwen2.5, for measuring speed and memory without a download.

    penstock bench model 1.5 models/random-1.5b
    penstock bench model mixture models/random-mixture    # of experts, in the shape of Qwen 3 MoE, half a billion
    penstock bench model 7 models/random-7b-6-layers --layers 6 --vocabulary 32768    # what a block costs, and no more

The tokenizer has one token per byte and fills the vocabulary up with unused tokens, so any text encodes; a model with
random weights almost never ends a response, so every response has the full length. Given many tokens that end one, it
makes responses as a trained model does: many short, some very long. The file also runs by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 151_936
SHAPES = {
    "0.5": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "3": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11_008},
    "7": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18_944},
}
KV_HEADS = {"0.5": 2, "1.5": 2, "3": 2, "7": 4}
USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": VOCABULARY - 2,
}
MIXTURE = "mixture"
EXPERTS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 2048,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "tie_word_embeddings": True,
}


def main(
    size: str,
    folder: Path,
    mean_response: int | None = None,
    layers: int | None = None,
    vocabulary: int = VOCABULARY,
) -> None:
    """Write config, bfloat16 weights, tokenizer and generation settings to `folder`.

    With `mean_response` drawn responses (temperature 1) end after about that many tokens on average; `layers` instead
    of the shape's, with a `vocabulary` that makes the language head no larger a part of the work.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen3MoeConfig

    settings = {**USUAL, **EXPERTS} if size == MIXTURE else sizes(size)
    pad = vocabulary - 2
    settings |= {"vocab_size": vocabulary, "eos_token_id": pad + 1, "pad_token_id": pad}
    settings |= {} if layers is None else {"num_hidden_layers": layers}
    config = (Qwen3MoeConfig if size == MIXTURE else Qwen2Config)(**settings)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ends = [pad + 1]
    if mean_response is not None:
        ends += range(pad + 1 - vocabulary // mean_response, pad)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    model.save_pretrained(folder)
    byte_tokenizer(vocabulary).save_pretrained(folder)


def sizes(size: str) -> dict[str, Any]:
    """Return the settings of transformers' Qwen2Config for a size in billions of parameters."""
    return {
        **USUAL,
        "num_key_value_heads": KV_HEADS[size],
        "tie_word_embeddings": size != "7",
        **SHAPES[size],
    }


def byte_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, a chat template that joins the contents, and unused tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = symbols + [f"<unused-{index}>" for index in range(vocabulary - len(symbols))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokens[-1], pad_token=tokens[-2])
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
