"""Trust does not follow a name that may be another model's tomorrow: there the recipe says which code it trusts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.base.model_code import code_of
from penstock.checks import found_models
from penstock.checks.found_models import with_models_found
from penstock.checks.hub import moves
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.tasks.evaluation.inputs import planned
from penstock.tasks.retraining.newest_data import NewestData
from penstock.tasks.retraining.next_training import next_training
from penstock.trackers.mlflow import MlflowTracker, default_tracking_uri
from penstock.trackers.registry import FOLDER, RUN, WEIGHTS, NewVersion, register, weights_digest
from penstock.trackers.table import registry_in
from penstock.trackers.tracker import NewRun
from tests.own_code.model import write_own_model
from tests.training import SHORTEST

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its own code."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_own_model(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture
def version(own: Path) -> str:
    """Version 1 of 'sums', which is that model, in the store of `runs` beside it."""
    runs = own.parent / "runs"
    tracked = MlflowTracker(default_tracking_uri(runs)).open(NewRun("one", "exp", {}))
    tags = {FOLDER: str(own), RUN: str(runs / "one"), WEIGHTS: weights_digest(own)}
    register(registry_in(runs), NewVersion("sums", tracked, tags))
    return "models:/sums/1"


def recipe(own: Path, path: str, **more: object) -> TrainConfig:
    """Return a recipe that trusts the code of a model by a name."""
    model = {"path": path, "trust_remote_code": True} | more
    data = {"train": "some.jsonl"}
    return config_from_mapping({"folder": str(own.parent / "runs"), "model": model, "data": data}, "here")


def copied_from(refused: UserError) -> dict[str, str]:
    """Return what a message asks the recipe to have as `model.code`."""
    found: dict[str, str] = yaml.safe_load(refused.remedy.partition("model.code='")[2].rpartition("'")[0])
    return found


@pytest.mark.parametrize("alias", ["best", "latest"])
def test_an_alias_is_not_trusted_as_it_is(own: Path, version: str, alias: str) -> None:
    """The message has what to copy, with which it passes. Control: a version by its number."""
    named = f"models:/sums@{alias}"
    with pytest.raises(UserError, match=f"does not say which code is trusted: {named} is no folder") as refused:
        with_models_found(recipe(own, named))
    assert copied_from(refused.value) == code_of(own)
    config = with_models_found(recipe(own, named, code=code_of(own)))
    assert (config.model.path, config.model.code) == (str(own), code_of(own))
    assert with_models_found(recipe(own, version)).model.code == code_of(own)


def test_a_branch_of_the_hub_is_not_trusted_as_it_is(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it may be downloaded. Controls: a commit; a cache that nobody renews; a folder."""
    monkeypatch.setattr(found_models, "snapshot", lambda *_: own)
    monkeypatch.chdir(own.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for named in ("org/tiny", "org/tiny@main", f"org/tiny@{COMMIT[:7]}"):
        assert moves(named)
        with pytest.raises(UserError, match=f"{named} is no folder that the recipe names"):
            with_models_found(recipe(own, named))
    assert with_models_found(recipe(own, f"org/tiny@{COMMIT}")).model.code == code_of(own)
    (own.parent / "org" / "here").mkdir(parents=True)
    assert not moves("org/here")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert with_models_found(recipe(own, "org/tiny")).model.code == code_of(own)


def test_a_retraining_says_which_code_it_trusts(own: Path, version: str) -> None:
    """It begins with whatever is the newest version. Control: with the code of that it gets as far as the data."""
    more, newest = {"record": {"registered_model": "sums"}}, NewestData("new.jsonl", "digest", None)
    config = recipe(own, str(own)).model_copy(update={"record": TrainConfig.model_validate(more).record})
    with disable_run_logger(), pytest.raises(UserError, match="models:/sums@latest is no folder that") as refused:
        next_training.fn(config, newest)
    noted = config.model_copy(update={"model": config.model.model_copy(update={"code": copied_from(refused.value)})})
    with disable_run_logger(), pytest.raises(UserError, match="data file new.jsonl does not exist"):
        next_training.fn(noted, newest)


def test_a_recipe_trusts_the_code_of_its_own_model_alone(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an evaluation, wherever that code lies. Controls: other code, by a recipe with a folder and without."""
    monkeypatch.chdir(ROOT)
    place = own.parent
    asked = ["model.tiny=null", "model.trust_remote_code=true", f"folder={place}", *SHORTEST]

    def evaluated(model: Path, named: str, *more: str) -> dict[str, str] | None:
        overrides = [*asked, f"model.path={named}", *more]
        plan = planned([str(model)], "configs/quickstart.yaml", overrides, to=str(place / "evaluated"))
        return plan.engines(plan.subjects[0]).model.code

    shutil.copytree(own, place / "copy")
    shutil.copytree(own, place / "other")
    (place / "other" / "modeling_ours.py").write_text("# another\n")
    for model in (own, place / "copy"):
        assert evaluated(model, str(own)) == code_of(own)
    with pytest.raises(UserError, match="code in .*other is not what this run trusts: modeling_ours.py"):
        evaluated(place / "other", str(own))
    with pytest.raises(UserError, match=".*other is no folder that the recipe names") as refused:
        evaluated(place / "other", "models:/sums@best")
    noted = f"model.code={yaml.safe_dump(copied_from(refused.value), default_flow_style=True, width=10**6).strip()}"
    assert evaluated(place / "other", "models:/sums@best", noted) == code_of(place / "other")
