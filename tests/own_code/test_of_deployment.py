"""A form of a deployment cannot trust code: whatever it names, only models that the operator lists may bring theirs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.loading.form import config_from_form
from penstock.configs.schema import TrainConfig
from penstock.session.opening import TRAIN, Resume, opened
from penstock.session.session import write_config
from penstock.state.experience import write_columns
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder
from penstock.tasks.evaluation.inputs import planned
from penstock.tasks.export_run import export_run, export_version
from penstock.trackers.registry import FOLDER, RUN, Version
from tests.own_code.model import write_own_model
from tests.state.checkpoints import write_checkpoint
from tests.training import SHORTEST

ROOT = Path(__file__).resolve().parents[2]
KIND = replace(TRAIN, first=lambda _: None)  # without a server


@dataclass(frozen=True)
class Place:
    """A folder that is somebody's, with a model whose code tells that it ran, and a run that trusts that code."""

    path: Path

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def ran(self) -> Path:
        return self.path / "ran"

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path / "run")

    def config(self) -> TrainConfig:
        """Return what a form makes of the model's name, and of the key that trusts it."""
        given = ["model.tiny=null", "model.trust_remote_code=true", f"folder={self.path}", *SHORTEST]
        return config_from_form(TrainConfig, "configs/quickstart.yaml", {"model.path": str(self.model)}, given, None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Such a folder, as a terminal makes it."""
    monkeypatch.chdir(ROOT)
    place = Place(tmp_path)
    write_own_model(place.model)
    with (place.model / "configuration_ours.py").open("a", encoding="utf-8") as code:
        code.write(f"\n\nopen({str(place.ran)!r}, 'w')\n")
    with disable_run_logger(), opened(KIND, place.config(), str(place.run.path), None) as (config, run):
        write_config(run, config)
    shutil.copytree(place.model, run.model("final"))
    run.prompts("train").parent.mkdir()
    write_columns(run.prompts("train"), {"prompt_tokens": Ragged.of([np.arange(3, 9)], np.int32)})
    saved = Manifest(Progress(iteration=1), checkpoint="000001", kind="train", model=str(place.model))
    write_checkpoint(run, saved)
    write_manifest(run, saved)
    assert not place.ran.exists(), "what is checked before a start loads no code"
    return place


def trains(place: Place) -> None:
    """A new training, by a form."""
    with disable_run_logger(), opened(KIND, place.config(), str(place.path / "new"), None):
        pass


def goes_on(place: Place) -> None:
    """A run that is named to be continued."""
    with disable_run_logger(), opened(KIND, TrainConfig(), None, Resume(place.run.path)):
        pass


def evaluates(place: Place) -> None:
    """A run that is named to be evaluated."""
    planned([str(place.run.path)], to=str(place.path / "evaluated"))


def exports(place: Place) -> None:
    """A run that is named to be exported."""
    export_run(place.run, None, None)
    assert place.ran.exists()


def exports_a_version(place: Place) -> None:
    """A registered model of such a run."""
    version = Version("ours", 1, {FOLDER: str(place.run.model("final")), RUN: str(place.run.path)})
    export_version(version, place.path / "version", None)
    assert place.ran.exists()


ASKED = pytest.mark.parametrize("asked", [trains, goes_on, evaluates, exports, exports_a_version])


@ASKED
def test_a_form_loads_the_code_of_listed_models_alone(
    place: Place, asked: Callable[[Place], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the listed one passes, for its content is the same. Controls: none is listed; another one is."""
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "d")
    write_own_model(place.path / "another")
    for listed in ("", str(place.path / "another"), str(place.path / "nowhere")):
        monkeypatch.setenv("PENSTOCK_TRUSTED_MODELS", listed)
        with pytest.raises(UserError, match="may not be loaded in a run of a deployment: .*PENSTOCK_TRUSTED_MODELS"):
            asked(place)
        assert not place.ran.exists()
    shutil.copytree(place.model, place.path / "listed")
    monkeypatch.setenv("PENSTOCK_TRUSTED_MODELS", os.pathsep.join((listed, str(place.path / "listed"))))
    asked(place)


@ASKED
def test_a_person_at_a_terminal_trusts_by_the_recipe(place: Place, asked: Callable[[Place], None]) -> None:
    """The control, with no model listed."""
    asked(place)


@pytest.mark.parametrize("sign", ["PREFECT__FLOW_RUN_ID", "PREFECT__DEPLOYMENT_ID"])
def test_a_worker_is_known_by_what_it_starts_with(place: Place, sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each of them, for a sweep's trainings have one alone."""
    monkeypatch.setenv(sign, "an id")
    with pytest.raises(UserError, match="run of a deployment"):
        trains(place)
    assert not (place.path / "new").exists()
