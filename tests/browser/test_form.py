"""The form of a deployment in a browser: what a person sees, types and is told, on a real server with a real worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.configs.loading.load import load_config
from tests.browser.conftest import on_narrow, on_wide
from tests.flows.deployments.prefect_server import Prefect
from tests.flows.deployments.test_deployments import TRAIN
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flows")]

QUICKSTART = Path("configs/quickstart.yaml")
FIELDS = 14  # inputs and lists that are there before anything is opened, with the recipe
Picture = Callable[..., None]


def opened(page: Any, prefect: Prefect) -> None:
    """Open the form of the deployment, as its button does."""
    found = prefect.api.get(f"/deployments/name/{TRAIN}").raise_for_status().json()
    site = prefect.environment["PREFECT_API_URL"].removesuffix("/api")
    page.goto(f"{site}/deployments/deployment/{found['id']}/run")
    field(page, "Recipe").wait_for()
    field(page, "Advanced: every key").wait_for()


def field(page: Any, title: str) -> Any:
    """Return the field of a title, the first where the advanced section has another one."""
    label = page.locator(".schema-form-property__label", has_text=title)
    return page.locator(".schema-form-property").filter(has=label).first


def fill(page: Any, **values: str) -> None:
    """Type into the fields of these titles, `_` for a space."""
    for title, value in values.items():
        field(page, title.replace("_", " ")).locator("input, textarea").first.fill(value)


def add(page: Any, title: str, value: str) -> None:
    """Add an item to the list of a title."""
    items = field(page, title).locator("textarea")
    there = items.count()
    field(page, title).get_by_role("button", name="Add item").click()
    items.nth(there).fill(value)


def submitted(page: Any) -> dict[str, Any]:
    """Press the button, again where the server's database is busy; return the server's answer."""
    for _ in range(10):
        with page.expect_response("**/create_flow_run") as answer:
            page.get_by_role("button", name="Submit").click()
        if answer.value.status != httpx.codes.SERVICE_UNAVAILABLE:
            break
    return dict(answer.value.json())


def runs(prefect: Prefect) -> int:
    """Return how many runs there are."""
    return int(prefect.api.post("/flow_runs/count", json={}).raise_for_status().json())


def test_the_form_is_short_and_untouched_it_sends_its_recipe_alone(
    page: Any, prefect: Prefect, picture: Picture
) -> None:
    """Nothing is wider than the page. Control: the advanced section opens to every key, and sends nothing either."""
    opened(page, prefect)
    titles = page.locator(".schema-form-property__label").all_inner_texts()
    assert titles[0] == "Recipe"
    assert [title.removesuffix(" (Optional)") for title in titles[1:6]] == [
        "Name",
        "Model",
        "Training data",
        "Iterations",
        "Learning rate",
    ]
    assert len(titles) == FIELDS + 1
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    picture(page, "form")

    page.route("**/create_flow_run", lambda route: route.abort())
    page.get_by_text("Every key", exact=True).click()
    until(lambda: page.locator(".schema-form-property__label").count() > 100, 60, "every key has a field")
    with page.expect_request("**/create_flow_run") as sent:
        page.get_by_role("button", name="Submit").click()
    assert sent.value.post_data_json["parameters"] == {"recipe": str(QUICKSTART)}


@on_narrow
def test_a_run_is_of_what_was_typed(page: Any, prefect: Prefect) -> None:
    """Recipe, fields and other settings, to the last key, and the page of the run shows it. Control: the recipe."""
    width = page.viewport_size["width"]
    folder = prefect.runs / f"typed-{width}"
    opened(page, prefect)
    fill(page, Name=f"typed-{width}", Iterations="7", Learning_rate="1e-5", Prompts="64", Seed="3")
    fill(page, Run_folder=str(folder))
    add(page, "Other settings", "sft.steps=400")
    add(page, "Other settings", "evaluate={temperature: 0}")
    answer = submitted(page)
    run = answer.get("id", answer)
    until((folder / "config.yaml").is_file, 180, "the run opens its folder")
    words = [f"name=typed-{width}", "iterations=7", "actor.optimizer.learning_rate=1e-5", "rollout.prompts=64"]
    words += ["seed=3", "sft.steps=400", "evaluate={temperature: 0}"]
    assert load_config(folder / "config.yaml") == load_config(QUICKSTART, words) != load_config(QUICKSTART)
    page.goto(f"{page.url.partition('/deployments')[0]}/runs/flow-run/{run}")
    page.get_by_text(f"train-typed-{width}").first.wait_for()
    page.get_by_text("Running").first.wait_for()
    prefect.cancel(run)
    until(lambda: prefect.state(run) == "Cancelled", 90, "the run is Cancelled")


def test_a_wrong_value_is_told_on_the_page_and_no_run_is_made(page: Any, prefect: Prefect) -> None:
    """What is no key and value beside its field, a number beyond its limit where the server says so."""
    before = runs(prefect)
    opened(page, prefect)
    add(page, "Other settings", "nonsense")
    page.get_by_role("button", name="Submit").click()
    field(page, "Other settings").get_by_text("'nonsense' does not match").first.wait_for()
    opened(page, prefect)
    fill(page, Iterations="0")
    assert "0 is less than the minimum of 1" in str(submitted(page))
    page.get_by_text("0 is less than the minimum of 1").first.wait_for()
    assert runs(prefect) == before


@on_wide
def test_what_only_the_run_can_see_is_told_on_its_page(page: Any, prefect: Prefect, picture: Picture) -> None:
    """A key that does not exist: the page of the run has the terminal's sentence and no traceback."""
    opened(page, prefect)
    add(page, "Other settings", "rollout.sampels=4")
    run = submitted(page)["id"]
    until(lambda: prefect.state(run) == "Failed", 120, "the run fails")
    page.goto(f"{page.url.partition('/deployments')[0]}/runs/flow-run/{run}")
    page.get_by_text("the override 'rollout.sampels=4' names no key; did you mean 'rollout.samples'?").first.wait_for()
    assert page.get_by_text("Traceback").count() == 0
    assert prefect.message(run).startswith("the override 'rollout.sampels=4' names no key; did you mean")
    picture(page, "refused")
