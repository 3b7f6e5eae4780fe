"""How much memory a rank will need, from the model's sizes alone: no torch, no weights loaded.

An estimate for refusing what cannot fit and for `--dry-run`; measured peaks are in the metrics of every run.
Counted: weights, float32 masters, AdamW's two moments and gradients as ZeRO shards them, activations of one
micro-batch, logits of one chunk, the frozen reference, the smallest useful KV cache. Left out: fragmentation,
CUDA's own context and graphs (a flat allowance stands for them).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schedule import value_at
from configs.schema import TrainConfig, TrainerConfig

GIB = 1 << 30
CONTEXT_BYTES = {"cpu": int(1.2 * GIB), "cuda": 3 * GIB}  # libraries, CUDA context and graphs


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model folder."""

    parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int


def read_shape(folder: Path) -> ModelShape:
    """Read a model's sizes from its config and the headers of its weight files.

    Raises:
        KeyError: the config lacks a size.
        ValueError: a file is damaged.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    return ModelShape(
        parameters=sum(_numel(path) for path in folder.glob("*.safetensors")),
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        kv_heads=config.get("num_key_value_heads", heads),
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        positions=config.get("max_position_embeddings", 1 << 20),
    )


def _numel(path: Path) -> int:
    """Parameters in a safetensors file: its header is a length and a JSON object of shapes."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    total = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        numel = 1
        for size in entry["shape"]:
            numel *= size
        total += numel
    return total


def rank_bytes(
    config: TrainConfig, shape: ModelShape, roles: tuple[str, ...], ranks: int, device: str
) -> dict[str, int]:
    """Return estimated bytes on one rank by what they are for; `device` is "cpu" or "cuda"."""
    width = 4 if config.model.dtype == "float32" or (config.model.dtype == "auto" and device == "cpu") else 2
    parts = {"libraries": CONTEXT_BYTES[device]}
    trained = {"actor": config.actor, "critic": config.critic}
    for role, trainer in trained.items():
        if role in roles and trainer is not None:
            parts[f"{role} weights and optimizer"] = _trainer_bytes(trainer, shape, ranks, width)
    if parts.keys() & {f"{role} weights and optimizer" for role in trained}:
        parts["activations"] = max(_activation_bytes(t, shape, width) for t in trained.values() if t is not None)
    if "reference" in roles:
        parts["reference"] = shape.parameters * width
    if "reward" in roles:
        parts["reward model"] = read_shape(Path(str(config.reward.model))).parameters * width
    if "rollout" in roles:
        if config.actor.zero_stage == 3:
            parts["rollout weights"] = shape.parameters * width
        length = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        one = 2 * shape.layers * shape.kv_heads * shape.head_size * width * length
        parts["KV cache"] = int(config.rollout.kv_cache_gib * GIB) or one * min(16, config.rollout.max_sequences)
    return parts


def _trainer_bytes(trainer: TrainerConfig, shape: ModelShape, ranks: int, width: int) -> int:
    masters = 0 if width == 4 and trainer.zero_stage == 0 else 4
    state, gradient, weight = float(masters + 8), float(max(4, width)), float(width)
    if trainer.zero_stage >= 1:
        state /= ranks
    if trainer.zero_stage >= 2:
        gradient /= ranks
    if trainer.zero_stage >= 3:
        weight /= ranks
    return int(shape.parameters * (state + gradient + weight))


def _activation_bytes(trainer: TrainerConfig, shape: ModelShape, width: int) -> int:
    tokens = max(value_at(trainer.micro_batch_tokens, 1), 1)
    # Per token and layer: what the norms, projections, attention and the gated MLP keep for the backward pass.
    per_layer = width * (10 * shape.hidden_size + 4 * shape.intermediate_size)
    if trainer.gradient_checkpointing:
        return tokens * (shape.layers * width * shape.hidden_size + per_layer)
    return tokens * shape.layers * per_layer
