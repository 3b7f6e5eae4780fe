"""Debian's Chromium, driven by Playwright, and a Prefect server with a worker.

`PENSTOCK_PICTURES=docs/images python -m pytest -n 0 tests/browser` takes the pictures of the documentation anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.deployments.test_deployments import prefect

__all__ = ["prefect"]
WIDE, NARROW = (1440, 1300), (400, 900)
SLOWEST_MS = 60_000


@pytest.fixture(scope="session")
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
def picture() -> Callable[[Any, str], None]:
    """Return what keeps a picture of a wide page, where somebody asks for pictures."""

    def keep(page: Any, name: str) -> None:
        if (folder := os.environ.get("PENSTOCK_PICTURES")) and page.viewport_size["width"] == WIDE[0]:
            page.screenshot(path=Path(folder) / f"{name}.png")

    return keep
