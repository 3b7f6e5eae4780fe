"""Commands of README.md and docs/operations.md are such that the real programs take; those of `penstock`, of any page.

A line of `penstock` goes through the command line's own parser, and what it says of a recipe through the loader, with
the files that the README shows. Lines of `prefect` go through Prefect's parser; targets of `make` are looked up. The
README's example is looked at by its own `--dry-run`. Left out: what the other commands do; each has tests of its own.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import prefect.settings
import pytest
from prefect.cli._app import _app as prefect_app
from typer.main import get_command
from typer.testing import CliRunner

from penstock.base.errors import UserError
from penstock.checks import memory
from penstock.checks.model import attention, mixtures, served
from penstock.checks.model import folder as folders
from penstock.cli.app import app
from penstock.cli.prefect.deploy import name_of, read_deployments
from penstock.cli.runs.evaluating import named as words_of_evaluate
from penstock.cli.starting import Asked
from penstock.configs.chain import read_chain
from penstock.configs.loading.load import load_tree
from penstock.configs.loading.resuming import resumed_config
from penstock.configs.loading.sweep import drawn, grid, parse_axes
from penstock.configs.tree.recipes import parse
from penstock.engines.sizing.memory import GIB
from penstock.session.opening import PREFERENCE, REWARD_MODEL, SFT, TRAIN, Kind
from penstock.session.settings import apply_overrides
from tests.docs.pages import FIRST, OTHERS, PAGES, blocks, command_lines, named, said_commands
from tests.engines.shared_ranks import Shape
from tests.processes import ROOT

KINDS: dict[str, Kind[Any]] = {kind.name: kind for kind in (TRAIN, SFT, PREFERENCE, REWARD_MODEL)}
WRITTEN = {  # where a page says RECIPE
    "preference": "configs/dpo.yaml",
    "reward-model": "configs/reward_model.yaml",
    "chain": "configs/chain.yaml",
}
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the commands below a group, each with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def called(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Parse a command line of `penstock`; return the command and what it would be given, and do nothing of it."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def noting(path: tuple[str, ...]) -> Callable[..., None]:
        return lambda **given: calls.append((" ".join(path), given))

    group = get_command(app)
    for path, command in commands(group):
        command.callback = noting(path)
    group.main([*words], standalone_mode=False)
    (call,) = calls
    return call


def recipe_for(command: str, recipe: object) -> Path:
    """Return the recipe of a line: a file of the repository, else the README's or one of the command's kind."""
    there = recipe is not None and Path(str(recipe)).is_file()
    return Path(str(recipe)) if there else Path(WRITTEN.get(command, "sums.yaml"))


def check_recipe(command: str, given: Mapping[str, Any]) -> None:
    """Check what a command line says of a recipe: its keys, their values, and whether a run may change them.

    Raises:
        UserError: the loader refuses it.
    """
    recipe = recipe_for(command, given.get("recipe"))
    pairs = [text for text in given.get("overrides") or () if "=" in text]
    if command in KINDS:
        kind, asked = KINDS[command], Asked(given["recipe"], pairs, None, given["resume"])
        beside = asked.recipe is not None and "=" not in str(asked.recipe)  # with --resume: the newest of its name
        changes = () if asked.resume is None else pairs if beside else asked.changes
        config = load_tree(recipe, () if asked.resume is not None else pairs, kind.tree)
        if changes:
            resumed_config(config, changes, 0, kind.resumable)
    elif command == "sweep" and given["resume"] is None:
        axes, count = parse_axes(given["settings"]), given["random"]
        for overrides in grid(axes) if count is None else drawn(axes, count, given["draw_seed"]):
            load_tree(recipe, overrides, TRAIN.tree)
    elif command == "chain" and given["resume"] is None:
        read_chain(recipe_for(command, given["recipe"]), pairs)
    elif command == "evaluate":
        words = words_of_evaluate([str(word) for word in given["models"]])
        load_tree(recipe_for(command, words.recipe), words.overrides, TRAIN.tree)
    elif command == "set":
        values = dict(text.split("=", 1) for text in given["values"] or ())
        apply_overrides(load_tree(recipe, (), TRAIN.tree), {key: parse(text, key) for key, text in values.items()})
    elif pairs:
        load_tree(recipe, pairs, TRAIN.tree)


def check_deployment(name: str, parameters: Sequence[str]) -> None:
    """Check that a deployment is there, and that its flow takes the parameters."""
    found = {name_of(item): (item["entrypoint"].rpartition(".")[2], item) for item in read_deployments()["deployments"]}
    assert name in found, f"no deployment {name}; there are {', '.join(sorted(found))}"
    flow = getattr(importlib.import_module(f"penstock.flows.{found[name][0]}"), found[name][0])
    for text in parameters:
        key, _, value = text.partition("=")
        assert key in flow.parameters.properties, f"{name} takes no {key}"
        json.loads(value)


def check_line(line: str) -> None:
    """Check one line of a page.

    Raises:
        Exception: of the program's parser, if it does not take the line.
    """
    words = shlex.split(line, comments=True)
    while words and VARIABLE.match(words[0]):  # set for the command alone
        words.pop(0)
    program, *rest = words
    if program == "penstock":
        check_recipe(*called(rest))
    elif program == "prefect":
        command, given, _ = prefect_app.parse_args(rest, exit_on_error=False, print_error=False)
        if rest[:2] == ["deployment", "run"]:
            check_deployment(given.arguments["name"], given.arguments.get("params", []))
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):.*?## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {*rest} <= {*targets}, f"no such target: {rest}"
    elif program == "export":
        for text in rest:
            name, _, value = text.partition("=")
            assert name.startswith("PREFECT_") and hasattr(prefect.settings, name), f"Prefect has no {name}"
            if value.startswith("prefect."):
                importlib.import_module(value)
    else:
        raise AssertionError(f"nothing checks '{line}': teach this test the program, or put it on another page")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the README's files, two recipes without its reward, and those of the repository."""
    page = FIRST[0].read_text(encoding="utf-8")
    (row,), (reward,), (recipe,) = (blocks(page, language) for language in ("json", "python", "yaml"))
    bare = re.sub(r"reward:\n  .*\n", "", recipe)  # docs/rewards.md gives the reward beside them
    for name, text in (("my_reward.py", reward), ("sums.yaml", recipe), ("a.yaml", bare), ("b.yaml", bare)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text(row * 64, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("page", FIRST, ids=named)
def test_every_command_that_a_person_reads_first_is_taken(page: Path) -> None:
    """Whatever its program is: a line that nothing here checks fails. Control: there are some, also in sentences."""
    text = page.read_text(encoding="utf-8")
    lines, said = [*command_lines(text)], [*said_commands(text)]
    assert len(lines) > 10
    assert said
    for line in (*lines, *said):
        check_line(line)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("page", OTHERS, ids=named)
def test_every_command_of_penstock_on_the_other_pages_is_taken(page: Path) -> None:
    """Their other programs (docker, kubectl, sbatch) are those of the tests of these pages."""
    for line in command_lines(page.read_text(encoding="utf-8")):
        if re.match(r"([A-Z_]+=\S+ )*penstock ", line):
            check_line(line)


def test_the_pages_have_the_commands_of_penstock() -> None:
    """The control of the test before."""
    lines = [line for page in PAGES for line in command_lines(page.read_text(encoding="utf-8"))]
    assert sum("penstock " in line for line in lines) > 80


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("penstock trian sums.yaml", "trian"),
        ("penstock train sums.yaml --dryrun", "--dryrun"),
        ("penstock train sums.yaml rollout.sampels=16", "rollout.samples"),
        ("penstock train sums.yaml rollout.samples=0", "rollout.samples"),
        ("penstock train sums.yaml --resume model.path=other", "'model.path' cannot change"),
        ("penstock train --resume runs/sums iteratons=200", "iterations"),
        ("penstock set runs/sums rollout.samples=4", "cannot change during"),
        ("penstock sweep sums.yaml sed=0,1", "seed"),
        ("penstock chain configs/chain.yaml learnt.iterations=3", "learn"),
        ("penstock evaluate runs/sums evaluate.smaples=2", "evaluate.samples"),
        ("penstock bench step configs/bench_grpo.yaml rollout.sampels=2", "rollout.samples"),
        ("penstock serve", "Missing parameter: model"),
        ("prefect worker strat --pool penstock", "strat"),
        ("prefect worker start --pol penstock", "--pol"),
        ("prefect deployment run train/quikstart", "train/quickstart"),
        ("prefect deployment run train/quickstart -p iteratons=2", "iteratons"),
        ("make quikstart", "quikstart"),
        ("export PREFECT_API_URLS=http://127.0.0.1:4200/api", "PREFECT_API_URLS"),
        ("docker compose up", "nothing checks"),
    ],
)
def test_a_line_that_would_fail_is_noticed(line: str, problem: str) -> None:
    """The control of all the lines above: a word of one of them is changed."""
    with pytest.raises((Exception, AssertionError), match=re.escape(problem)):
        check_line(line)


@pytest.fixture
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with a tiny model under the name that the recipe gives; no GPU, whatever this machine has."""
    folder = here / "models" / "Qwen2.5-1.5B-Instruct"
    Shape("qwen2", tied=True).write(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}), encoding="utf-8")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for module in (memory, attention, folders, mixtures, served):
        monkeypatch.setattr(module, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 64 * GIB)
    monkeypatch.syspath_prepend(here)
    return here


def test_the_example_is_looked_at_without_a_complaint(machine: Path) -> None:
    """The README's recipe, reward and row; nothing is made. Control: a row without the answer."""
    before = sorted(machine.iterdir())
    done = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["train", "sums.yaml", "--dry-run"])
    assert done.exit_code == 0, done.exception
    assert "my_reward:score" in done.output
    assert sorted(machine.iterdir()) == before
    (machine / "train.jsonl").write_text('{"question": "1+1="}\n', encoding="utf-8")
    refused = CliRunner().invoke(app, ["train", "sums.yaml", "--dry-run"])
    assert isinstance(refused.exception, UserError)
    assert "answer" in str(refused.exception)
