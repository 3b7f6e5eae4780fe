"""Spreads the tests over two processes: flows in one, hosts and engines in the other, the rest where there is room.

Beside this, what tests of several rooms share: a Prefect server, databases of MLflow's that are there at once, that
modules of a test's folder end with it, and that folders and files may be named in any order.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.base.importing import importing

TESTS = Path(__file__).parent
os.environ["PENSTOCK_ALLOWED_MODULES"] = "tests"  # functions and classes of the tests are named in configurations
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"  # of tests without the server below
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a shell Ctrl-C is ignored, also by all that is started here: a worker of Prefect that gets a
    # SIGTERM, which it hands on to itself as a Ctrl-C, would never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
LONGEST_FIRST = {"flows": 0, "hosts": 1, "faults": 2, "engines": 3, "deployments": 4}
ENGINES_ALONE = {"test_channel.py", "test_group.py", "test_group_ends.py"}  # they start groups of their own


def pytest_configure(config: pytest.Config) -> None:
    """Put together what the command line names of one folder.

    pytest 9.1 reads a folder anew for what comes after a file of a folder above, and forgets the fixtures of its
    conftest.py then (pytest's issue 14971).
    """
    config.args.sort(key=lambda argument: Path(argument.partition("::")[0]).absolute().parts)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what tests import: a million objects that stay.

    Looking through them again and again takes a quarter of the time in which tests are found, and later most of a
    second for each pass. What tests make themselves it has as ever.
    """
    with importing():
        found = yield
        gc.freeze()
        return found


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the group that one process runs: a file, all flows, or all files on the shared engines.

    Flows start whole trainings: two at a time would fight for the cores, so they take turns, and those over several
    machines, which wait for each other most of the time, are beside them. They take longest and begin first; then come
    trainings that lose what they run on, the engines, and deployments, which wait for a worker most of the time. A test
    elsewhere that starts a training, or engines of its own, says that it belongs to the flows,
    `pytest.mark.xdist_group("flows")`.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(Path(item.path))))
    items.sort(key=lambda item: LONGEST_FIRST.get(_said(item), len(LONGEST_FIRST)))


def _said(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


def _group(path: Path) -> str:
    room, *below = path.relative_to(TESTS).parts
    if below[:1] == ["deployments"]:
        return "deployments"
    if room in ("flows", "hosts") or (room == "engines" and path.name not in ENGINES_ALONE):
        return room
    return str(path)


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test imported from its folder, and the folder: a namesake of another test would not be found."""
    before, folder = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    sys.path[:] = [place for place in sys.path if not place.startswith(folder)]
    for name in set(sys.modules) - before:
        if str(vars(sys.modules[name]).get("__file__")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def _tables_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let MLflow make the tables of a `mlflow.db` once: tests of this process get copies, which take no seconds.

    A database of another name is made by MLflow itself, as in every other process.
    """
    from penstock.trackers import mlflow

    alone, made = mlflow._alone, tmp_path_factory.mktemp("tables") / "mlflow.db"

    @contextmanager
    def copied(database: Path | None) -> Iterator[None]:
        with alone(database):
            if database is not None and database.name == made.name and not database.exists():
                if not made.exists():
                    _make_tables(made)
                database.write_bytes(made.read_bytes())
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow, "_alone", copied)
        yield


def _make_tables(database: Path) -> None:
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(f"sqlite:///{database}")
    _initialize_tables(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def prefect_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server for all flows that are called inside a test process.

    Results, memo files and MLflow's store go to folders that pytest removes.
    Without the heartbeat a flow call costs 0.2 s instead of 1.2 s: its thread sleeps in whole seconds.
    """
    from prefect.settings import (
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOCAL_STORAGE_PATH,
        PREFECT_SERVER_ANALYTICS_ENABLED,
        temporary_settings,
    )
    from prefect.testing.utilities import prefect_test_harness

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


@pytest.fixture(scope="session")
def prefect_api(prefect_harness: None) -> str:
    """The address of that server, for commands: each would start one of its own, for ten seconds of a core.

    That they do is for tests/cli/prefect/test_server.py, tests/deploy/test_wheel.py and the commands of other tests.
    """
    from prefect.settings import PREFECT_API_URL

    return str(PREFECT_API_URL.value())
