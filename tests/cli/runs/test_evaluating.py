"""`penstock evaluate` refuses what cannot be evaluated, before a server starts; nothing is left behind.

Each mistake is made in a command that is otherwise right, and that gets as far as the start of the server: the control.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks import memory
from penstock.checks.model import attention, mixtures, served
from penstock.checks.model import folder as folders
from penstock.cli import main as cli
from penstock.cli.prefect import server
from penstock.cli.runs.evaluating import Named, named
from penstock.engines.sizing.memory import GIB
from penstock.state.digests import signed
from penstock.state.manifest import Manifest, Progress, seal_checkpoint, write_manifest
from penstock.state.run_folder import RunFolder, locked
from tests.engines.shared_ranks import Shape

ROOT = Path(__file__).resolve().parents[3]
RECIPE = """
data: {heldout: heldout.jsonl, prompt: question, max_prompt_tokens: 16}
reward: {function: "penstock.rewards.builtin:exact_match"}
rollout: {max_response_tokens: 8, max_sequences: 16}
"""
ROW = json.dumps({"question": "1+1=", "answer": "2"}) + "\n"


class Started(Exception):
    """The command got as far as starting Prefect's server."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, a recipe and held-out rows; no server is ever started."""

    def start() -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("penstock.cli.libraries.quiet_libraries", lambda: None)
    monkeypatch.setattr(server, "start_server", start)
    for module in (memory, attention, folders, mixtures, served):
        monkeypatch.setattr(module, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 8 * GIB)
    Shape("qwen2", tied=True).write(tmp_path / "model")
    for name, text in (("recipe.yaml", RECIPE), ("heldout.jsonl", ROW)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the command line in this process."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["penstock", "evaluate", *arguments])
        cli.main()

    return run


@pytest.fixture
def refusal(penstock: Callable[..., None], capsys: pytest.CaptureFixture[str], here: Path) -> Callable[..., str]:
    """Run a command that must be refused with exit code 2 and leave no trace; return the message."""

    def run(*arguments: str) -> str:
        before = sorted(here.rglob("*"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            penstock(*arguments)
        assert ended.value.code == 2
        assert sorted(here.rglob("*")) == before
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


def test_a_right_command_starts(penstock: Callable[..., None]) -> None:
    """The control of all others."""
    with pytest.raises(Started):
        penstock("model", "recipe.yaml", "evaluate.samples=2", "evaluate.temperature=1", "--to", "results")


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["modle", "recipe.yaml"], "there is no folder", "name a Hugging Face folder, a run"),
        (["heldout.jsonl", "recipe.yaml"], "heldout.jsonl is a file", "name a Hugging Face folder, a run"),
        (["."], "is neither a model, a run nor a checkpoint", "config.json"),
        (["model"], "no recipe given", "a run has its own"),
        (["recipe.yaml"], "no model given", "name a Hugging Face folder"),
        (["model", "recipe.yaml", "recipe.yml"], "two recipes", "by one"),
        (["model", "other.yaml"], "other.yaml does not exist", "give the path"),
        (["model", "evaluate.samples=2"], "changes a recipe, and none is given", "after the models"),
        (["model", "recipe.yaml", "evaluate.smaples=2"], "names no key", "evaluate.samples"),
        (["model", "recipe.yaml", "data.heldout=null"], "no held-out prompts", "add data.heldout=FILE"),
        (["model", "recipe.yaml", "data.heldout=gone.jsonl"], "gone.jsonl", "does not exist"),
        (["model", "recipe.yaml", "data.prompt=text"], "text", "question"),
        (["model", "recipe.yaml", "reward=null"], "no reward", "reward.function"),
        (["model", "recipe.yaml", "evaluate.evaluators=[]"], "nothing would be measured", "name some"),
        (["model", "recipe.yaml", "evaluate.evaluators=[lenght]"], "'lenght'", "length"),
        (["model", "recipe.yaml", "evaluate.evaluators=['mine:Class']"], "mine", "evaluators"),
        (["model", "recipe.yaml", "algorithm.kl={}"], "'kl' has no reference", "leave 'kl' out"),
        (["model", "recipe.yaml", "data.max_prompt_tokens=100000"], "positions", "lower one of them"),
        (["model", "recipe.yaml", "--to", "model"], "is not empty", "name an empty or a new folder"),
        (["model", "--include-path", "."], "has no effect without --tasks", "name tasks"),
    ],
)
def test_mistakes_are_messages(refusal: Callable[..., str], arguments: list[str], problem: str, remedy: str) -> None:
    """One message with what is wrong and what to do, exit code 2, nothing written."""
    said = refusal(*arguments)
    assert problem in said
    assert remedy in said


