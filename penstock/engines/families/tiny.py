"""The tiny model of the quickstart and of tests: its configuration, and its sizes before it is made.

Left out: making it (penstock/engines/models/tiny.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.configs.sections.model import TinyEncoder, TinyModel
from penstock.engines.families.shape import ModelShape, shape_of_weights

MODEL_TYPE, SEEING_TYPE = "qwen3", "qwen2_5_vl"
PATCH, MERGED, WINDOW = (
    14,
    2,
    112,
)  # pixels of a patch, patches of a token along a side, pixels of a window: as Qwen2.5-VL
SPECIAL = {  # tokens of its tokenizer, by their names in its configuration
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
VOCABULARY = 64  # of the byte tokenizer that is made beside it


def tiny_type(tiny: TinyModel) -> str:
    """Return the tiny model's `model_type`."""
    return MODEL_TYPE if tiny.encoder is None else SEEING_TYPE


def tiny_settings(tiny: TinyModel, vocabulary: int) -> dict[str, Any]:
    """Return the sizes of the tiny model as its configuration has them; `vocabulary`: rows of the embedding."""
    if tiny.encoder is not None:
        return _seeing(tiny, tiny.encoder, _decoder(tiny, vocabulary))
    return {**_decoder(tiny, vocabulary), "head_dim": tiny.hidden_size // tiny.heads}


def _decoder(tiny: TinyModel, vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": tiny.max_positions,
        "tie_word_embeddings": tiny.tie_embeddings,
    }


def _seeing(tiny: TinyModel, encoder: TinyEncoder, decoder: dict[str, Any]) -> dict[str, Any]:
    half = tiny.hidden_size // tiny.heads // 2  # frequencies: of time, rows and columns
    sides = 3 * half // 8
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * sides, sides, sides]}
    return {
        "text_config": {**decoder, "rope_parameters": rope},
        "vision_config": {
            "depth": encoder.layers,
            "hidden_size": encoder.hidden_size,
            "intermediate_size": 2 * encoder.hidden_size,
            "num_heads": encoder.heads,
            "out_hidden_size": tiny.hidden_size,
            "fullatt_block_indexes": [encoder.layers - 1],
            "window_size": WINDOW,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "initializer_range": (MERGED**2 * encoder.hidden_size) ** -0.5,
        },
        "tie_word_embeddings": tiny.tie_embeddings,
    }


def _encoder_parameters(encoder: TinyEncoder, out: int) -> int:
    hidden, inner = encoder.hidden_size, 2 * encoder.hidden_size
    block = 2 * hidden + 4 * hidden * (hidden + 1) + 3 * hidden * inner + 2 * inner + hidden
    merged = MERGED**2 * hidden
    return 6 * PATCH**2 * hidden + encoder.layers * block + hidden + merged * (merged + 1) + (merged + 1) * out


def tiny_shape(tiny: TinyModel) -> ModelShape:
    """Return the sizes of the tiny model that a run will make."""
    shape = shape_of_weights({"model_type": tiny_type(tiny), **tiny_settings(tiny, VOCABULARY)}, {})
    if tiny.encoder is not None:
        biases = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        embeddings = shape.vocabulary * shape.hidden_size * (1 if tiny.tie_embeddings else 2)
        of_blocks = shape.block_matrices + shape.layers * (2 * shape.hidden_size + biases)
        seen = _encoder_parameters(tiny.encoder, shape.hidden_size)
        return replace(shape, parameters=of_blocks + shape.hidden_size + embeddings + seen, encoder=seen)
    norms = 2 * shape.hidden_size + 2 * shape.head_size  # of a block; queries and keys have one each
    embeddings = shape.vocabulary * shape.hidden_size * (1 if tiny.tie_embeddings else 2)
    parameters = shape.block_matrices + shape.layers * norms + shape.hidden_size + embeddings
    return replace(shape, parameters=parameters, query_key_norms=True)
