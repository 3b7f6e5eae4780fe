"""The flows before reinforcement learning: they learn what is preferred, and leave models that are taken further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from configs.errors import UserError
from configs.preference import PreferenceConfig, RewardModelConfig
from data.prompts import encode_texts
from engines.models import load_reward_model
from flows.preference import preference
from flows.reward_model import reward_model
from reports import mlflow_run
from state.run_folder import RunFolder, read_metrics
from tasks.check import check_model_folder
from tasks.preference import check_preferences

TINY = {"tiny": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 96}}
STEPS = 12
TRAINER = {"steps": STEPS, "batch": 16, "optimizer": {"learning_rate": 3e-3}}


def pairs(path: Path, count: int, offset: int) -> str:
    """Sums of which the response that begins with a 7 is preferred to the one that begins with a 2."""
    rows = [
        {"prompt": f"{number}+{number}=", "chosen": f"7{number % 10}.", "rejected": f"2{number % 10}."}
        for number in range(offset, offset + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pairs")
    return {"train": pairs(folder / "train.jsonl", 48, 10), "heldout": pairs(folder / "heldout.jsonl", 16, 60)}


def finished(run: RunFolder) -> dict[str, float]:
    """Check what every such run leaves; return its summary."""
    records = read_metrics(run)
    assert [record["iteration"] for record in records] == list(range(STEPS + 1))
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["heldout_accuracy"] == records[-1]["metrics"]["heldout/accuracy"] > 0.9
    assert summary["loss_last"] < summary["loss_first"]
    uri = mlflow_run.default_tracking_uri(run.path.parent)
    logged = mlflow_run.connect(uri).get_run(summary["mlflow_run_id"])
    assert logged.info.status == "FINISHED"
    assert logged.data.metrics["heldout/accuracy"] == summary["heldout_accuracy"]
    check_model_folder(run.model("final"), "model.path")
    assert not list(run.path.rglob("*.partial"))
    return summary


def test_a_policy_learns_what_is_preferred(prefect_harness: None, data: dict[str, str], tmp_path: Path) -> None:
    """DPO: loss log 2 and no margin at first, held-out pairs right at the end."""
    run = RunFolder(tmp_path / "dpo")
    config = PreferenceConfig.model_validate({"name": "dpo", "model": TINY, "data": data, "trainer": TRAINER})
    assert preference(config, run_folder=str(run.path)) == str(run.model("final"))
    summary = finished(run)
    assert summary["loss_first"] == pytest.approx(0.6931, abs=1e-3)
    before, after = read_metrics(run)[0]["metrics"], read_metrics(run)[-1]["metrics"]
    assert abs(before["heldout/margin"]) < 1e-4
    assert after["heldout/margin"] > 0.05


def test_a_reward_model_learns_it_and_loads_as_one(prefect_harness: None, data: dict[str, str], tmp_path: Path) -> None:
    """What `reward.model` of a training would load prefers the same, by the library's own forward pass as well."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = RunFolder(tmp_path / "scores")
    config = RewardModelConfig.model_validate({"model": TINY, "data": data, "trainer": TRAINER})
    final = reward_model(config, run_folder=str(run.path))
    assert finished(run)["heldout_accuracy_before"] == 0.0, "equal scores are not right"
    assert load_reward_model(final, torch.float32).config.num_labels == 1
    model = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(final)
    tokens = encode_texts(["61+61=71.", "61+61=21."], tokenizer, add_special_tokens=False)
    with torch.no_grad():
        good, bad = (model(input_ids=torch.from_numpy(row).long()[None]).logits.item() for row in tokens)
    assert good > bad


def test_a_mistake_in_the_data_ends_it_before_anything_starts(data: dict[str, str], tmp_path: Path) -> None:
    config = PreferenceConfig.model_validate({"model": TINY, "data": {**data, "rejected": "worse"}})
    with pytest.raises(UserError, match="no column 'worse'"):
        check_preferences(config)
    with pytest.raises(UserError, match="does not exist"):
        check_preferences(PreferenceConfig.model_validate({"model": TINY, "data": {"train": "absent.jsonl"}}))
