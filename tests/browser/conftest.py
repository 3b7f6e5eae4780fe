"""Debian's Chromium, driven by Playwright, and a Prefect server with a worker, whose trainings go to an MLflow server.

All tests of a file share them.

`PENSTOCK_PICTURES=docs/images python -m pytest -n 0 tests/browser` takes the pictures of the documentation anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.groups.interface import free_port
from tests.delivering import mlflow_server
from tests.flows.deployments.prefect_server import Prefect, served

WIDE, NARROW = (1440, 1300), (400, 900)
SLOWEST_MS = 60_000
# Of tests that start trainings, which take longer than to look at them twice would tell
on_wide = pytest.mark.parametrize("page", [WIDE], indirect=True, ids=["wide"])
on_narrow = pytest.mark.parametrize("page", [NARROW], indirect=True, ids=["narrow"])


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """A Prefect server with a worker, and an MLflow server that the worker's environment names."""
    home, runs = tmp_path_factory.mktemp("servers"), tmp_path_factory.mktemp("runs")
    port = free_port("127.0.0.1")
    tracking = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}", "PENSTOCK_ALLOWED_MODULES": "tests"}
    with mlflow_server(home, port), served(home, runs, **tracking) as prefect:
        yield prefect


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser without a window; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'penstock[dev]'")
    if (program := shutil.which("chromium")) is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture(params=[WIDE, NARROW], ids=["wide", "narrow"])
def page(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty page, once as wide as a laptop's and once as a telephone's."""
    width, height = request.param
    context = chromium.new_context(viewport={"width": width, "height": height})
    context.set_default_timeout(SLOWEST_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def picture() -> Callable[..., None]:
    """Return what keeps a picture of a wide page, or of its upper part, where somebody asks for pictures."""

    def keep(page: Any, name: str, height: int = WIDE[1]) -> None:
        if (folder := os.environ.get("PENSTOCK_PICTURES")) and page.viewport_size["width"] == WIDE[0]:
            part = {"x": 0, "y": 0, "width": WIDE[0], "height": height}
            page.screenshot(path=Path(folder) / f"{name}.png", clip=part)

    return keep
