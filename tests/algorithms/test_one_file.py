"""A new estimator or preference loss with a new setting is one file: configuration, dry run and documentation follow.

The file is put into a copy of the package, which other processes import in its place; nothing else is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.benchmarks.accuracy.algorithms_page import table
from tests.test_rooms import MOST_FILES, crowded

ROOT = Path(__file__).resolve().parents[2]
FILE = '''"""Sharpened rewards, invented for a test."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Gt, Le

from penstock.algorithms.advantages.types import AdvantageInputs, Advantages, spread_over_tokens
from penstock.algorithms.declarations.algorithm import Algorithm

ALGORITHMS = (
    Algorithm("sharp", "sharpened", "ppo_clip", "rewards to a power", paper="none", defaults={"sharpness": 2.0}),
)


def sharpened(inputs: AdvantageInputs, *, sharpness: Annotated[float, Gt(0), Le(9)] = 1.0) -> Advantages:
    """A = sign(R) abs(R)^sharpness at every counted token.

    Args:
        inputs: a batch.
        sharpness: the power that rewards are raised to.

    Note:
        Invented.
    """
    scores_B = inputs.scores_B()
    return spread_over_tokens(np.sign(scores_B) * np.abs(scores_B) ** sharpness, inputs)
'''
LOSS = '''"""A margin that must be reached, invented for a test."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Le

from penstock.algorithms.preference.types import PairInputs, PreferenceOutputs, log_ratio_differences

PAPER = "none"


def reached(inputs: PairInputs, *, least: Annotated[float, Gt(0), Le(9)] = 1.0) -> PreferenceOutputs:
    """max(0, least - h), h the difference of log-ratios.

    Args:
        inputs: with reference log-probs.
        least: the difference at which a pair is learnt.

    Note:
        Invented.
    """
    difference_P = log_ratio_differences(inputs)
    return PreferenceOutputs((least - difference_P).clamp(min=0), difference_P.detach())
'''
COMMANDS = """
import sys
from penstock.cli.main import main
for arguments in {commands}:
    sys.argv = ["penstock", *arguments]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code)
    print("=====", flush=True)
"""


def outputs(folder: Path, commands: list[list[str]]) -> list[str]:
    """What commands print one after the other in a process that has `folder` before the repository."""
    result = subprocess.run(
        [sys.executable, "-c", COMMANDS.format(commands=commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return result.stdout.split("=====\n")[:-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the package, and of the page that describes it."""
    shutil.copytree(ROOT / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "docs" / "algorithms.md", tmp_path)
    return tmp_path


def commands(folder: Path) -> list[list[str]]:
    train = ["train", str(ROOT / "configs" / "quickstart.yaml"), "--dry-run", "algorithm.name=sharp"]
    measured = ROOT / "benchmarks" / "results" / "algorithms"
    results = [str(measured / f"algorithms{more}.json") for more in ("", "_4_mini_batches")]
    return [
        [*train, "algorithm.settings.sharpness=3"],
        train,
        [*train, "algorithm.settings.sharpness=9.5"],
        [*train, "algorithm.settings.sharpnes=3"],
        ["bench", "page", results[0], str(folder / "algorithms.md"), "--more-steps", results[1]],
    ]


@pytest.mark.slow
def test_a_new_estimator_is_one_file(folder: Path) -> None:
    """Its setting is taken, shown and checked, and its rows are on the page; the control is the next test."""
    (folder / "penstock" / "algorithms" / "advantages" / "returns" / "sharpened.py").write_text(FILE, encoding="utf-8")
    given, default, beyond, misspelt, _ = outputs(folder, commands(folder))
    assert "sharpness: 3.0" in given
    assert "sharpness: 2.0" in default, "of the algorithm, which has another than the function"
    assert "algorithm.settings.sharpness: must be less than or equal to 9 (given: 9.5)" in beyond
    assert "algorithm.settings.sharpnes: unknown setting (did you mean 'sharpness'?)" in misspelt
    page = (folder / "algorithms.md").read_text(encoding="utf-8")
    row = ["`sharpened`", "A = sign(R) abs(R)^sharpness at every counted token.", "`sharpness` 1", "Invented."]
    assert table(page, "Advantage estimators")["sharpened"] == row
    assert table(page, "By name")["sharp"][2] == "`sharpened`, `sharpness: 2`"
    meaning = "the power that rewards are raised to (default: sharpened 1.0)"
    assert table(page, "Settings")["sharpness"][1:] == [
        "number > 0 and <= 9 or {iteration: number > 0 and <= 9}",
        meaning,
    ]
    assert "sharp" in table(page, "Accuracy")


def preference_commands(folder: Path) -> list[list[str]]:
    (folder / "recipe.yaml").write_text("model: {tiny: {}}", encoding="utf-8")
    begin = ["preference", "recipe.yaml"]
    return [
        [*begin, "loss.name=reached", "loss.settings.least=3"],
        [*begin, "loss.name=reached", "loss.settings.least=9.5"],
        [*begin, "loss.name=reached", "loss.settings.leats=3"],
        begin,
        ["keys", "preference"],
        commands(folder)[-1],
    ]


@pytest.mark.slow
def test_a_new_preference_loss_is_one_file(folder: Path) -> None:
    """Its setting is taken, listed and checked beside those of the others, which go on as before.

    A recipe that is right ends at the data, of which it names none.
    """
    (folder / "penstock" / "algorithms" / "preference" / "reached.py").write_text(LOSS, encoding="utf-8")
    given, beyond, misspelt, other, keys, _ = outputs(folder, preference_commands(folder))
    assert "'data.train' is not set" in given
    assert "'data.train' is not set" in other
    assert "loss.settings.least: must be less than or equal to 9 (given: 9.5)" in beyond
    assert "loss.settings.leats: unknown setting (did you mean 'least'?)" in misspelt
    assert "loss.settings.least" in keys
    page = (folder / "algorithms.md").read_text(encoding="utf-8")
    row = ["`reached`", "max(0, least - h), h the difference of log-ratios.", "pairs", "yes", "`least` 1", "none"]
    assert table(page, "Preference losses")["reached"] == [*row, "Invented."]
    meaning = "the difference at which a pair is learnt (default: reached 1.0)"
    assert table(page, "Settings of preference losses")["least"][1:] == ["number > 0 and <= 9", meaning]


def test_every_room_of_the_mathematics_takes_one_more_file(folder: Path) -> None:
    """Else "one file" breaks the limit of tests/test_rooms.py. Control: one room with many more."""
    rooms = [path.parent for path in (folder / "penstock" / "algorithms").rglob("__init__.py")]
    for room in rooms:
        (room / "one_more.py").touch()
    assert crowded(folder, "penstock/algorithms") == {}
    for number in range(MOST_FILES):
        (rooms[0] / f"many_more_{number}.py").touch()
    assert len(crowded(folder, "penstock/algorithms")) == 1


@pytest.mark.slow
def test_without_the_file_there_is_no_such_name(folder: Path) -> None:
    """The control, in the same copy."""
    given, preferred, *_, page = outputs(
        folder, [commands(folder)[0], preference_commands(folder)[0], commands(folder)[-1]]
    )
    assert "algorithm.name: must be" in given
    assert "given: 'sharp'" in given
    assert "loss.name: must be" in preferred
    assert "given: 'reached'" in preferred
    assert (folder / "algorithms.md").read_text(encoding="utf-8") == (ROOT / "docs" / "algorithms.md").read_text()
