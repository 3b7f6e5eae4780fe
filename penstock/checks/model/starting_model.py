"""Check of the model that a training, an evaluation or a benchmark starts from: all that its configuration says of it.

Left out: which of the checks beside this file apply to a recipe besides (penstock/checks/training.py).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.checks.model.attention import check_attention
from penstock.checks.model.folder import check_model_folder
from penstock.checks.model.images import check_sight
from penstock.checks.model.mixtures import check_exact_shards
from penstock.checks.model.own_code import check_trust
from penstock.checks.model.states import check_no_states, check_states
from penstock.checks.optimizers import check_optimizers
from penstock.configs.schema import TrainConfig


def check_model(config: TrainConfig, scores: bool = False, pairs: bool = False) -> None:
    """Check that the actor, or the reward model with `scores`, has a starting point.

    `pairs`: it is trained on preferences, in groups that the flow makes.

    Raises:
        UserError: none is configured, or the folder is no model.
    """
    check_optimizers(config)
    if config.model.tiny is not None:
        check_states(config)  # of a critic or a reward model in a folder
        check_attention(config)
        return
    if config.model.path is None:
        raise UserError("no model: 'model.path' is not set", "add model.path=FOLDER, a Hugging Face model folder")
    check_trust(config.model)
    check_model_folder(Path(config.model.path), "model.path", scores, config.model.code)
    check_sight(Path(config.model.path), config.data.image_column)
    if pairs:
        check_no_states(Path(config.model.path), "a reward model" if scores else "preferences")
    check_states(config)
    check_exact_shards(config)
    check_attention(config)
