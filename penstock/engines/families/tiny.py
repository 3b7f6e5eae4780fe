"""The tiny model of the quickstart and of tests: its configuration, and its sizes before it is made.

Left out: making it (penstock/engines/models/tiny.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.configs.sections.model import TinyModel
from penstock.engines.families.shape import ModelShape, shape_of_weights

MODEL_TYPE = "qwen3"
VOCABULARY = 64  # of the byte tokenizer that is made beside it


def tiny_settings(tiny: TinyModel, vocabulary: int) -> dict[str, Any]:
    """Return the sizes of the tiny model as its configuration has them; `vocabulary`: rows of the embedding."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.hidden_size // tiny.heads,
        "max_position_embeddings": tiny.max_positions,
        "tie_word_embeddings": tiny.tie_embeddings,
    }


def tiny_shape(tiny: TinyModel) -> ModelShape:
    """Return the sizes of the tiny model that a run will make."""
    shape = shape_of_weights({"model_type": MODEL_TYPE, **tiny_settings(tiny, VOCABULARY)}, {})
    norms = 2 * shape.hidden_size + 2 * shape.head_size  # of a block; queries and keys have one each
    embeddings = shape.vocabulary * shape.hidden_size * (1 if tiny.tie_embeddings else 2)
    parameters = shape.block_matrices + shape.layers * norms + shape.hidden_size + embeddings
    return replace(shape, parameters=parameters, query_key_norms=True)
