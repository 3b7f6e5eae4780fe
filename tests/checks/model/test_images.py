"""Trainings with images are refused on GPUs as long as no whole one has been seen there."""

from __future__ import annotations

import pytest

from penstock.base.errors import UserError
from penstock.base.home import RECIPES
from penstock.checks.model import images
from penstock.checks.model.starting_model import check_model
from penstock.configs.loading.load import load_config


def test_images_are_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a CPU, and once a training has been seen."""
    config = load_config(RECIPES / "squares.yaml")
    monkeypatch.setattr(images, "visible_gpus", lambda: [])
    check_model(config)
    monkeypatch.setattr(images, "visible_gpus", lambda: [0])
    monkeypatch.setattr(images, "IMAGES_ON_GPUS", True)
    check_model(config)
    monkeypatch.setattr(images, "IMAGES_ON_GPUS", False)
    with pytest.raises(UserError, match="on CPUs alone"):
        check_model(config)
