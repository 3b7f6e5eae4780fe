"""The tiny model that a run starts from is whole under its name, or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.checks.model.folder import check_model_folder
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.build import MakeTiny
from penstock.engines.models.tiny import make_tiny_model
from penstock.session.session import Session, Training
from penstock.tasks.start import starting_model

CONFIG = TrainConfig.model_validate({"model": {"tiny": {"hidden_size": 16, "heads": 2, "kv_heads": 1, "layers": 1}}})


def test_a_model_that_was_cut_short_is_made_anew(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights lay there in part, or a kill left the folder aside. Control: one that is whole is made once."""
    training, made = training_with(CONFIG), []
    initial = training.run.model("initial")

    def make(_: Session, __: str, command: MakeTiny, ___: str) -> list[None]:
        made.append(command.folder)
        assert CONFIG.model.tiny is not None
        make_tiny_model(Path(command.folder), CONFIG.model.tiny, 64, eos=1, pad=0, seed=0)
        if len(made) == 1:
            weights = Path(command.folder) / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:100])
            raise KeyboardInterrupt
        return [None]

    monkeypatch.setattr(Session, "call", make)
    with pytest.raises(KeyboardInterrupt):
        starting_model.fn(training)
    assert not initial.exists()
    left = initial.with_name(".initial.partial")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    for _ in range(2):
        assert starting_model.fn(training) == str(initial)
        check_model_folder(initial, "models/initial")
        assert not left.exists()
    assert len(made) == 2
