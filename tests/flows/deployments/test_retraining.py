"""A retraining on a real server with a real worker: a short schedule fires, trains, compares, promotes, and says so."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from penstock.base.home import HOME
from penstock.cli.prefect.deploy import prefect_deploy, read_deployments
from penstock.configs.sections.data import ArithmeticData
from penstock.data.arithmetic import make_problems
from penstock.trackers.mlflow import MlflowRegistry
from penstock.trackers.registry import BEST, DATA, PARENT, VERDICT, WEIGHTS, NewVersion, best_of
from tests.flows.deployments.prefect_server import Prefect, penstock
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PATIENCE_S = 900
PROBLEMS = make_problems(ArithmeticData(sft=1, train=600, heldout=200), seed=0)


@dataclasses.dataclass(frozen=True)
class Retraining:
    """A deployment of the flow, and what it has made."""

    prefect: Prefect
    folder: Path
    name: str

    @property
    def config(self) -> dict[str, Any]:
        """A training of seconds, which learns fast to write low digits."""
        return {
            "folder": str(self.prefect.runs),
            "iterations": 4,
            "data": {"arithmetic": None, "heldout": str(self.folder / "heldout.jsonl")},
            "sft": None,
            "reward": {"function": "tests.flows.reward_functions:low_digits"},
            "rollout": {"prompts": 32, "samples": 4},
            "algorithm": {"mini_batches": 1},
            "actor": {"optimizer": {"learning_rate": 2e-3, "warmup_steps": 0}},
        }

    @property
    def parameters(self) -> dict[str, Any]:
        data = str(self.folder / "train-*.jsonl")
        asked = {"recipe": "configs/quickstart.yaml", "name": "often", "registered_model": "sums", "data": data}
        return asked | {"config": self.config}

    @property
    def registry(self) -> MlflowRegistry:
        return MlflowRegistry(f"sqlite:///{self.prefect.runs / 'mlflow.db'}")

    def deploy(self, **more: Any) -> None:
        """Deploy it under its name."""
        entry = {
            "name": self.name,
            "entrypoint": "penstock.flows.retrain.retrain",
            "parameters": self.parameters,
            **more,
        }
        # Runs that come while one trains are cancelled: on a slow machine hundreds would queue and ask again and again.
        limit = {"limit": 1, "collision_strategy": "CANCEL_NEW"}
        entry |= {"work_pool": {"name": "penstock"}, "concurrency_limit": limit}
        prefect_deploy(self.prefect.environment["PREFECT_API_URL"], "penstock", {"deployments": [entry]}, HOME)

    def add(self, name: str, rows: slice) -> None:
        """Add a file of training data, in one step."""
        aside = self.folder / f".{name}"
        PROBLEMS["train"][rows].to_json(aside, orient="records", lines=True)
        aside.rename(self.folder / name)

    def runs(self) -> list[dict[str, Any]]:
        """Return the flow runs of the deployment whose time has come."""
        wanted = {"deployments": {"name": {"any_": [self.name]}}}
        found = self.prefect.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()
        return [run for run in found if run["state_type"] != "SCHEDULED"]

    def said(self, words: str) -> dict[str, Any] | None:
        """Return the run that has completed with such words; no run may have failed."""
        runs = self.runs()
        assert not [run["state"]["message"] for run in runs if run["state_type"] in ("FAILED", "CRASHED")]
        complete = [run for run in runs if run["state_type"] == "COMPLETED"]
        return next((run for run in complete if words in str(run["state"]["message"])), None)

    def artifact(self, text: str) -> bool:
        """Whether a verdict with such a text is on a page."""
        wanted = {"artifacts": {"key": {"any_": ["retraining"]}}}
        return any(text in item["data"] for item in self.prefect.api.post("/artifacts/filter", json=wanted).json())

    def events(self, name: str) -> int:
        """Return how many events of a name the server has."""
        wanted = {"filter": {"event": {"name": [name]}}}
        return int(self.prefect.api.post("/events/filter", json=wanted).raise_for_status().json()["total"])


@pytest.fixture(scope="module")
def often(prefect: Prefect, tmp_path_factory: pytest.TempPathFactory) -> Retraining:
    folder = tmp_path_factory.mktemp("data")
    PROBLEMS["heldout"].to_json(folder / "heldout.jsonl", orient="records", lines=True)
    return Retraining(prefect, folder, "often")


def test_a_schedule_fires_trains_on_new_data_and_promotes_what_is_better(often: Retraining) -> None:
    """The first model is best, then there is nothing new, then a new file makes a better one, which starts from it."""
    often.add("train-1.jsonl", slice(0, 200))
    often.deploy(schedules=[{"interval": 30, "slug": "often", "active": True}])
    until(lambda: often.said("models:/sums/1 is best"), PATIENCE_S, "the first training ends")
    until(lambda: often.said("nothing new: models:/sums/1 has learnt from"), 90, "the next runs end at once")
    assert len(often.registry.versions("sums")) == 1

    often.add("train-2.jsonl", slice(200, 400))
    until(lambda: often.said("models:/sums/2 is better than models:/sums/1 (best)"), PATIENCE_S, "it is promoted")
    newest, first = often.registry.versions("sums")
    assert best_of(often.registry, "sums") == newest
    assert newest.tags[VERDICT].startswith("models:/sums/2 is better")
    assert newest.tags[PARENT] == "models:/sums/1"
    assert newest.tags[DATA] != first.tags[DATA]
    assert newest.run is not None
    kept = yaml.safe_load((newest.run / "config.yaml").read_text(encoding="utf-8"))
    assert kept["model"]["path"] == str(first.folder)
    assert kept["model"]["version"] == "models:/sums/1"
    until(lambda: often.artifact("# Promoted\n\nmodels:/sums/2 is better"), 30, "the page says so")
    until(lambda: often.events("penstock.model.promoted") == 2, 30, "so do events")
    assert often.events("penstock.model.kept") == 0
    run = often.said("models:/sums/2 is better")
    assert run is not None
    below = {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}}
    children = often.prefect.api.post("/flow_runs/filter", json=below).raise_for_status().json()
    assert [child["name"] for child in children] == ["train-often"]


def test_a_worse_model_is_not_promoted(often: Retraining) -> None:
    """The control: it starts from the weights of the first version, registered anew, and hardly learns."""
    api = often.prefect.api
    deployment = api.get("/deployments/name/retrain/often").raise_for_status().json()["id"]
    api.post(f"/deployments/{deployment}/pause_deployment").raise_for_status()
    until(lambda: not _under_way(often), 120, "the last scheduled run ends")
    newest, first = often.registry.versions("sums")
    tracked = often.registry._client.get_model_version("sums", "1").run_id
    often.registry.add(NewVersion("sums", tracked, {**first.tags, DATA: "of another day"}))
    often.add("train-3.jsonl", slice(400, 600))
    config = often.config | {"actor": {"optimizer": {"learning_rate": 1e-9}}}
    often.prefect.start("retrain/often", often.parameters | {"config": config})
    words = "models:/sums/4 is not better than models:/sums/2 (best)"
    until(lambda: often.said(words), PATIENCE_S, "it is judged")
    assert best_of(often.registry, "sums") == newest
    assert often.registry.aliases("sums")[BEST] == 2
    last = often.registry.versions("sums")[0]
    assert last.tags[VERDICT].startswith(words)
    assert last.tags[WEIGHTS] != newest.tags[WEIGHTS]
    until(lambda: often.artifact("# Not promoted"), 30, "the page says so")
    until(lambda: often.events("penstock.model.kept") == 1, 30, "so does an event")
    place = ("--runs", str(often.prefect.runs))
    by_hand = penstock(often.prefect.environment, "promote", "models:/sums@latest", *place)
    assert (by_hand.returncode, by_hand.stdout.startswith(words)) == (1, True)
    assert penstock(often.prefect.environment, "promote", "models:/sums@best", *place).returncode == 0


def test_events_of_its_own_trainings_start_no_retraining(often: Retraining) -> None:
    """The triggers of prefect.yaml, switched on: the second event starts a run, the first, of its own, does not."""
    (weekly,) = [item for item in read_deployments()["deployments"] if item["name"] == "weekly"]
    triggers = [{**trigger, "name": f"{trigger['name']} (test)", "enabled": True} for trigger in weekly["triggers"]]
    guarded = dataclasses.replace(often, name="guarded")
    guarded.deploy(triggers=triggers)
    for name in ("penstock.alarm.reward_collapse", "penstock.given-up"):
        before = len(_asked(guarded))
        for flow in ("retrain", "train"):
            _emit(often.prefect, name, {"prefect.resource.id": f"penstock.run.{flow}-1", "penstock.flow": flow})
        until(lambda: len(_asked(guarded)) > before, 60, "the event of another training starts a run")  # noqa: B023
        assert len(_asked(guarded)) == before + 1
    emit = ["event", "emit", "penstock.data.added", "--resource-id", "penstock.data.gsm8k"]
    command = [sys.executable, "-m", "prefect", *emit]
    subprocess.run(command, env=often.prefect.environment, check=True, timeout=300)
    until(lambda: len(_asked(guarded)) == 3, 60, "so do new data")


def _under_way(retraining: Retraining) -> list[dict[str, Any]]:
    return [run for run in retraining.runs() if run["state_type"] in ("RUNNING", "PENDING")]


def _emit(prefect: Prefect, name: str, resource: dict[str, str]) -> None:
    event = {"event": name, "resource": resource, "occurred": datetime.now(UTC).isoformat(), "id": str(uuid4())}
    prefect.api.post("/events", json=[event | {"related": [], "payload": {}}]).raise_for_status()


def _asked(retraining: Retraining) -> list[dict[str, Any]]:
    wanted = {"deployments": {"name": {"any_": [retraining.name]}}}
    return list(retraining.prefect.api.post("/flow_runs/filter", json=wanted).raise_for_status().json())
