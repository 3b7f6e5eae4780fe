"""Weights out of a DeepSpeed checkpoint of any ZeRO stage, read without an engine and without unsafe pickle.

Stages 0 to 2 keep whole weights in one file. Stage 3 keeps the optimizer's float32 weights in shards, one file per
rank: each parameter is cut into as many equal parts as there were ranks, the last one padded, and a rank's parts of all
parameters lie one after the other. DeepSpeed's own script for that loads arbitrary pickles.

Left out: optimizer states, and parameters that are not trained: with LoRA a checkpoint holds the adapters alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engines.training.state_files import read_state
from engines.weights.lora import FROZEN_SUM
from penstock.base.errors import UserError

WHOLE = "mp_rank_00_model_states.pt"  # the file of all weights, below stage 3
WRAPPER = "lm."  # what PackedPolicy calls the model inside it


def read_causal_lm_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a policy that `Trainer.save` wrote under `folder`, by their Hugging Face names.

    Tied parameters appear under each of their names, with one storage.

    Raises:
        UserError: the folder holds no such checkpoint, or one with content that cannot be read safely.
    """
    state = folder / "state"
    whole = state / WHOLE
    if whole.is_file():
        weights = _load(whole)["module"]
    elif shards := sorted(state.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"), key=_rank):
        weights = _joined(_load(shards[0]), sorted(state.glob("zero_pp_rank_*_optim_states.pt"), key=_rank))
    else:
        raise UserError(f"{folder} holds no weights that DeepSpeed wrote", "name a run whose checkpoint is whole")
    return {name.removeprefix(WRAPPER): value for name, value in weights.items() if name.startswith(WRAPPER)}


def recorded_frozen_sum(folder: Path) -> int:
    """Return what a checkpoint with adapters says of the weights that they belong to (engines/weights/lora.py)."""
    return int(_load(folder / "state" / WHOLE)[FROZEN_SUM])


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("zero_pp_rank_").partition("_")[0])


def _joined(model_state: dict[str, Any], shards: list[Path]) -> dict[str, torch.Tensor]:
    """Put the shards of stage 3 together, in the dtype that the model was trained in."""
    flat = [torch.cat(_load(path)["optimizer_state_dict"]["fp32_flat_groups"]) for path in shards]
    weights: dict[str, torch.Tensor] = {}
    offset = 0
    for name, shape in ((name, shape) for group in model_state["param_shapes"] for name, shape in group.items()):
        part = -(-shape.numel() // len(flat))
        whole = torch.cat([shard[offset : offset + part] for shard in flat])[: shape.numel()]
        weights[name] = whole.view(shape).to(model_state["module"][name].dtype)
        offset += part
    weights |= {name: weights[twin] for name, twin in model_state["shared_params"].items()}
    return weights


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_state(path, mmap=True)
    return content
