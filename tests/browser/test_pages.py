"""Pages of what runs, in a browser: a training watched as far as its curves, a cancelled one, a schedule, a sweep.

On a real server with a real worker and a real MLflow server. Artifacts, which are ours to write, are tried as wide as a
laptop and as narrow as a telephone. Left out: the widths of MLflow's own pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.base.home import HOME
from penstock.cli.prefect.deploy import prefect_deploy
from penstock.configs.sections.data import ArithmeticData
from penstock.data.arithmetic import make_problems
from tests.browser.conftest import NARROW, WIDE, on_narrow, on_wide
from tests.browser.test_form import QUICKSTART, Picture, add, fill, opened, submitted
from tests.flows.deployments.prefect_server import Prefect
from tests.processes import alive
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flows")]

PATIENCE_MS = 600_000  # for what takes a minute on a quiet machine
PATIENCE_S = PATIENCE_MS / 1000
ITERATIONS = 3
SMALL = [
    "data.arithmetic={digits: 2, train: 40, heldout: 16}",
    "sft=null",
    "rollout={prompts: 8, samples: 4, max_response_tokens: 6, max_sequences: 32}",
    "reward.function=tests.flows.reward_functions:low_digits",
    "evaluate.every=2",
    "record={samples_every: 1, experiment: browser}",
]
PPO = [
    "algorithm={name: ppo, mini_batches: 2}",
    "groups={main: {ranks: 1, roles: [actor, rollout]}, critic: {ranks: 1, roles: [critic]}}",
]
DRAWN_MS, GRAPH_PIXELS = 3_000, 510  # in which Prefect's page has drawn its graph, and the part of the page with it
OVER_THE_EDGE = """() => [...document.querySelectorAll("body *")].filter(element => {
    const inside = one => one.getBoundingClientRect().right <= innerWidth + 1;
    if (inside(element)) return false;
    for (let above = element.parentElement; above; above = above.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(above).overflowX) && inside(above)) return false;
    return true;
}).map(element => `${element.tagName} ${element.className}`)"""


def site(prefect: Prefect) -> str:
    """Return the address of the server's pages."""
    return prefect.environment["PREFECT_API_URL"].removesuffix("/api")


def show(page: Any, prefect: Prefect, run: str, name: str) -> None:
    """Open the page of a flow run, whose name is to be seen there."""
    page.goto(f"{site(prefect)}/runs/flow-run/{run}")
    page.get_by_text(name).first.wait_for()


def tab(page: Any, name: str) -> None:
    """Open a tab of a flow run's page."""
    page.get_by_role("tab", name=name).or_(page.locator(".p-tab", has_text=name)).first.click()


def iteration_of(prefect: Prefect, run: str, number: int) -> str:
    """Return the flow run of one of a training's iterations."""
    wanted = {"flow_runs": {"name": {"any_": [f"iteration-{number:06d}"]}, "parent_flow_run_id": {"any_": [run]}}}
    (found,) = prefect.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()
    return str(found["id"])


def artifacts(prefect: Prefect, run: str) -> dict[str, str]:
    """Return the newest artifact's id for each key of a flow run."""
    wanted = {"artifacts": {"flow_run_id": {"any_": [run]}}}
    found = prefect.api.post("/artifacts/filter", json=wanted).raise_for_status().json()
    return {item["key"]: item["id"] for item in sorted(found, key=lambda item: item["created"])}


