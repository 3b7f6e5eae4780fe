"""The newest file of a pattern, known by its content; and the recipe that follows from it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import mlflow
import pandas
import pytest
from mlflow.entities import DatasetInput
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.base.files import sha256
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.tasks.retraining.newest_data import NewestData, newest_data
from penstock.tasks.retraining.next_training import next_training
from penstock.trackers.mlflow import MlflowTracker, connect, default_tracking_uri
from penstock.trackers.registry import DATA, FOLDER, RUN, WEIGHTS, NewVersion, register
from penstock.trackers.table import registry_in
from penstock.trackers.tracker import NewRun


def recipe(folder: Path, **more: Any) -> TrainConfig:
    """Return a recipe with runs in a folder."""
    tree = {
        "folder": str(folder / "runs"),
        "model": {"tiny": {}},
        "data": {"train": "first.jsonl", "heldout": str(folder / "heldout.jsonl")},
        "reward": {"function": "penstock.rewards.builtin:exact_match"},
        "record": {"registered_model": "sums"},
    }
    return config_from_mapping(tree | more, "here")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of training data, the later one with the earlier name."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, prompt, at in (("b.jsonl", "1+1=", 100), ("a.jsonl", "2+2=", 200), ("heldout.jsonl", "3+3=", 300)):
        (tmp_path / name).write_text(f'{{"prompt": "{prompt}", "answer": "2."}}\n', encoding="utf-8")
        os.utime(tmp_path / name, (at, at))
    return tmp_path


def newest(folder: Path, config: TrainConfig) -> NewestData:
    with disable_run_logger():
        return newest_data.fn(str(folder / "[ab].jsonl"), config)


def learnt(folder: Path, config: TrainConfig, digest: str) -> None:
    """Register a version that has learnt from a content."""
    tracked = MlflowTracker(default_tracking_uri(Path(config.folder))).open(NewRun("one", "exp", {}))
    tags = {FOLDER: str(folder), RUN: str(folder), WEIGHTS: digest, DATA: digest}
    register(registry_in(Path(config.folder)), NewVersion("sums", tracked, tags))


def test_the_newest_file_is_new_until_a_version_has_learnt_from_it(data: Path) -> None:
    """By content: a file that is touched, or a copy, is nothing new. Controls: before, and other content."""
    config = recipe(data)
    found = newest(data, config)
    assert (found.path, found.sha256, found.learnt_by) == (str(data / "a.jsonl"), sha256(data / "a.jsonl"), None)
    assert not (data / "runs").exists()  # asking makes no store
    learnt(data, config, found.sha256)
    assert str(newest(data, config).learnt_by) == "models:/sums/1"
    (data / "b.jsonl").write_bytes((data / "a.jsonl").read_bytes())
    assert newest(data, config).path == str(data / "b.jsonl")
    assert str(newest(data, config).learnt_by) == "models:/sums/1"
    (data / "a.jsonl").write_text('{"prompt": "4+4=", "answer": "8."}\n', encoding="utf-8")
    assert newest(data, config).learnt_by is None


def test_the_newest_dataset_is_the_one_that_a_run_was_given_last(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name, whatever was written when. Controls: other names, and a source that is no file."""
    config = recipe(data)
    store = default_tracking_uri(Path(config.folder))

    def given(name: str, source: str | None, experiment: str, *more: str) -> None:
        started = next(clock)
        datasets: list[Any] = [
            mlflow.data.from_pandas(  # type: ignore[attr-defined]
                pandas.DataFrame({"prompt": [f"{started} {one}"]}), source=one, name=name
            )
            for one in (source, *more)  # of other rows each: MLflow keeps the first of datasets with equal ones
        ]
        client = connect(store)
        found = client.get_experiment_by_name(experiment)
        at = client.create_experiment(experiment) if found is None else found.experiment_id
        run = client.create_run(at, start_time=started)
        client.log_inputs(run.info.run_id, [DatasetInput(dataset._to_mlflow_entity()) for dataset in datasets])

    def asked(name: str) -> NewestData:
        with disable_run_logger():
            return newest_data.fn(f"dataset:{name}", config)

    clock = itertools.count(1000)
    with pytest.raises(UserError, match="no run was given a dataset 'sums': there is no store yet"):
        asked("sums")
    Path(config.folder).mkdir()
    given("sums", str(data / "a.jsonl"), "one")
    given("sums", str(data / "b.jsonl"), "other")
    given("others", str(data / "a.jsonl"), "one")
    found = asked("sums")
    assert (found.path, found.sha256, found.learnt_by) == (str(data / "b.jsonl"), sha256(data / "b.jsonl"), None)
    learnt(data, config, found.sha256)
    assert str(asked("sums").learnt_by) == "models:/sums/1"
    assert asked("others").learnt_by is None
    monkeypatch.chdir(data)
    given("sums", "a.jsonl", "one")  # relative to the folder where the worker runs
    assert asked("sums").sha256 == sha256(data / "a.jsonl")
    given("sums", None, "one")
    with pytest.raises(UserError, match="the dataset 'sums' comes from code"):
        asked("sums")
    given("sums", str(data / "a.jsonl"), "one", str(data / "b.jsonl"))
    with pytest.raises(UserError, match="several datasets 'sums', in no order that is known"):
        asked("sums")
    (data / "run#3").mkdir()
    (data / "run#3" / "100%25.jsonl").write_bytes((data / "a.jsonl").read_bytes())
    given("odd", str(data / "run#3" / "100%25.jsonl"), "one")
    assert asked("odd").path == str(data / "run#3" / "100%25.jsonl")
    given("others", str(data / "gone.jsonl"), "one")
    with pytest.raises(UserError, match="no such file"):
        asked("others")
    with pytest.raises(UserError, match=r"no run was given a dataset 'it's': MLflow \(.*\) has none"):
        asked("it's")


def test_what_a_retraining_needs_is_asked_for(data: Path) -> None:
    """A name in the registry, and a file."""
    with pytest.raises(UserError, match=r"needs 'record.registered_model'"):
        newest(data, recipe(data, record={}))
    with disable_run_logger(), pytest.raises(UserError, match="no file matches"):
        newest_data.fn(str(data / "absent-*.jsonl"), recipe(data))


def test_the_first_training_is_the_recipes_and_the_next_starts_from_the_newest_version(data: Path) -> None:
    """Nothing else of the recipe changes."""
    config = recipe(data)
    with disable_run_logger():
        first = next_training.fn(config, newest(data, config))
    assert (first.model, first.data.train) == (config.model, str(data / "a.jsonl"))
    assert first.model_dump(exclude={"data"}) == config.model_dump(exclude={"data"})
    with disable_run_logger(), pytest.raises(UserError, match="'arithmetic' makes its own problems"):
        next_training.fn(recipe(data, data={"arithmetic": {}}), newest(data, config))


def test_a_best_version_that_nothing_can_be_compared_with_ends_it_before_the_training(data: Path) -> None:
    """The version is of no run that is there."""
    config = recipe(data)
    learnt(data, config, "other")
    with disable_run_logger(), pytest.raises(UserError, match=r"models:/sums/1 cannot be compared: its run folder"):
        next_training.fn(config, newest(data, config))
