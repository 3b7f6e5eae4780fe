"""An evaluation by itself has the figures of the one inside the training, bit for bit on the CPU, for the same weights.

A training with a KL and several responses per prompt stands for single responses, the calculator for episodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from penstock.base.errors import UserError
from penstock.cli.runs.evaluating import evaluated
from penstock.configs.loading.load import load_config
from penstock.flows.evaluate import evaluate
from penstock.flows.export import export
from penstock.flows.train import train
from penstock.state.experience import column_names, read_columns
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.mlflow import connect, default_tracking_uri

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "iterations=3",
    "model.tiny.hidden_size=128",
    "model.tiny.heads=4",
    "model.tiny.kv_heads=4",
    "data.arithmetic={digits: 2, sft: 256, train: 64, heldout: 48}",
    "sft.steps=10",
    "reward.function=tests.flows.reward_functions:low_digit",
    "rollout={prompts: 16, samples: 4, max_response_tokens: 6, max_sequences: 64}",
    "actor.optimizer={learning_rate: 3e-3, warmup_steps: 0}",
    "evaluate={every: 2, temperature: 1.0, samples: 4}",
    "checkpoint={every: 2, keep: 3}",
    "algorithm.kl={coefficient: 0.01}",
    "algorithm.mini_batch_of=prompts",  # by which so short a training is surely better than the model before it
    "record.experiment=evaluated",
)
CALCULATOR = (
    "iterations=1",
    "data.arithmetic={digits: 2, calls: 0.4, sft: 512, train: 64, heldout: 24}",
    "sft.steps=20",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 20, max_sequences: 64}",
    "evaluate={every: 0, temperature: 1.0, samples: 2}",
    "checkpoint.every=0",
    "record.experiment=evaluated",
)


@pytest.fixture(scope="module")
def trained(prefect_harness: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished training."""
    return finished(tmp_path_factory.mktemp("runs") / "trained", "quickstart", SMALL)


def finished(folder: Path, recipe: str, overrides: tuple[str, ...]) -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train(load_config(ROOT / "configs" / f"{recipe}.yaml", list(overrides)), run_folder=str(folder))
    return RunFolder(folder)


@pytest.fixture(scope="module")
def results(trained: RunFolder) -> Path:
    """The final model, a checkpoint, and the model before reinforcement learning, by the run's own recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        models = [trained.path, trained.checkpoint(2), trained.model("sft")]
        return Path(evaluate([str(path) for path in models]))


def recorded(run: RunFolder, iteration: int) -> dict[str, float]:
    """Return what the training recorded of an evaluation."""
    (found,) = [record["metrics"] for record in read_metrics(run) if record["iteration"] == iteration]
    return {name: value for name, value in found.items() if name.startswith("heldout/")}


def kept(results: Path, label: str) -> dict[str, float]:
    """Return the figures of a model."""
    found: dict[str, float] = json.loads((results / "evaluation.json").read_text(encoding="utf-8"))["figures"][label]
    return found


@pytest.mark.parametrize(("label", "iteration"), [("trained", 3), ("trained-000002", 2), ("trained-sft", 0)])
def test_the_same_weights_have_the_same_figures(trained: RunFolder, results: Path, label: str, iteration: int) -> None:
    """Of the final model, of a checkpoint's state, and of the model before training: all figures, KL and intervals."""
    figures = recorded(trained, iteration)
    assert kept(results, label) == figures
    assert {"heldout/kl/low", "heldout/pass_at_2/high", "heldout/distinct_2"} <= figures.keys()
    ours, theirs = results / label / "evaluation" / f"{iteration:06d}.parquet", trained.evaluation(iteration)
    names = column_names(theirs)
    assert column_names(ours) == names
    for name, column in read_columns(ours, names).items():
        other = read_columns(theirs, [name])[name]
        pd.testing.assert_series_equal(pd.Series(_flat(column)), pd.Series(_flat(other)))


def _flat(column: object) -> object:
    return getattr(column, "values_T", column)


def test_another_model_differs(results: Path) -> None:
    """The control: three trained states, three sets of figures."""
    figures = [kept(results, label) for label in ("trained", "trained-000002", "trained-sft")]
    for name in ("heldout/reward", "heldout/kl", "heldout/ngram_entropy_2"):
        assert len({item[name] for item in figures}) == 3