def fits(page: Any) -> None:
    """See that nothing is wider than the page, wide and narrow, but what lies in a box that scrolls by itself."""
    for width, height in (NARROW, WIDE):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function(f"innerWidth == {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVER_THE_EDGE) == []


def show_artifact(page: Any, prefect: Prefect, artifact: str, words: str) -> None:
    """Open the page of an artifact, which says these words and fits."""
    page.goto(f"{site(prefect)}/artifacts/artifact/{artifact}")
    page.get_by_text(words).first.wait_for()
    fits(page)


@on_wide
def test_a_training_is_watched_from_the_form_to_its_curves(page: Any, prefect: Prefect, picture: Picture) -> None:
    """Its iterations come, each of its artifacts fits, a link leads to its run in MLflow, and one from there back.

    Control: MLflow draws no curve of a figure that there is not.
    """
    folder = prefect.runs / "watched"
    opened(page, prefect)
    fill(page, Name="watched", Iterations=str(ITERATIONS), Run_folder=str(folder))
    for setting in [*SMALL, *PPO]:
        add(page, "Other settings", setting)
    run = submitted(page)["id"]
    show(page, prefect, run, "train-watched")
    tab(page, "Subflow Runs")
    page.get_by_text(f"iteration-{ITERATIONS:06d}").first.wait_for(timeout=PATIENCE_MS)
    until(lambda: prefect.state(run) == "Completed", PATIENCE_S, "the training ends")

    show(page, prefect, run, "train-watched")
    tab(page, "Artifacts")
    page.get_by_text(f"Iteration {ITERATIONS} of {ITERATIONS}").first.wait_for()
    picture(page, "training")
    show(page, prefect, iteration_of(prefect, run, ITERATIONS), f"iteration-{ITERATIONS:06d}")
    page.get_by_text(f"update-critic-{ITERATIONS:06d}").first.wait_for()
    page.wait_for_timeout(DRAWN_MS)
    picture(page, "prefect", GRAPH_PIXELS)
    said = {
        "progress": f"Iteration {ITERATIONS} of {ITERATIONS}",
        "held-out": "accuracy of greedy responses",
        "samples": "policy_version",
        "live-values": "penstock-live-watched",
        "training-report": "Held-out accuracy",
        "tracker-run": "MLflow run",
    }
    found = artifacts(prefect, run)
    assert found.keys() == said.keys()
    for key, words in said.items():
        show_artifact(page, prefect, found[key], words)

    with page.expect_popup() as opening:
        page.get_by_text("MLflow run").first.click()
    mlflow = opening.value
    assert mlflow.url.startswith(prefect.environment["MLFLOW_TRACKING_URI"])
    mlflow.get_by_role("heading", name="watched").first.wait_for()
    mlflow.get_by_role("tab", name="Model metrics").click()
    points = mlflow.locator(".js-plotly-plot .scatterlayer .point")
    search = mlflow.get_by_placeholder("Search metric charts")
    search.fill("reward/mean")
    until(lambda: points.count() == ITERATIONS, 60, "the curve of the reward has a point for each iteration")
    picture(mlflow, "curves")
    search.fill("no such figure")
    until(lambda: points.count() == 0, 60, "there is no such curve")
    mlflow.get_by_role("tab", name="Overview").click()
    with page.context.expect_page() as opening:
        mlflow.get_by_text("The flow run in Prefect").click()
    opening.value.get_by_text("train-watched").first.wait_for()


@on_narrow
@pytest.mark.exhaustive
def test_a_training_cancelled_on_its_page_leaves_nothing_running(page: Any, prefect: Prefect) -> None:
    """Its own process, ranks and whatever they started end. Control: all are there while it trains."""
    folder = prefect.runs / "cancelled"
    settings = {"recipe": str(QUICKSTART), "name": "cancelled", "iterations": 100_000, "overrides": SMALL}
    run = prefect.start("train/quickstart", {**settings, "run_folder": str(folder)})
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.is_file() and "reward/mean" in metrics.read_text(), PATIENCE_S, "it iterates")
    flow = prefect.flow_process()
    running = [flow, *flow.children(recursive=True)]
    assert prefect.ranks()
    assert all(rank in running for rank in prefect.ranks())

    show(page, prefect, run, "train-cancelled")
    page.get_by_text("Running").first.wait_for()
    page.locator("[class*=icon-button-menu]").first.click()
    page.get_by_text("Cancel", exact=True).click()
    page.get_by_role("button", name="Confirm").click()
    page.get_by_text("Cancelled", exact=True).first.wait_for(timeout=PATIENCE_MS)
    assert prefect.state(run) == "Cancelled"
    until(lambda: not any(alive(process) for process in running), 60, "nothing of it runs")
    assert not prefect.ranks()
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["status"] == "cancelled"


