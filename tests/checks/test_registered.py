"""`models:/NAME@best` where a folder is wanted: found when a run begins, kept in its configuration, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.checks.found_models import with_models_found
from penstock.checks.registered import check_registering
from penstock.cli import main as cli
from penstock.cli.serving import serve as serving
from penstock.configs.loading.load import config_from_mapping
from penstock.trackers.mlflow import MlflowTracker, default_tracking_uri
from penstock.trackers.registry import FOLDER, RUN, WEIGHTS, NewVersion, register, weights_digest
from penstock.trackers.table import registry_in
from penstock.trackers.tracker import NewRun
from tests.engines.shared_ranks import Shape


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real model folder, which is version 1 and best of 'sums' in the store of `runs`."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one" / "models" / "final"
    folder.parent.mkdir(parents=True)
    Shape("qwen2", tied=True).write(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    tracked = MlflowTracker(default_tracking_uri(Path("runs"))).open(NewRun("one", "exp", {}))
    tags = {FOLDER: str(folder), RUN: str(tmp_path / "runs" / "one"), WEIGHTS: weights_digest(folder)}
    register(registry_in(Path("runs")), NewVersion("sums", tracked, tags))
    return folder


@pytest.mark.parametrize("text", ["models:/sums@best", "models:/sums@latest", "models:/sums/1"])
def test_a_version_becomes_its_folder_and_a_resume_asks_nobody(model: Path, text: str) -> None:
    """What is kept resolves to itself without a registry. Control: a folder stays what it is."""
    config = with_models_found(config_from_mapping({"model": {"path": text}}, "here"))
    assert (config.model.path, config.model.version) == (str(model), "models:/sums/1")
    Path("runs/mlflow.db").unlink()
    kept = config_from_mapping(config.model_dump(exclude={"base"}), "config.yaml")
    assert with_models_found(kept) == config
    plain = config_from_mapping({"model": {"path": "./models/x"}}, "here")
    assert with_models_found(plain) is plain


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["serve", "models:/sums@bset"], "did you mean '@best'?"),
        (["serve", "models:/smus@best"], "did you mean 'sums'?"),
        (["serve", "models:/sums"], "names no version of a model"),
        (["serve", "models:/sums@best", "--runs", "elsewhere"], "there is no registry of models in elsewhere"),
        (["export", "models:/sums@best"], "name one with --to"),
        (["export", "models:/sums/3", "--to", "out"], "there are versions 1 to 1, and @best (version 1)"),
        (["promote", "sums"], "names no version of a model"),
        (["train", "recipe.yaml", "model.path=models:/sums/3"], "has no such version of 'sums'"),
    ],
)
def test_what_is_not_there_is_one_message(
    model: Path, arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and nothing written. Control: the export of the test below."""
    Path("recipe.yaml").write_text("name: x\n")
    before = {path for path in Path().rglob("*") if path.name != "mlflow.db"}
    monkeypatch.setattr("sys.argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert problem in said.err
    assert "Traceback" not in said.err
    assert {path for path in Path().rglob("*") if path.name != "mlflow.db"} == before


def test_a_version_is_exported(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are the version's. Control: a folder that changed since is refused."""
    monkeypatch.setattr("sys.argv", ["penstock", "export", "models:/sums@best", "--to", "out"])
    cli.main()
    assert "registered: models:/sums/1" in capsys.readouterr().out
    assert weights_digest(Path("out")) == weights_digest(model)
    shutil.rmtree("out")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(SystemExit):
        cli.main()
    assert "holds other weights" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_version_is_served_under_its_models_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's server is started on. Control: another name that is asked for."""
    started: list[tuple[Path, str | None]] = []
    monkeypatch.setattr(serving, "serve", lambda folder, port, memory, say, name: started.append((folder, name)))
    for more in ([], ["--name", "mine"]):
        monkeypatch.setattr("sys.argv", ["penstock", "serve", "models:/sums@best", *more])
        cli.main()
    assert started == [(model, "sums"), (model, "mine")]


def test_a_tracker_without_a_registry_registers_nothing() -> None:
    """So the key is refused. Controls: MLflow, and no key."""
    name = {"registered_model": "sums"}
    with pytest.raises(UserError, match="record.registered_model has no effect"):
        check_registering(config_from_mapping({"record": {"tracker": "my:Tracker", **name}}, "here"))
    check_registering(config_from_mapping({"record": name}, "here"))
    check_registering(config_from_mapping({"record": {"tracker": "my:Tracker"}}, "here"))