def test_differences_are_those_of_the_prompts(results: Path) -> None:
    """The table and the files agree with the values per prompt; the first model is what others differ from."""
    content = json.loads((results / "evaluation.json").read_text(encoding="utf-8"))
    values = pd.read_parquet(results / "evaluation.parquet")
    assert list(values.columns) == ["model", "figure", "prompt", "value"]
    rewards = values[values["figure"] == "heldout/reward"].pivot(index="prompt", columns="model", values="value")
    assert len(rewards) == 48
    expected = (rewards["trained-sft"] - rewards["trained"]).mean()
    assert content["differences"]["to"] == "trained"
    found = content["differences"]["of"]["trained-sft"]
    assert found["heldout/reward"] == pytest.approx(expected)
    assert found["heldout/reward/low"] <= found["heldout/reward"] <= found["heldout/reward/high"] < 0
    page = (results / "evaluation.md").read_text(encoding="utf-8")
    assert "| trained-sft - trained" in page
    assert "pass@4" in page
    assert load_config(results / "recipe.yaml") == load_config(RunFolder(Path(content["recipe"].split()[-1])).config)


def test_the_tracker_has_a_run_for_each_model(results: Path) -> None:
    """With tags that say what was evaluated; the training's own run stays as it was."""
    client = connect(default_tracking_uri(results.parents[1]))
    experiment = client.get_experiment_by_name("evaluated")
    runs = client.search_runs([experiment.experiment_id], "tags.`penstock.kind` = 'evaluate'")
    found = {run.data.tags["penstock.evaluated.model"]: run for run in runs}
    assert found.keys() == {"trained", "trained-000002", "trained-sft"}
    checkpoint = found["trained-000002"]
    assert checkpoint.info.status == "FINISHED"
    assert checkpoint.data.tags["penstock.evaluated.checkpoint"] == "000002"
    assert checkpoint.data.tags["penstock.evaluated.source"].endswith("checkpoints/000002")
    assert checkpoint.data.metrics["heldout/kl"] == kept(results, "trained-000002")["heldout/kl"]
    assert [item.path for item in client.list_artifacts(checkpoint.info.run_id)] == ["evaluation.json", "evaluation.md"]


def test_nothing_of_an_evaluation_lies_in_the_run_and_no_weights_stay(trained: RunFolder, results: Path) -> None:
    """What a checkpoint's weights were written to goes with the evaluation."""
    assert results.parent == trained.path.parent / "evaluations"
    assert not list(results.rglob("*.safetensors"))
    assert not any("evaluat" in path.name for path in trained.path.iterdir() if path != trained.path / "evaluation")


@pytest.mark.exhaustive
def test_an_export_of_a_checkpoint_has_its_figures(
    trained: RunFolder,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A Hugging Face folder and a recipe, on two ranks of which each holds a part of the model, as a command.

    Rounding may differ there; greedy responses do not depend on the iteration. Control: the final model's differ.
    """
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="there are 000002, 000003"):
        export(str(trained.path), checkpoint="000001", to=str(tmp_path / "model"))
    folder = export(str(trained.path), checkpoint="000002", to=str(tmp_path / "model"))
    greedy = "evaluate={temperature: 0.0, samples: 1, evaluators: [rewards, length]}"
    apart = ["groups.main={ranks: 2, roles: [actor, rollout, reference]}", "rollout.tensor_parallel=2"]
    words = [folder, str(trained.path), str(trained.config), greedy, *apart]
    evaluated(words, None, None, tmp_path / "apart")
    assert "mean reward" in capsys.readouterr().out
    together = Path(evaluate([str(trained.checkpoint(2))], str(trained.config), [greedy], to=str(tmp_path / "one")))
    ours, theirs = kept(tmp_path / "apart", "model"), kept(together, "trained-000002")
    assert ours == pytest.approx(theirs, abs=0.03)
    assert kept(tmp_path / "apart", "trained") != pytest.approx(theirs, abs=0.03)


def test_episodes_have_the_same_figures(prefect_harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is played anew, with the seeds of the training's own evaluation."""
    run = finished(tmp_path / "runs" / "calculator", "calculator", CALCULATOR)
    monkeypatch.chdir(ROOT)
    found = kept(Path(evaluate([str(run.path)])), "calculator")
    assert found == recorded(run, 1)
    assert found != recorded(run, 0)