@on_wide
@pytest.mark.exhaustive
def test_a_schedule_is_seen_to_fire_and_its_run_to_promote_a_model(page: Any, prefect: Prefect, tmp_path: Path) -> None:
    """Nobody starts it. Control: switched off on its page it plans no further run."""
    problems = make_problems(ArithmeticData(sft=1, train=40, heldout=16), seed=0)
    for name in ("train", "heldout"):
        problems[name].to_json(tmp_path / f"{name}.jsonl", orient="records", lines=True)
    data = {"arithmetic": None, "heldout": str(tmp_path / "heldout.jsonl")}
    config = {"folder": str(prefect.runs), "iterations": 2, "data": data}
    asked = {"recipe": str(QUICKSTART), "name": "often", "registered_model": "sums"}
    asked |= {"data": str(tmp_path / "train*.jsonl"), "overrides": SMALL[1:], "config": config}
    entry = {"name": "often", "entrypoint": "penstock.flows.retrain.retrain", "parameters": asked}
    entry |= {"work_pool": {"name": "penstock"}, "schedules": [{"interval": 45, "slug": "often", "active": True}]}
    entry |= {"concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"}}
    prefect_deploy(prefect.environment["PREFECT_API_URL"], "penstock", {"deployments": [entry]}, HOME)
    deployment = prefect.api.get("/deployments/name/retrain/often").raise_for_status().json()["id"]

    page.goto(f"{site(prefect)}/deployments/deployment/{deployment}")
    page.get_by_text("auto-scheduled").first.wait_for(timeout=PATIENCE_MS)
    page.locator(".state-badge", has_text="Completed").first.wait_for(timeout=PATIENCE_MS)
    (run,) = [run for run in scheduled(prefect, "COMPLETED") if "is best" in run["state"]["message"]]
    assert run["auto_scheduled"]
    assert scheduled(prefect, "SCHEDULED")
    page.locator(".p-toggle").first.click()
    until(lambda: not scheduled(prefect, "SCHEDULED"), 60, "no further run is planned")

    show(page, prefect, run["id"], "retrain-often")
    page.locator(".state-badge", has_text="Completed").first.wait_for()
    show_artifact(page, prefect, artifacts(prefect, run["id"])["retraining"], "models:/sums/1 is best")


def scheduled(prefect: Prefect, state: str) -> list[dict[str, Any]]:
    """Return the runs of the schedule that are in states of such a type."""
    wanted = {"deployments": {"name": {"any_": ["often"]}}, "flow_runs": {"state": {"type": {"any_": [state]}}}}
    return list(prefect.api.post("/flow_runs/filter", json=wanted).raise_for_status().json())


@on_wide
@pytest.mark.exhaustive
def test_a_sweep_is_a_page_with_its_trainings_and_one_report(page: Any, prefect: Prefect, picture: Picture) -> None:
    """Each training is a run below it; the report fits, and shows no file that Prefect's page lacks."""
    rate = "actor.optimizer.learning_rate"
    settings = [f"{rate}=1e-3,3e-3", "seed=0", "iterations=2", f"folder={prefect.runs}", *SMALL]
    run = prefect.start("sweep/quickstart", {"recipe": str(QUICKSTART), "settings": settings})
    until(lambda: prefect.state(run) in ("Completed", "Failed", "Crashed"), PATIENCE_S, "the sweep ends")
    show(page, prefect, run, "sweep-quickstart")
    tab(page, "Subflow Runs")
    for training in ("train-1-learning_rate-1e-3", "train-2-learning_rate-3e-3"):
        page.get_by_text(training).first.wait_for()
    picture(page, "sweep")
    show_artifact(page, prefect, artifacts(prefect, run)["sweep-report"], "2 of 2 trainings")
    assert page.locator("img").evaluate_all("images => images.filter(image => !image.naturalWidth).length") == 0
    for text in ("Runs", "Parameters that differ", "Best by heldout/accuracy"):
        assert page.get_by_text(text).count()
