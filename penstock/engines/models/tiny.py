"""Makes a tiny random Qwen3-shaped model folder: for the quickstart and for tests, in place of a download.

The architecture is the real one and loads through the same path as any other folder; only the sizes are small.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from penstock.base.files import share_weights_of
from penstock.configs.sections.model import TinyModel
from penstock.engines.families.tiny import MODEL_TYPE, tiny_settings


def make_tiny_model(folder: Path, tiny: TinyModel, vocabulary: int, eos: int, pad: int, seed: int) -> int:
    """Write config, random weights and generation settings to `folder`; return the number of parameters.

    Args:
        vocabulary: rows of the embedding; a multiple of 64 lets vLLM share it.
        eos: token id that ends a response; pad: the tokenizer's padding id.
    """
    config = AutoConfig.for_model(
        MODEL_TYPE,
        **tiny_settings(tiny, vocabulary),
        initializer_range=tiny.hidden_size**-0.5,  # the usual 0.02 suits widths of thousands and learns slowly at 96
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)
    share_weights_of(folder)
    return sum(parameter.numel() for parameter in model.parameters())
