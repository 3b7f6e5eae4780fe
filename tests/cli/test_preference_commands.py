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
    monkeypatch.setattr(
        "penstock.cli.libraries.quiet_libraries", lambda: None
    )  # it sets variables of the whole process
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


@pytest.mark.parametrize("command", ["preference", "reward-model"])
def test_a_dry_run_says_what_would_be_trained_on(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are tokenized as they would be, nothing starts and nothing is left. Control: without it a start begins."""
    long = json.dumps({"prompt": "1+1=", "chosen": "2." * 40, "rejected": "3."}) + "\n"
    Path("pairs.jsonl").write_text(ROW * 3 + long, encoding="utf-8")
    given = ["recipe.yaml", "trainer.max_tokens=16", "trainer.batch=2", "trainer.steps=6", "trainer.checkpoint_every=9"]
    before = sorted(Path().rglob("*"))
    monkeypatch.setattr(sys, "argv", ["penstock", command, *given, "--dry-run"])
    cli.main()
    said = capsys.readouterr().out
    tokens = 3 * 2 * (len("1+1=") + len("2.") + (command == "preference"))  # of a policy each response has an end
    for text in (
        "max_tokens: 16",
        "placement and memory estimate",
        "the steps",
        f"train: 4 pairs of pairs.jsonl, {tokens} tokens, ",
        "1 longer than trainer.max_tokens (16), which are dropped",
        "steps: 6 of 2 pairs",
        ": 4 epochs",
        "'trainer.checkpoint_every' (9) has no effect: the training has 6 steps",
        "disk: a checkpoint ",
    ):
        assert text in said, text
    assert sorted(Path().rglob("*")) == before
    monkeypatch.setattr(sys, "argv", ["penstock", command, *given])
    with pytest.raises(Started):
        cli.main()


@pytest.mark.parametrize("command", ["preference", "reward-model"])
def test_a_resume_may_change_how_long_and_goes_back_to_no_checkpoint(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written. Controls: a key that would make another run, and fewer steps than are done."""
    run = RunFolder(Path("run"))
    run.path.mkdir()
    run.config.write_text(signed("model: {tiny: {}}\ndata: {train: pairs.jsonl}\n"), encoding="utf-8")
    write_manifest(run, Manifest(Progress(), kind=command))
    run.finetuning.path.mkdir()
    write_manifest(run.finetuning, Manifest(Progress(iteration=100), checkpoint="000100"))

    def told(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", command, "--resume", "run", *arguments])
        try:
            cli.main()
        except SystemExit as ended:
            assert ended.code == 2
        shown = capsys.readouterr()
        return (shown.out + shown.err).replace("\n", " ")

    before = {path: path.read_bytes() for path in run.path.rglob("*.*")}
    assert "steps: 500 of 64 pairs" in (said := told("trainer.steps=500", "--dry-run"))
    assert "of which 100 steps are done" in said
    assert "'trainer.batch' cannot change" in told("trainer.batch=2")
    assert "has done 100 already" in told("trainer.steps=99")
    assert "keeps its newest checkpoint alone" in told("--from", "50")
    assert {path: path.read_bytes() for path in run.path.rglob("*.*")} == before
    with pytest.raises(Started):
        told("trainer.steps=500")


def test_a_complete_run_of_steps_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so and where its model is. Controls: with more steps it goes on; without a checkpoint it cannot."""
    run = RunFolder(Path("run"))
    run.model("final").mkdir(parents=True)
    text = "model: {tiny: {}}\ndata: {train: pairs.jsonl}\ntrainer: {steps: 100}\n"
    run.config.write_text(signed(text), encoding="utf-8")
    write_manifest(run, Manifest(Progress(), kind="preference"))
    run.summary.write_text(json.dumps({"status": "completed", "steps": 100, "tracked": None}), encoding="utf-8")
    run.finetuning.path.mkdir()
    write_manifest(run.finetuning, Manifest(Progress(iteration=100), checkpoint="000100"))
    monkeypatch.setattr(sys, "argv", ["penstock", "preference", "--resume", "run"])
    cli.main()
    said = capsys.readouterr().out
    assert "run is complete: nothing is left to do" in said
    assert "run/models/final" in said
    monkeypatch.setattr(sys, "argv", ["penstock", "preference", "--resume", "run", "trainer.steps=200"])
    with pytest.raises(Started):
        cli.main()
    run.finetuning.manifest.unlink()
    with pytest.raises(SystemExit):
        cli.main()
    assert "is complete and has no checkpoint to go on from" in capsys.readouterr().err
