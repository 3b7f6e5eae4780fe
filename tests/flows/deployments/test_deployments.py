"""Penstock on a real Prefect server with a real worker: what is deployed, what is refused, and how runs end.

The tests share one server and one worker, and run in the order of a day: deploy, train, change, cancel, crash.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import WorkPool
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.importtools import import_object

from penstock.base.errors import UserError
from penstock.cli.prefect.deploy import KEPT_ALIVE, ZOMBIES, ensure_pool, read_deployments, zombie_automation
from penstock.configs.loading.load import load_config
from penstock.session.flow_runs.kept_alive import KEEP_ALIVE, STARTED_AGAIN
from penstock.session.settings import variable_name
from penstock.state.events import RECOVERED, read_events
from penstock.state.run_folder import RunFolder, read_metrics
from tests.flows.deployments.prefect_server import Prefect, penstock
from tests.processes import alive
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
TRAIN, SFT, PREFERENCE = "train/quickstart", "sft/quickstart", "preference/dpo"
SLOTS = "gpus-held"  # of the pool of tests/flows/deployments/holding.py
ENDED = ("Completed", "Failed", "Crashed", "Cancelled")
EVALUATE, EXPORT, RETRAIN = "evaluate/models", "export/runs", "retrain/weekly"
OTHERS = {"reward-model/pairs", "compare/runs", "sweep/quickstart", "chain/sums", RETRAIN, EVALUATE, EXPORT}
NAMES = {TRAIN, "train/grpo-gsm8k", "train/ppo-gsm8k", SFT, PREFERENCE, *OTHERS}


@dataclass(frozen=True)
class Lost:
    """A run of a machine that went down: what it was, and what it held right after."""

    run: str
    state: str
    deployment_limit: str
    gpus: int
    deployment: int


@pytest.fixture(scope="module")
def lost(prefect: Prefect, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """A worker of its own with a run that holds a GPU slot and its deployment's, both killed as by a loss of power.

    An automation like the deployed one watches this run alone, and loses its patience sooner.
    """
    limit = {"name": "lost", "entrypoint": "tests/flows/deployments/holding.py:hold", "concurrency_limit": 1}
    place = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    server = temporary_settings({PREFECT_API_URL: prefect.environment["PREFECT_API_URL"]})
    with server, get_client(sync_client=True) as client:
        ensure_pool(client, "lost")
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=SLOTS, limit=1))
        flow = prefect.api.post("/flows/", json={"name": "hold"}).raise_for_status().json()["id"]
        wanted = {**limit, "flow_id": flow, "work_pool_name": "lost", "pull_steps": [place]}
        deployment = prefect.api.post("/deployments/", json=wanted).raise_for_status().json()
        run = prefect.start("hold/lost", {})
        watched = ResourceSpecification({"prefect.resource.id": f"prefect.flow-run.{run}"})
        automation = zombie_automation(timedelta(seconds=30))
        trigger = automation.trigger.model_copy(update={"match": watched})
        client.create_automation(automation.model_copy(update={"name": "impatient", "trigger": trigger}))
    with (tmp_path_factory.mktemp("lost") / "worker.log").open("wb") as log:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "lost"]
        worker = subprocess.Popen(command, env=prefect.environment, stdout=log, stderr=log, cwd=ROOT)
    try:
        until(lambda: prefect.occupied(SLOTS) == 1, 90, "the run holds its slot")
        until(lambda: prefect.heartbeats(run), 30, "the server hears the run, so that it can miss it")
    finally:
        everyone = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
        for process in everyone:
            process.suspend()  # nobody sees another die
        for process in everyone:
            process.kill()
        worker.wait(20)
    deployment_limit = deployment["global_concurrency_limit"]["name"]
    held = prefect.occupied(SLOTS), prefect.occupied(deployment_limit)
    return Lost(run, prefect.state(run), deployment_limit, *held)


def test_deploying_again_changes_nothing(prefect: Prefect) -> None:
    """Pool, automation and deployments are there once, and the same after a second `penstock deploy`.

    Control: one as for three GPUs in between, on which three runs of a deployment may be, but of a retraining one.
    """
    before = prefect.everything()
    assert penstock(prefect.environment, "deploy", "--runs", "3").returncode == 0
    assert [prefect.runs_at_once(name) for name in (TRAIN, EVALUATE, RETRAIN)] == [3, 3, 1]
    again = penstock(prefect.environment, "deploy")
    assert again.returncode == 0, again.stderr
    assert prefect.everything() == before
    names = [item["name"] for item in before.values() if not item["name"].startswith("deployment:")]  # Prefect's own
    (weekly,) = [item for item in read_deployments()["deployments"] if item["name"] == "weekly"]
    triggers = [trigger["name"] for trigger in weekly["triggers"]]
    assert len(triggers) == 3
    assert not any(before[name]["enabled"] for name in triggers)
    automations = [ZOMBIES, KEPT_ALIVE, *triggers]
    assert sorted(names) == sorted(["penstock", *automations, *(name.partition("/")[2] for name in NAMES)])
    assert all(name in again.stdout for name in NAMES)
    assert "prefect worker start --pool penstock" in again.stdout


def test_a_pool_that_a_worker_makes_meanwhile_is_taken(prefect: Prefect, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefect worker start` makes its pool where there is none, just when `penstock deploy` has looked for it.

    Control: one that was made of another type is refused.
    """
    server = temporary_settings({PREFECT_API_URL: prefect.environment["PREFECT_API_URL"]})
    with server, get_client(sync_client=True) as client:
        read = client.read_work_pool

        def made_meanwhile(name: str) -> WorkPool:
            monkeypatch.setattr(client, "read_work_pool", read)
            ensure_pool(client, name)
            raise ObjectNotFound(Exception("there was none"))

        for name, kind in (("meanwhile", "process"), ("of-another-type", "kubernetes")):
            monkeypatch.setattr(client, "read_work_pool", made_meanwhile)
            refused = pytest.raises(UserError, match="of type 'process'") if kind != "process" else nullcontext()
            with refused:
                ensure_pool(client, name, kind)
            assert read(name).type == "process"
            prefect.api.delete(f"/work_pools/{name}").raise_for_status()