def test_tasks_need_the_harness(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed the message says how; with it, tests/flows/test_evaluate_tasks.py."""
    monkeypatch.setattr("penstock.tasks.evaluation.harness.find_spec", lambda name: None)
    said = refusal("model", "--tasks", "arc_easy")
    assert "lm-evaluation-harness, which is not installed" in said
    assert "pip install" in said


def run_of(folder: Path, extra: str = "") -> RunFolder:
    """A run that has a final model, made from the recipe."""
    run = RunFolder(folder)
    Shape("qwen2", tied=True).write(run.model("final"))
    run.config.write_text(signed(f"{RECIPE}{extra}name: {folder.name}\n"))
    write_manifest(run, Manifest(Progress(), model=str(run.model("final")), kind="train"))
    return run


def test_runs_that_were_evaluated_differently_need_a_recipe(
    refusal: Callable[..., str], penstock: Callable[..., None], here: Path
) -> None:
    """What differs is named. Controls: how they trained and seeds may differ, and a given recipe is for all."""
    run_of(here / "one")
    run_of(here / "seed", "seed: 7\niterations: 3\nevaluate: {every: 2}\nalgorithm: {name: rloo}\n")
    run_of(here / "two", "evaluate: {temperature: 1.0}\n")
    said = refusal("one", "two")
    assert "were evaluated differently: evaluate.temperature" in said
    for words in (["one", "seed"], ["one", "two", "recipe.yaml"], ["one", "two", "one/config.yaml"]):
        with pytest.raises(Started):
            penstock(*words)


def test_a_run_without_weights_and_one_in_training_are_refused(refusal: Callable[..., str], here: Path) -> None:
    """A checkpoint of a training may go at any moment; one that there is not is answered with those there are."""
    run = run_of(here / "one")
    run.model("final").rename(here / "elsewhere")
    assert "has no checkpoint yet" in refusal("one")
    run.checkpoint(4).mkdir(parents=True)
    (run.checkpoint(4) / "config.yaml").write_text("")
    run.lock.touch()
    with locked(run):
        assert "is being trained" in refusal("one/checkpoints/000004")
    assert "is incomplete" in refusal("one/checkpoints/000004")
    assert "there are 000004" in refusal("one/checkpoints/000005")


def test_the_commands_of_the_page_are_right(
    penstock: Callable[..., None], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of docs/evaluation.md, on models, runs and a checkpoint of the names that stand there."""
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    lines = [shlex.split(line, comments=True)[2:] for line in page.splitlines() if line.startswith("penstock evaluate")]
    assert len(lines) >= 6
    run = run_of(here / "runs" / "sums-20260115-101500")
    run_of(here / "runs" / "sums-20260116-090000")
    aside = run.checkpoints / ".000010.partial"
    aside.mkdir(parents=True)
    saved = Manifest(Progress(iteration=10), checkpoint="000010", model=str(run.model("final")))
    seal_checkpoint(aside, run.checkpoint(10), run, saved)
    Shape("qwen2", tied=True).write(here / "models" / "Qwen2.5-1.5B-Instruct")
    (here / "sums.yaml").write_text(RECIPE, encoding="utf-8")
    asked: list[Any] = []
    monkeypatch.setattr(
        "penstock.tasks.evaluation.inputs.check_tasks", lambda tasks, folder: asked.append((tasks, folder))
    )
    for words in lines:
        with pytest.raises(Started):
            penstock(*words)
    assert (["arc_easy", "gsm8k"], None) in asked
    assert (["local_sums"], Path("my_tasks")) in asked


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a", "b", "r.yaml", "x.y=1"], Named(["a", "b"], "r.yaml", ["x.y=1"])),
        (["x=1", "a"], Named(["a"], None, ["x=1"])),
        (["model=1"], Named(["model=1"], None, [])),
    ],
)
def test_words_are_sorted(here: Path, words: list[str], expected: Any) -> None:
    """A folder whose name has an equals sign is a model."""
    (here / "model=1").mkdir()
    assert named(words) == expected


def test_two_recipes_are_refused() -> None:
    """Differences between models that were asked different things would say nothing."""
    with pytest.raises(UserError, match="two recipes"):
        named(["a", "one.yaml", "two.yml"])
