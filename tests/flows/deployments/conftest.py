"""The server of a file's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flows.deployments.prefect_server import Prefect, served


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """A server of the module's own, with a worker."""
    with served(tmp_path_factory.mktemp("prefect-home"), tmp_path_factory.mktemp("runs")) as prefect:
        yield prefect
