"""A model's sizes, read from its folder without torch: what memory (memory.py) and FLOPs (flops.py) are counted from.

Left out: the weights themselves; what an architecture does beyond a dense decoder (`ModelShape.dense` tells).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer with a gated MLP."""

    parameters: int  # as stored in the files, a tied embedding once
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    window: int = 0  # tokens that a token of a windowed layer sees, itself included
    windowed_layers: int = 0
    query_key_norms: bool = False

    @property
    def layer_matrices(self) -> int:
        """Parameters in the matrices of one layer: q, k, v, o, and the MLP's gate, up and down."""
        attention = 2 * self.hidden_size * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def dense(self) -> bool:
        """Whether the sizes explain the parameters within 3 %: experts or adapters are something else."""
        embedding = self.vocabulary * self.hidden_size
        layers = self.layers * self.layer_matrices
        return any(abs(self.parameters / (layers + count * embedding) - 1) < 0.03 for count in (1, 2))


def read_shape(folder: Path) -> ModelShape:
    """Read a model's sizes from its config and the headers of its weight files.

    Raises:
        KeyError: the config lacks a size.
        ValueError: a file is damaged.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    windowed_layers = _windowed_layers(config)
    numels = {name: numel for path in folder.glob("*.safetensors") for name, numel in _numels(path).items()}
    return ModelShape(
        parameters=sum(numels.values()),
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        positions=config.get("max_position_embeddings", 1 << 20),
        window=config["sliding_window"] if windowed_layers else 0,
        windowed_layers=windowed_layers,
        query_key_norms=any(name.endswith(".q_norm.weight") for name in numels),
    )


def _windowed_layers(config: dict[str, Any]) -> int:
    """Layers with a sliding window, in the three ways in which configs say so."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if "layer_types" in config:
        return int(config["layer_types"].count("sliding_attention"))
    return int(config["num_hidden_layers"] - config.get("max_window_layers", 0))


def _numels(path: Path) -> dict[str, int]:
    """Parameters in a safetensors file by name: its header is a length and a JSON object of shapes."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    return {name: prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