def test_deployments_hold_no_path_of_this_machine_but_the_working_directory(prefect: Prefect) -> None:
    """The weekly schedule sleeps, trainings are admitted one by one, and only `pull` names this folder."""
    for name in sorted(NAMES):
        found = prefect.api.get(f"/deployments/name/{name}").raise_for_status().json()
        assert found["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
        assert str(ROOT) not in json.dumps(found | {"pull_steps": None})
        assert found["description"]
        assert found["tags"]
        assert [item["slug"] for item in found["schedules"]] == ["weekly"] * (name == RETRAIN)
        assert not any(item["active"] for item in found["schedules"])
        if not name.startswith(("compare/", "export/")):
            assert found["global_concurrency_limit"]["limit"] == 1
            assert found["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    assert str(ROOT) not in (ROOT / "prefect.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"iterations": 0}, "0 is less than the minimum of 1"),
        ({"overrides": ["nonsense"]}, "'nonsense' does not match"),
        ({"recipe": "configs/dpo.yaml"}, "'configs/dpo.yaml' is not one of"),
        ({"config": {"iterations": 0}}, "0 is less than the minimum of 1"),
        ({"config": {"iteratoins": 2}}, "'iteratoins' was unexpected"),
        ({"config": {"algorithm": {"name": "grop"}}}, "'grop' is not one of"),
    ],
)
def test_bad_parameters_are_refused_when_the_run_is_asked_for(
    prefect: Prefect, given: dict[str, Any], reason: str
) -> None:
    """The server refuses them with the key and the reason; no run is made. Control: the next test's are accepted."""
    answer = prefect.trigger(TRAIN, prefect.parameters("refused") | given)
    assert answer.is_client_error
    assert reason in answer.text
    assert prefect.api.post("/flow_runs/filter", json={}).json() == []


