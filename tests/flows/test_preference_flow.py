"""The flows before reinforcement learning: they learn what is preferred, and leave models that are taken further."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.settings import PREFECT_API_URL
from transformers import AutoModelForSequenceClassification, Qwen2Config

from penstock.base.errors import UserError
from penstock.checks import memory
from penstock.checks.model.folder import check_model_folder
from penstock.checks.preferences import check_preferences
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.data.prompts import encode_texts
from penstock.engines.models.loading import load_reward_model
from penstock.engines.sizing.memory import PHASES
from penstock.flows.preference import preference
from penstock.flows.reward_model import reward_model
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.mlflow import connect, default_tracking_uri
from tests.comparing import numbers
from tests.delivering import tracked_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = {"tiny": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 96}}
STEPS = 12
TRAINER = {
    "steps": STEPS,
    "batch": 16,
    "checkpoint_every": 5,
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2, "decay": "linear"},
}
# Trains as the flow does, and is killed when the second block of steps is recorded and not yet in a checkpoint.
DIES = """
import os, signal, sys
from penstock.configs.preference import PreferenceConfig
from penstock.flows import finetuning
from penstock.flows.preference import preference

steps = finetuning.preference_steps

def dying(training, config, units, first, count):
    steps(training, config, units, first, count)
    if first:
        training.session().checkpoints.wait()  # for the first one, which is written meanwhile
        os.kill(os.getpid(), signal.SIGKILL)

finetuning.preference_steps = dying
preference(PreferenceConfig.model_validate_json(sys.argv[1]), run_folder=sys.argv[2])
"""

# Is killed when the model has its name, before anything else; a resume of it before MLflow hears its end.
DIES_AT_THE_END = """
import os, signal, sys
from penstock.configs.preference import PreferenceConfig
from penstock.flows.preference import preference
from penstock.trackers.mlflow import MlflowTracker
from penstock.tasks.finetuning import checkpoints as finetuning

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1]:
    finetuning.finetuned = die
    preference(PreferenceConfig.model_validate_json(sys.argv[1]), run_folder=sys.argv[2])
MlflowTracker.close = die
preference(resume=sys.argv[2])
"""


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


def finished(run: RunFolder) -> dict[str, Any]:
    """Check what every such run leaves, also if its last attempt loaded no model; return its summary."""
    records = read_metrics(run)
    assert [record["iteration"] for record in records] == list(range(STEPS + 1))
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["attention"] == "PyTorch's, of rows side by side"
    assert summary["recomputed"] == "nothing"
    assert summary["heldout_accuracy"] == records[-1]["metrics"]["heldout/accuracy"] > 0.9
    assert summary["loss_last"] < summary["loss_first"]
    uri = default_tracking_uri(run.path.parent)
    logged = connect(uri).get_run(summary["tracked"][0]["run"])
    assert logged.info.status == "FINISHED"
    assert logged.data.metrics["heldout/accuracy"] == summary["heldout_accuracy"]
    check_model_folder(run.model("final"), "model.path")
    assert not [*run.path.rglob("*.partial"), *run.path.rglob("*.part")]
    assert [path.name for path in run.finetuning.checkpoints.iterdir()] == [f"{STEPS:06d}"], "to go on for longer"
    return summary


@pytest.fixture(scope="module")
def config(data: dict[str, str]) -> PreferenceConfig:
    values = {"name": "dpo", "experiment": "preferring", "model": TINY, "data": data, "trainer": TRAINER}
    return PreferenceConfig.model_validate(values)


@pytest.fixture(scope="module")
def alone(prefect_harness: None, config: PreferenceConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A training by DPO that nobody disturbs."""
    run = RunFolder(tmp_path_factory.mktemp("runs") / "dpo")
    assert preference(config, run_folder=str(run.path)) == str(run.model("final"))
    return run


def test_a_policy_learns_what_is_preferred(alone: RunFolder) -> None:
    """DPO: loss log 2 and no margin at first, held-out pairs right at the end."""
    summary = finished(alone)
    client = connect(default_tracking_uri(alone.path.parent))
    logged = client.get_run(summary["tracked"][0]["run"])
    assert client.get_experiment(logged.info.experiment_id).name == "preferring"
    assert summary["loss_first"] == pytest.approx(0.6931, abs=1e-3)
    before, after = read_metrics(alone)[0]["metrics"], read_metrics(alone)[-1]["metrics"]
    assert abs(before["heldout/margin"]) < 1e-4
    assert after["heldout/margin"] > 0.05


