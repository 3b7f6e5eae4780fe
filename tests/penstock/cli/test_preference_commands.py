"""Commands `preference` and `reward-model`: a mistake is one message and exit code 2, and leaves no folder behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.cli import main as cli
from penstock.cli.prefect import server
from penstock.state.digests import signed
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder

ROW = json.dumps({"prompt": "1+1=", "chosen": "2.", "rejected": "3."}) + "\n"


class Started(Exception):
    """The command got as far as the Prefect server, which comes right before the flow."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a recipe that is right for both commands; no flow is ever started."""

    def start() -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cli, "_quiet_libraries", lambda: None)  # it sets variables of the whole process
    monkeypatch.setattr(server, "start_server", start)
    (tmp_path / "pairs.jsonl").write_text(ROW, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text("model: {tiny: {}}\ndata: {train: pairs.jsonl}\n", encoding="utf-8")


@pytest.mark.parametrize("command", ["preference", "reward-model"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no recipe given"),
        (["recipe.yaml", "data.chosen=chosn"], "did you mean 'chosen'?"),
        (["recipe.yaml", "rollout.prompts=8"], "names no key"),
        (["recipe.yaml", "model.tiny=null"], "'model.path' is not set"),
        (["recipe.yaml", "data.chat=true"], "has no chat template"),
        (["recipe.yaml", "data.train=null"], "'data.train' is not set"),
    ],
)
def test_a_mistake_is_a_message_before_anything_starts(
    command: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", command, *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["preference", "reward-model"])
def test_a_recipe_that_is_right_starts(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all of the above."""
    monkeypatch.setattr(sys, "argv", ["penstock", command, "recipe.yaml"])
    with pytest.raises(Started):
        cli.main()


@pytest.mark.parametrize("command", ["preference", "reward-model"])
def test_resume_continues_a_run_that_has_begun(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own configuration. Controls: no manifest, a recipe beside it, the folder of a training."""
    run = Path("run")
    run.mkdir()
    (run / "config.yaml").write_text(signed("model: {tiny: {}}\ndata: {train: pairs.jsonl}\n"), encoding="utf-8")

    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", command, *arguments, "--resume", "run"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        return capsys.readouterr().err.replace("\n", " ")

    assert "no manifest.json to resume from" in refused()
    write_manifest(RunFolder(run), Manifest(Progress()))
    assert "remove the recipe" in refused("recipe.yaml")
    monkeypatch.setattr(sys, "argv", ["penstock", command, "--resume", "run"])
    with pytest.raises(Started):
        cli.main()
    (run / "config.yaml").write_text(signed("model: {tiny: {}}\nrollout: {prompts: 8}\n"), encoding="utf-8")
    assert "rollout: unknown key" in refused()