def test_a_lost_machine_says_nothing(lost: Lost) -> None:
    """Its run goes on for the server and holds what it held: the control of the last test, which sees it end."""
    assert (lost.state, lost.gpus, lost.deployment) == ("Running", 1, 1)


@pytest.mark.parametrize(
    ("deployment", "changed", "words"),
    [
        (TRAIN, {"iterations": 7, "learning_rate": 1e-5}, ["iterations=7", "actor.optimizer.learning_rate=1e-5"]),
        pytest.param(
            SFT,
            {"steps": 9, "overrides": ["sft.batch=64"]},
            ["sft.steps=9", "sft.batch=64"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_form_trains_the_recipe_and_a_field_filled_in_it_changes_that_key_alone(
    prefect: Prefect, deployment: str, changed: dict[str, Any], words: list[str]
) -> None:
    """As on the command line. Untouched it sends its recipe alone, which the deployment has from prefect.yaml."""
    found = prefect.api.get(f"/deployments/name/{deployment}").raise_for_status().json()
    assert found["parameters"] == {"recipe": "configs/quickstart.yaml"}
    folder = prefect.runs / f"form-{deployment.partition('/')[0]}"
    run = prefect.start(deployment, {**found["parameters"], **changed, "run_folder": str(folder)})
    until((folder / "config.yaml").is_file, 120, "the run opens its folder")
    prefect.cancel(run)
    assert load_config(folder / "config.yaml") == load_config(ROOT / "configs/quickstart.yaml", words)
    until(lambda: prefect.state(run) == "Cancelled", 60, "the run is Cancelled")


@pytest.mark.parametrize(
    ("deployment", "given", "words"),
    [
        (TRAIN, {"overrides": ["rollout.sampels=4"]}, ["train", "configs/quickstart.yaml", "rollout.sampels=4"]),
        (SFT, {"model": "absent"}, ["sft", "configs/quickstart.yaml", "model.path=absent"]),
        pytest.param(
            TRAIN,
            {"overrides": ["model={path: absent, tiny: null}"]},
            ["train", "configs/quickstart.yaml", "model={path: absent, tiny: null}"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_only_the_run_can_see_fails_it_in_the_words_of_the_terminal(
    prefect: Prefect, deployment: str, given: dict[str, Any], words: list[str]
) -> None:
    """Neither its state nor its log has a traceback. Control: the terminal refuses with the same words, exit code 2."""
    run = prefect.start(deployment, {**given, "run_folder": str(prefect.runs / "absent")})
    refused = penstock(prefect.environment, *words)
    until(lambda: prefect.state(run) == "Failed", 60, "the run fails")
    assert refused.returncode == 2
    assert refused.stderr == f"error: {prefect.message(run)}\n"
    until(lambda: prefect.logged("exited with status code", run), 60, "its process has ended, and all is logged")
    assert prefect.logged(prefect.message(run), run)
    assert not prefect.logged("Traceback", run)
    assert not (prefect.runs / "absent").exists()


def test_the_worker_trains_and_a_second_training_waits_and_is_steered_and_cancelled(prefect: Prefect) -> None:
    """One training completes while the next one queues; that one takes live values up, and ends when cancelled."""
    short = prefect.start(TRAIN, prefect.parameters("short", iterations=2, sft={"steps": 10}))
    until(lambda: prefect.state(short) == "Running", 60, "the worker starts the first run")
    slow = {"iterations": 100_000, "sft": None, "checkpoint": {"every": 1}, "rollout": {"prompts": 512}}
    long = prefect.start(TRAIN, prefect.parameters("long", **slow))
    until(lambda: prefect.state(long) == "AwaitingConcurrencySlot", 60, "the second run waits")
    assert prefect.state(short) == "Running"

    until(lambda: prefect.state(short) not in ("Running", "Pending"), 180, "the first run ends")
    assert prefect.state(short) == "Completed"
    summary = json.loads((prefect.runs / "short" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "completed"
    assert summary["iterations"] == 2
    assert summary["prefect_flow_run_id"] == short

    manifest = prefect.runs / "long" / "manifest.json"
    until(lambda: manifest.is_file() and _progress(manifest)["iteration"] > 0, 180, "the second run iterates")
    assert not _progress(manifest)["overrides"]
    variable = variable_name(RunFolder(prefect.runs / "long"))
    assert prefect.variable(variable) == {}
    assert prefect.variable(variable_name(RunFolder(prefect.runs / "short"))) is None
    found = prefect.api.post("/artifacts/filter", json={"artifacts": {"key": {"any_": ["live-values"]}}}).json()
    assert [item["description"] for item in found if item["flow_run_id"] == long] == [variable]
    change = ("set", str(prefect.runs / "long"))
    refused = penstock(prefect.environment, *change, "rollout.samples=4")
    assert refused.returncode == 2
    assert "cannot change during this run" in refused.stderr
    said = penstock(prefect.environment, *change, "rollout.temperature=0.5")
    assert said.stdout == f"from the next iteration on:\nrollout.temperature: 0.5\nPrefect Variable: {variable}\n"
    until(lambda: _progress(manifest)["overrides"] == {"rollout.temperature": 0.5}, 30, "it takes the live value up")
    assert penstock(prefect.environment, *change, "--clear").returncode == 0
    until(lambda: not _progress(manifest)["overrides"], 30, "it takes the live value back")
    prefect.edit(variable, {"rollout.temperature": 0.25})
    until(lambda: _progress(manifest)["overrides"] == {"rollout.temperature": 0.25}, 30, "it takes the page's value up")
    prefect.edit(variable, {"rollout.temperature": "hot"})
    until(lambda: prefect.logged(f"the Variable {variable} is refused, the run goes on as before"), 30, "it is refused")
    assert _progress(manifest)["overrides"] == {"rollout.temperature": 0.25}

    ranks = prefect.ranks()
    assert ranks
    assert all(alive(rank) for rank in ranks)
    prefect.cancel(long)
    until(lambda: not any(alive(rank) for rank in ranks), 45, "the ranks are gone")
    until(lambda: prefect.state(long) == "Cancelled", 30, "the run is Cancelled")
    assert json.loads((prefect.runs / "long" / "summary.json").read_text(encoding="utf-8"))["status"] == "cancelled"


def test_the_worker_evaluates_and_exports_what_it_has_trained(prefect: Prefect) -> None:
    """Of the run of the test before. What is not there is refused with the command's message, and leaves nothing."""
    run, before = prefect.runs / "short", sorted(prefect.runs.iterdir())
    wrong = prefect.start(EVALUATE, {"models": [str(prefect.runs / "shrot")]})
    until(lambda: prefect.state(wrong) == "Failed", 120, "a model that is not there fails the run")
    message = prefect.api.get(f"/flow_runs/{wrong}").raise_for_status().json()["state"]["message"]
    assert f"there is no folder {prefect.runs / 'shrot'}" in message
    assert sorted(prefect.runs.iterdir()) == before
    assert prefect.trigger(EXPORT, {"to": "somewhere"}).is_client_error  # of which run?

    to = prefect.runs / "evaluated"
    asked = {"models": [str(run)], "overrides": ["evaluate.prompts=20"], "to": str(to)}
    evaluation = prefect.start(EVALUATE, asked)
    until(lambda: prefect.state(evaluation) in ENDED, 240, "the evaluation ends")
    assert prefect.state(evaluation) == "Completed"
    content = json.loads((to / "evaluation.json").read_text(encoding="utf-8"))
    assert [item["model"] for item in content["models"]] == ["short"]
    assert "heldout/accuracy/low" in content["figures"]["short"]

    exporting = prefect.start(EXPORT, {"run": str(run), "to": str(prefect.runs / "exported")})
    until(lambda: prefect.state(exporting) in ENDED, 120, "the export ends")
    assert prefect.state(exporting) == "Completed"
    assert (prefect.runs / "exported" / "README.md").is_file()


def _progress(manifest: Path) -> dict[str, Any]:
    return dict(json.loads(manifest.read_text(encoding="utf-8"))["progress"])


def test_no_rank_outlives_a_killed_flow(prefect: Prefect) -> None:
    """SIGKILL of the flow's process, which runs no `finally`: its ranks end at once and the run is Crashed."""
    run = prefect.start(SFT, prefect.parameters("killed", sft={"steps": 1_000_000}))
    until(lambda: "begin" in prefect.finished_tasks(run), 120, "the rank trains")
    flow, ranks = prefect.flow_process(), prefect.ranks()
    for rank in ranks:  # below its keeper, that below the host, which has a keeper, too
        assert rank.parents()[3].pid == flow.pid
    assert prefect.state(run) == "Running"
    flow.kill()
    until(lambda: not any(alive(rank) for rank in ranks), 20, "the rank is gone")
    until(lambda: prefect.state(run) == "Crashed", 30, "the run is Crashed")


def test_a_run_that_is_kept_alive_outlives_its_process_as_often_as_it_may(prefect: Prefect) -> None:
    """SIGKILL of the flow's process: the run goes on in its folder and completes. Control: where none is allowed, it
    fails, and says why; without the tag it stays Crashed (above)."""
    parameters = prefect.parameters("kept", iterations=6, sft=None, checkpoint={"every": 1})
    run = prefect.start(TRAIN, parameters, KEEP_ALIVE)
    manifest = prefect.runs / "kept" / "manifest.json"
    until(lambda: manifest.is_file() and _progress(manifest)["iteration"] >= 2, 180, "the run iterates")
    prefect.flow_process().kill()
    until(lambda: prefect.state(run) in ("Completed", "Failed"), 180, "the run goes on to its end")
    assert prefect.state(run) == "Completed"
    lost, back = read_events(RunFolder(prefect.runs / "kept"))
    assert (lost["event"], lost["reason"]) == ("FlowLost", "Prefect says that the flow run has crashed")
    assert (back["event"], back["number"]) == (RECOVERED, lost["number"])
    figures = read_metrics(RunFolder(prefect.runs / "kept"))
    assert [item["iteration"] for item in figures if "reward/mean" in item["metrics"]] == [1, 2, 3, 4, 5, 6]

    endless = {"iterations": 100_000, "sft": None, "engine": {"restarts": 0}}
    run = prefect.start(TRAIN, prefect.parameters("struck", **endless), KEEP_ALIVE)
    until(lambda: (prefect.runs / "struck" / "manifest.json").is_file(), 180, "the run has begun")
    prefect.flow_process().kill()
    until(lambda: prefect.state(run) == "Failed", 90, "the run gives up")
    assert "crashed 1 times within 3600 s; engine.restarts allows 0" in prefect.message(run)


def test_a_crash_that_is_looked_at_twice_starts_a_run_once(prefect: Prefect, lost: Lost) -> None:
    """As a worker reports it, and as a server does whose database is busy. Control: the next crash starts it again."""
    run = prefect.start("hold/lost", {}, KEEP_ALIVE)  # where no worker is left to begin it
    found = prefect.api.get(f"/flow_runs/{run}").raise_for_status().json()
    related = {"tag": f"prefect.tag.{KEEP_ALIVE}", "deployment": f"prefect.deployment.{found['deployment_id']}"}
    crash = {
        "event": "prefect.flow-run.Crashed",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [{"prefect.resource.id": name, "prefect.resource.role": role} for role, name in related.items()],
    }

    def crashes(times: int) -> None:
        occurred = datetime.now(UTC).isoformat()
        for _ in range(times):
            event = {"id": str(uuid4()), "occurred": occurred, **crash}
            prefect.api.post("/events", json=[event]).raise_for_status()

    def started_again() -> int:
        states = prefect.api.get("/flow_run_states/", params={"flow_run_id": run}).raise_for_status().json()
        return sum(state["message"] == STARTED_AGAIN for state in states)

    crashes(2)
    until(lambda: started_again() >= 1, 60, "the crash starts it again")
    crashes(1)
    until(lambda: started_again() >= 2, 60, "the next crash starts it again")
    assert started_again() == 2
    prefect.api.delete(f"/flow_runs/{run}").raise_for_status()


@pytest.mark.exhaustive
def test_preferences_are_trained_on_from_the_form(prefect: Prefect, tmp_path: Path) -> None:
    """What is given goes over the recipe. Controls: a key of a training, and data that are not there."""
    row = {"prompt": "1+1=", "chosen": "2.", "rejected": "3."}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 8, encoding="utf-8")
    config = {
        "folder": str(prefect.runs),
        "model": {"tiny": {"hidden_size": 32, "layers": 1, "heads": 1, "kv_heads": 1}},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "chat": False},
        "trainer": {"steps": 2, "batch": 4},
    }
    folder = prefect.runs / "preferred"
    refused = prefect.trigger(PREFERENCE, {"config": config | {"rollout": {}}, "run_folder": str(folder)})
    assert refused.is_client_error
    assert "'rollout' was unexpected" in refused.text
    absent = prefect.start(PREFERENCE, {"config": config | {"data": {"train": "absent.jsonl", "chat": False}}})
    run = prefect.start(PREFERENCE, {"config": config, "run_folder": str(folder)})
    for one in (absent, run):  # they share a slot, and either may get it first
        until(lambda one=one: prefect.state(one) in ("Completed", "Failed", "Crashed"), 180, "the run ends")
    assert prefect.state(absent) == "Failed"
    assert prefect.state(run) == "Completed"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["loss"]["settings"]["beta"] == 0.1


def test_the_slots_of_a_lost_machine_come_back(prefect: Prefect, lost: Lost) -> None:
    """The automation calls its run Crashed, which frees its deployment's; a lease not renewed frees the GPU's."""
    until(lambda: prefect.state(lost.run) == "Crashed", 90, "the run is Crashed")
    until(lambda: prefect.occupied(lost.deployment_limit) == 0, 30, "its deployment's slot comes back")
    until(lambda: prefect.occupied(SLOTS) == 0, 90, "its GPU slot comes back")


def test_without_a_server_the_command_says_how_to_start_one(prefect: Prefect) -> None:
    """A port where nothing listens: exit code 2, the remedy, no traceback. Control: the fixture's deploy succeeded."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        silent = f"http://127.0.0.1:{probe.getsockname()[1]}/api"
        done = penstock(prefect.environment | {"PREFECT_API_URL": silent}, "deploy")
    assert done.returncode == 2
    assert "penstock server" in done.stderr
    assert "Traceback" not in done.stderr


def test_entry_points_import_no_engine() -> None:
    """Workers and deployments import flows: no torch, vLLM or DeepSpeed comes with them. Control: Prefect does."""
    heavy = ("torch", "vllm", "deepspeed", "transformers", "prefect")
    names = ["train", "retrain", "sft", "preference", "reward_model", "compare", "evaluate", "export", "sweep", "chain"]
    flows = ", ".join(f"penstock.flows.{name}" for name in names)
    code = f"import sys, {flows}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['prefect']"


def test_prefect_yaml_names_recipes_and_flows_that_exist() -> None:
    """Every entry point is a flow, every `recipe` lies in it."""
    entries = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    flows = [entry["entrypoint"].rpartition(".")[2].replace("_", "-") for entry in entries]
    assert {f"{flow}/{entry['name']}" for flow, entry in zip(flows, entries, strict=True)} == NAMES
    recipes = {parameters["recipe"] for entry in entries if "recipe" in (parameters := entry.get("parameters", {}))}
    assert len(recipes) == 6
    assert all((ROOT / path).is_file() for path in recipes)
    assert all(isinstance(import_object(entry["entrypoint"]), Flow) for entry in entries)
