"""A registry of models by reference, on a real database and a real server: what is found, and what is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.engines.groups.interface import free_port
from penstock.trackers.mlflow import MlflowRegistry, MlflowTracker, connect, default_tracking_uri
from penstock.trackers.registry import (
    BEST,
    FOLDER,
    RUN,
    WEIGHTS,
    NewVersion,
    best_of,
    check_weights,
    find,
    reference,
    register,
    weights_digest,
)
from penstock.trackers.table import find_registry, registry_in
from penstock.trackers.tracker import NewRun
from tests.delivering import mlflow_server


def model(folder: Path, weights: bytes = b"weights") -> Path:
    """Write what a version refers to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def new(name: str, tracked: str, folder: Path) -> NewVersion:
    """Return a version of a model folder."""
    return NewVersion(
        name, tracked, {FOLDER: str(folder), RUN: str(folder.parent), WEIGHTS: weights_digest(folder), "note": "x"}
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real MLflow server."""
    port = free_port("127.0.0.1")
    with mlflow_server(tmp_path_factory.mktemp("mlflow-server"), port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(params=["database", pytest.param("server", marks=pytest.mark.slow)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind."""
    if request.param == "server":
        return str(request.getfixturevalue("server"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return default_tracking_uri(tmp_path / "runs")


def test_versions_are_references_with_aliases(uri: str, tmp_path: Path) -> None:
    """Twice is once, the first is best, `latest` is the newest, `best` moves; controls: other weights, another run."""
    tracker = MlflowTracker(uri)
    run = tracker.open(NewRun("one", "exp", {}))
    registry = MlflowRegistry(uri)
    assert registry.versions("sums") == []
    first, second = model(tmp_path / "one" / "final"), model(tmp_path / "two" / "final", b"others")
    one = register(registry, new("sums", run, first))
    assert register(registry, new("sums", run, first)) == one
    assert (one.number, one.folder, one.tags["note"]) == (1, first, "x")
    two = register(registry, new("sums", run, second))
    assert [version.number for version in registry.versions("sums")] == [2, 1]
    assert (best_of(registry, "sums"), _found(registry, "models:/sums@latest")) == (one, two)
    assert _found(registry, "models:/sums/1") == _found(registry, "models:/sums@best") == one
    registry.point(BEST, two)
    registry.tag(two, {"penstock.verdict": "better"})
    assert _found(registry, "models:/sums@best").tags["penstock.verdict"] == "better"
    assert check_weights(two) == second
    assert "sums" in registry.names()
    known = connect(uri).get_model_version("sums", "2")
    assert (known.run_id, known.source) == (run, f"runs:/{run}/sums")


def _found(registry: MlflowRegistry, text: str) -> object:
    wanted = reference(text)
    assert wanted is not None
    return find(registry, wanted)


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest name of a model and an alias, the versions there are. Control: the test above finds them."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert find_registry(tmp_path) is None
    with pytest.raises(UserError, match="no run was recorded there"):
        registry_in(tmp_path)
    assert not any(tmp_path.iterdir())  # asking makes no store
    run = MlflowTracker(default_tracking_uri(tmp_path)).open(NewRun("one", "exp", {}))
    registry = registry_in(tmp_path)
    with pytest.raises(UserError, match=r"has no model 'sums'\n  there is none yet"):
        _refused(registry, "models:/sums@best")
    register(registry, new("sums", run, model(tmp_path / "one" / "final")))
    with pytest.raises(UserError, match=r"no model 'smus' \(did you mean 'sums'\?\)\n  there are: sums"):
        _refused(registry, "models:/smus@best")
    with pytest.raises(
        UserError, match=r"no such version of 'sums' \(did you mean '@best'\?\)\n  there are versions 1 to"
    ):
        _refused(registry, "models:/sums@bset")
    with pytest.raises(UserError, match=r"models:/sums/9: .* has no such version"):
        _refused(registry, "models:/sums/9")
    with pytest.raises(UserError, match="names no version of a model"):
        reference("models:/sums/latest")


def _refused(registry: object, text: str) -> None:
    wanted = reference(text)
    assert wanted is not None
    find(registry, wanted)  # type: ignore[arg-type]


def test_a_folder_that_is_gone_or_changed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry by reference holds no weights: what lies there now must be what was registered."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = MlflowTracker(default_tracking_uri(tmp_path)).open(NewRun("one", "exp", {}))
    folder = model(tmp_path / "one" / "final")
    version = register(registry_in(tmp_path), new("sums", run, folder))
    assert check_weights(version) == folder
    said = subprocess.run("sha256sum *.safetensors | sha256sum", shell=True, cwd=folder, capture_output=True, text=True)
    assert said.stdout.split()[0] == version.tags[WEIGHTS]
    model(folder, b"changed")
    with pytest.raises(UserError, match="holds other weights"):
        check_weights(version)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="is not there"):
        check_weights(version)
