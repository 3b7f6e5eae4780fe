"""A complete run of steps that goes on for longer ends as one that had all its steps from the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.flows.preference import preference
from penstock.flows.sft import sft
from penstock.state.run_folder import RunFolder
from tests.comparing import numbers
from tests.flows.test_preference_flow import TINY, pairs

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

FEWER, MORE = 7, 12
SUMS = {"arithmetic": {"digits": 1, "sft": 64, "train": 8, "heldout": 8}}


def flow_of(kind: str, folder: Path, steps: int) -> tuple[Callable[..., str], Any]:
    """Return a flow and its configuration; the learning rate warms up and does not depend on the number of steps."""
    trainer = {"steps": steps, "batch": 8, "checkpoint_every": 5}
    trainer["optimizer"] = {"learning_rate": 3e-3, "warmup_steps": 2}
    if kind == "sft":
        return sft, TrainConfig.model_validate({"name": kind, "model": TINY, "data": SUMS, "sft": trainer})
    data = {"train": pairs(folder / "train.jsonl", 32, 10), "heldout": pairs(folder / "heldout.jsonl", 8, 60)}
    return preference, PreferenceConfig.model_validate({"name": kind, "model": TINY, "trainer": trainer, "data": data})


@pytest.mark.usefixtures("prefect_harness")
@pytest.mark.parametrize(
    ("kind", "section", "model"),
    [("sft", "sft", "sft"), ("preference", "trainer", "final")],
)
def test_more_steps_end_as_if_asked_for_at_first(kind: str, section: str, model: str, tmp_path: Path) -> None:
    """Weights and figures to the last bit, but for what was measured at the old end.

    Controls: fewer steps give other weights; what would make another run is refused, and changes nothing.
    """

    def weights(run: RunFolder) -> bytes:
        return (run.model(model) / "model.safetensors").read_bytes()

    whole, longer = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "longer")
    flow, config = flow_of(kind, tmp_path, MORE)
    flow(config, run_folder=str(whole.path))
    flow, config = flow_of(kind, tmp_path, FEWER)
    flow(config, run_folder=str(longer.path))
    assert weights(longer) != weights(whole)
    before = longer.config.read_bytes()
    for change, said in ((f"{section}.batch=4", "cannot change"), (f"{section}.steps=3", "has done 7 already")):
        with pytest.raises(UserError, match=said):
            flow(resume=str(longer.path), changes=[change])
    assert longer.config.read_bytes() == before

    assert flow(resume=str(longer.path), changes=[f"{section}.steps={MORE}"]) == str(longer.model(model))
    assert weights(longer) == weights(whole)
    assert dict(_without_heldout(longer)) == dict(_without_heldout(whole))
    summary = json.loads(longer.summary.read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"]) == ("completed", MORE)


def _without_heldout(run: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """Return what was recorded of the steps themselves."""
    ends = ("heldout/", "alarm/overfitting")
    return [
        (step, {name: value for name, value in figures.items() if not name.startswith(ends)})
        for step, figures in numbers(run)
    ]
