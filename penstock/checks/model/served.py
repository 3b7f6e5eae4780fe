"""Checks that vLLM's own server, without what Penstock changes in vLLM, serves a model rightly."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from penstock.base.errors import UserError
from penstock.engines.families.images import sees
from penstock.engines.families.shape import read_settings
from penstock.engines.families.table import family_of
from penstock.engines.groups.machine import visible_gpus


def check_served_alone(folder: Path) -> None:
    """Check that vLLM's own server, without what Penstock changes in vLLM, serves what was trained.

    Raises:
        UserError: its layers carry a state, and nobody has compared the two; or vLLM 0.32 computes it wrongly on a CPU,
            as one head of LFM2 and of latent attention, and corrections of routers without groups.
    """
    settings = read_settings(folder)
    family = family_of(settings.get("model_type", ""))
    if family.mixers:
        raise UserError(
            f"the model in {folder} has layers that carry a state from token to token, and nobody has compared vLLM's "
            "own server with the trainer",
            "generate with penstock evaluate, or use another model",
        )
    if not visible_gpus() and (settings.get("kv_lora_rank") or family.corrected and not settings.get("n_group")):
        raise UserError(
            f"the model in {folder} is not what vLLM's own server would compute on a CPU",
            "generate with penstock evaluate, serve it on a GPU, or use another model",
        )


def check_served_images(folder: Path) -> None:
    """Check that vLLM's own server can make images ready for a model that sees.

    Raises:
        UserError: it sees, and the library for that is not installed.
    """
    if sees(read_settings(folder)) and find_spec("torchvision") is None:
        raise UserError(
            f"the model in {folder} sees images, for which vLLM's own server needs torchvision", "install torchvision"
        )
