"""Shards of a checkpoint are read whichever Python wrote them, and nothing else comes to life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from engines.training.checkpoint_weights import read_causal_lm_weights
from penstock.base.errors import UserError


class _Attribute:
    """Is written as the call of `getattr` that Python before 3.11.4 writes for a member of an enumeration."""

    def __init__(self, owner: object, name: str) -> None:
        self.call = (getattr, (owner, name))

    def __reduce__(self) -> Any:
        return self.call


def _checkpoint(folder: Path, stage: object) -> Path:
    """Write a weight of 2 x 3 as DeepSpeed's stage 3 does, in two shards; `stage` lies beside it."""
    weight, state = torch.arange(6.0).reshape(2, 3), folder / "state"
    state.mkdir(parents=True)
    held = {"lm.weight": torch.empty(0)}
    names = {"param_shapes": [{"lm.weight": weight.shape}], "shared_params": {}, "module": held}
    for rank, part in enumerate(weight.flatten().split(3)):
        torch.save(names, state / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        shard = {"optimizer_state_dict": {"fp32_flat_groups": [part], "zero_stage": stage}}
        torch.save(shard, state / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


@pytest.mark.parametrize("stage", [ZeroStageEnum.weights, _Attribute(ZeroStageEnum, "weights")])
def test_shards_of_any_python_are_joined(tmp_path: Path, stage: object) -> None:
    weights = read_causal_lm_weights(_checkpoint(tmp_path / "actor", stage))
    assert weights["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("owner", [ZeroStageEnum.weights, torch.Tensor])
def test_no_other_attribute_is_fetched(tmp_path: Path, owner: object) -> None:
    """The control: of `getattr` only the members of DeepSpeed's stages are left."""
    with pytest.raises(UserError, match="objects that are not read from a file"):
        read_causal_lm_weights(_checkpoint(tmp_path / "actor", _Attribute(owner, "__class__")))
