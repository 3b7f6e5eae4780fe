"""Makes a tiny random Qwen3-shaped model folder: for the quickstart and for tests, in place of a download.

The architecture is the real one and loads through the same path as any other folder; only the sizes are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from penstock.base.files import share_weights_of
from penstock.configs.sections.model import TinyModel
from penstock.engines.families.tiny import MERGED, PATCH, tiny_settings, tiny_type


def make_tiny_model(
    folder: Path,
    tiny: TinyModel,
    vocabulary: int,
    eos: int,
    pad: int,
    seed: int,
    special: Mapping[str, int] | None = None,
) -> int:
    """Write config, random weights and generation settings to `folder`; return the number of parameters.

    Args:
        vocabulary: rows of the embedding; a multiple of 64 lets vLLM share it.
        eos: token id that ends a response; pad: the tokenizer's padding id.
        special: token ids by which a model that sees knows images, by their names in its configuration.
    """
    settings: dict[str, Any] = tiny_settings(tiny, vocabulary)
    of_tokens = {
        "initializer_range": tiny.hidden_size**-0.5,  # the usual 0.02 suits widths of thousands and learns slowly at 96
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
    }
    settings.get("text_config", settings).update(of_tokens)
    config = AutoConfig.for_model(tiny_type(tiny), **settings, **(special or {}))
    kind: Any = AutoModelForCausalLM if tiny.encoder is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)
    if tiny.encoder is not None:
        write_image_processor(folder)
    share_weights_of(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_image_processor(folder: Path) -> None:
    """Write what makes patches of an image, as the models of this shape have it, for images of 1 to 64 tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    token = (PATCH * MERGED) ** 2  # pixels
    made = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGED, min_pixels=token, max_pixels=64 * token)
    made.save_pretrained(folder)