def test_a_killed_training_goes_on_as_one_left_alone(
    alone: RunFolder, config: PreferenceConfig, tmp_path: Path
) -> None:
    """After SIGKILL: weights and figures are equal to the last bit, MLflow has each step once, nothing is left over.

    Controls: steps were lost and done again, and the weights are not those of the start.
    """
    run = RunFolder(tmp_path / "killed")
    process = [sys.executable, "-c", DIES, config.model_dump_json(exclude={"base"}), str(run.path)]
    environment = os.environ | {"PREFECT_API_URL": str(PREFECT_API_URL.value())}
    ended = subprocess.run(process, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert read_manifest(run.finetuning).progress.iteration == 5
    assert [record["iteration"] for record in read_metrics(run)] == list(range(11))
    run_id = tracked_run(run)

    assert preference(resume=str(run.path)) == str(run.model("final"))
    assert finished(run)["tracked"][0]["run"] == run_id
    assert numbers(run) == numbers(alone)
    assert weights(run, "final") == weights(alone, "final")
    assert weights(alone, "final") != weights(alone, "initial")
    client = connect(default_tracking_uri(run.path.parent))
    assert [entry.step for entry in client.get_metric_history(run_id, "loss")] == list(range(1, STEPS + 1))

    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    assert preference(resume=str(run.path)) == str(run.model("final"))
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before, "complete: nothing starts"


@pytest.mark.exhaustive
def test_a_training_killed_in_its_end_does_the_end_again(
    alone: RunFolder, config: PreferenceConfig, tmp_path: Path
) -> None:
    """Twice killed, it never calls itself complete; resumed, everything is there, and no step is taken again."""
    run = RunFolder(tmp_path / "killed")
    environment = os.environ | {"PREFECT_API_URL": str(PREFECT_API_URL.value())}
    for tree in (config.model_dump_json(exclude={"base"}), ""):
        process = [sys.executable, "-c", DIES_AT_THE_END, tree, str(run.path)]
        ended = subprocess.run(process, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert run.model("final").exists()
        assert not run.summary.exists()
    recorded = run.metrics.read_bytes()
    assert preference(resume=str(run.path)) == str(run.model("final"))
    finished(run)
    assert run.metrics.read_bytes() == recorded
    assert weights(run, "final") == weights(alone, "final")


def weights(run: RunFolder, name: str) -> bytes:
    """Return the file of a model of the run."""
    return (run.model(name) / "model.safetensors").read_bytes()


def test_a_reward_model_learns_it_and_loads_as_one(prefect_harness: None, data: dict[str, str], tmp_path: Path) -> None:
    """What `reward.model` of a training would load prefers the same, by the library's own forward pass as well."""
    from transformers import AutoTokenizer

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


@pytest.mark.parametrize("labels", [1, 3])
def test_a_reward_model_does_not_start_from_a_classifier_with_several_labels(
    labels: int, data: dict[str, str], tmp_path: Path
) -> None:
    """One message before any engine starts. Controls: a reward model, and a policy from the same folder."""
    settings = Qwen2Config(
        num_labels=labels,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=8,
    )
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    tree = {"model": {"path": str(tmp_path)}, "data": data}
    check_preferences(PreferenceConfig.model_validate(tree))
    if labels == 1:
        check_preferences(RewardModelConfig.model_validate(tree))
        return
    with pytest.raises(UserError, match="a classifier with 3 labels"):
        check_preferences(RewardModelConfig.model_validate(tree))


def test_too_little_memory_is_seen_before_anything_starts(
    data: dict[str, str], config: PreferenceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the section's own keys. Control: just enough passes."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 64 << 30)
    (needed,) = memory.estimate_groups(config.engines(), PHASES["sft"])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: needed.memory.total)
    memory.check_finetuning_memory(config.engines(), "trainer")
    monkeypatch.setattr(memory, "free_host_bytes", lambda: needed.memory.total - 1)
    with pytest.raises(UserError, match=r"(?s)trainer\.zero_stage"):
        memory.check_finetuning_memory(config.engines(), "trainer")
