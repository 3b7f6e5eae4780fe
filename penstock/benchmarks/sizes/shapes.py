"""Sizes of dense decoders by their configuration alone, without weights, for estimates before a download.

Left out: mixtures of experts, and all whose layers differ: their sizes are read from the headers of their files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.engines.families.shape import ModelShape, read_settings, shape_of_weights

# As published: Qwen2.5-32B, and Llama 3.1 and 3.3 of 70 billion parameters.
KNOWN: dict[str, dict[str, Any]] = {
    "qwen2.5-32b": {
        "model_type": "qwen2",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
    "llama-3.1-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}
DENSE = {"qwen2": True, "llama": False, "mistral": False}  # by model type: whether q, k and v have biases


def shape_named(model: str) -> ModelShape:
    """Return the sizes of a known model, or of a folder that may hold nothing but config.json.

    Raises:
        UserError: there is no such model, or it is no dense decoder of the types above.
    """
    settings = KNOWN.get(model)
    if settings is None:
        if not (Path(model) / "config.json").is_file():
            raise UserError(f"{model} is no folder with a config.json", f"name one, or {' or '.join(KNOWN)}")
        settings = read_settings(Path(model))
    if (model_type := settings.get("model_type")) not in DENSE:
        raise UserError(
            f"{model}: sizes of '{model_type}' do not follow from its configuration alone",
            f"with its files in the folder 'penstock train --dry-run' tells; without them: {', '.join(DENSE)}",
        )
    shape = shape_of_weights(settings, {})
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    vectors = shape.hidden_size * (2 * shape.layers + 1)
    vectors += shape.layers * (query + 2 * key) if DENSE[model_type] else 0
    heads = 1 if settings.get("tie_word_embeddings") else 2
    return replace(shape, parameters=shape.block_matrices + heads * shape.vocabulary * shape.hidden_size + vectors)
