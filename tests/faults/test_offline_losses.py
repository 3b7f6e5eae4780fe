"""Offline trainings whose ranks are lost go on by themselves from their newest checkpoint of steps, to the same end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.flows.preference import preference
from penstock.flows.reward_model import reward_model
from penstock.flows.sft import sft
from penstock.state.events import read_events
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import numbers
from tests.faults.blows import HOST, Blow, blows_falling
from tests.flows.test_preference_flow import TINY, pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("faults")]

STEPS, SAVED = 12, "checkpoint 000005"
TRAINER = {"steps": STEPS, "batch": 8, "checkpoint_every": 5}
SUMS = {"arithmetic": {"digits": 1, "sft": 64, "train": 8, "heldout": 8}}
REWARD = {"function": "penstock.rewards.builtin:exact_match"}
NONE = "its beginning"
STRUCK: dict[str, tuple[list[Blow], list[str]]] = {
    "preference": (
        [Blow("logprobs", "0/reference"), Blow("preference_steps", "5/", written=True), Blow("preference_end")],
        [NONE, SAVED, f"checkpoint {STEPS:06d}"],  # the state after the last step is kept
    ),
    "reward-model": (
        [Blow("preference_steps", "5/", written=True), Blow("penstock.session.session.write_snapshot", "2", HOST)],
        [SAVED, SAVED],
    ),
    "sft": ([Blow("sft_begin"), Blow("sft_steps", "10/", written=True)], [NONE, "checkpoint 000010"]),
}


def flow_of(kind: str, folder: Path) -> tuple[Callable[..., Any], Any]:
    """Return a flow and its configuration."""
    data = {"train": pairs(folder / "train.jsonl", 32, 10), "heldout": pairs(folder / "heldout.jsonl", 8, 60)}
    tree = {"name": kind, "model": TINY, "trainer": TRAINER, "data": data}
    if kind == "preference":
        return preference, PreferenceConfig.model_validate(tree)
    if kind == "reward-model":
        return reward_model, RewardModelConfig.model_validate(tree)
    return sft, TrainConfig.model_validate(
        {"name": kind, "model": TINY, "data": SUMS, "reward": REWARD, "sft": TRAINER}
    )


@pytest.mark.usefixtures("prefect_harness")
@pytest.mark.parametrize(
    "kind", [kind if kind == "preference" else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in STRUCK]
)
def test_an_offline_training_that_is_struck_ends_as_one_left_alone(kind: str, tmp_path: Path) -> None:
    """Weights and figures are equal to the last bit. Control: each loss has an event, and what was restored."""
    flow, config = flow_of(kind, tmp_path)
    blows, places = STRUCK[kind]
    models = []
    for name, falling in (("alone", []), ("struck", blows)):
        with blows_falling(falling):
            models.append(Path(flow(config, run_folder=str(tmp_path / name))) / "model.safetensors")
    alone, struck = (RunFolder(tmp_path / name) for name in ("alone", "struck"))
    assert models[0].read_bytes() == models[1].read_bytes()
    assert numbers(alone) == numbers(struck)
    assert read_metrics(struck)[-1]["iteration"] == STEPS
    assert not [*struck.path.rglob("*.partial")]
    assert read_events(alone) == []
    assert [event["place"] for event in read_events(struck)[1::2]] == places
