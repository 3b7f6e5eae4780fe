"""A Prefect server for flows called inside the test process; the deployments' tests start a server of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOCAL_STORAGE_PATH,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="session")
def prefect_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server for the session; results, memo files and MLflow's store go to folders that pytest removes.

    Without the heartbeat a flow call costs 0.2 s instead of 1.2 s: its thread sleeps in whole seconds.
    """
    folder = tmp_path_factory.mktemp("prefect")
    settings = {
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        PREFECT_LOCAL_STORAGE_PATH: folder / "results",
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
    }
    with pytest.MonkeyPatch.context() as patch, temporary_settings(settings):
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("DO_NOT_TRACK", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        with prefect_test_harness(server_startup_timeout=120):
            yield
