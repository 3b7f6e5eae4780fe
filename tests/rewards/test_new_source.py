"""A new source of rewards is what CONTRIBUTING.md says: a file, its section, a line of the table, tests of its keys.

All of it is put into a copy of the packages and the tests, which other processes import in their place; nothing else
is touched. The control leaves out the line of the table.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.state.run_folder import RunFolder, read_metrics

ROOT = Path(__file__).resolve().parents[2]
FILE = '''"""Scores from a file, invented for a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from penstock.configs.sections.reward import RewardConfig
from penstock.base.errors import UserError
from penstock.rewards.pool import Score
from penstock.rewards.types import Sample


@dataclass(frozen=True)
class Lookup:
    """Scores samples by what a file says of their responses."""

    config: RewardConfig
    calls_ahead: int = 1

    def score(self, samples: Sequence[Sample], tolerated: float = inf) -> list[Score]:
        """Score every sample; a response that is not in the file is a failure."""
        assert self.config.lookup is not None
        known = json.loads(Path(self.config.lookup.path).read_text())
        return [
            Score(known[sample.response], {}, None)
            if sample.response in known
            else Score(self.config.failure_value, {}, "not in the file")
            for sample in samples
        ]


def check_lookup(config: RewardConfig) -> None:
    """Check that the file is there."""
    assert config.lookup is not None
    if not Path(config.lookup.path).is_file():
        raise UserError(f"reward.lookup.path: there is no file {config.lookup.path}", "correct the path")
'''
SECTION = '''class LookupConfig(Section):
    """A file that says what responses are worth."""

    path: str = Field(description="JSON file: rewards by response")


'''
TIMEOUT, HEADING = "    timeout_s: float", "    # ---- environments\n"
EDITS = {
    "penstock/configs/sections/reward.py": (
        ("class RewardConfig(Section):\n", f"{SECTION}class RewardConfig(Section):\n"),
        (TIMEOUT, f'    lookup: LookupConfig | None = Field(None, description="a file of rewards")\n{TIMEOUT}'),
        ('"judge", "service")', '"judge", "service", "lookup")'),
    ),
    "tests/configs/effects.py": (
        (HEADING, f'    "reward.lookup.path": "rewards/test_lookup.py::test_it_reads_the_path",\n{HEADING}'),
    ),
}
TEST = """
def test_it_reads_the_path() -> None:
    LookupConfig(path="a file")
"""
TABLE = (
    (
        "from penstock.rewards.pool import RewardPool\n",
        "from penstock.rewards.lookup import Lookup, check_lookup\nfrom penstock.rewards.pool import RewardPool\n",
    ),
    (
        "SOURCES: Mapping[str, Kind] = {",
        'SOURCES: Mapping[str, Kind] = {\n    "lookup": Kind(\n        lambda config, columns: check_lookup(config), '
        "lambda config, columns, log: nullcontext(Lookup(config))\n    ),",
    ),
)
PROGRAM = """
import sys
from pathlib import Path
from penstock.configs.loading.load import load_config
from penstock.base.errors import UserError
from penstock.checks.training import check_reward
from penstock.rewards.source import open_scorer
from penstock.rewards.types import Sample
from tests.configs.test_every_key import EFFECTS, TrainConfig, leaf_keys, problems

config = load_config(Path(sys.argv[1]), sys.argv[2:])
try:
    check_reward(config, ["answer"])
except (KeyError, UserError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(config.reward.source, config.reward.scored_by_flow)
with open_scorer(config.reward, ["answer"]) as scorer:
    print([score.reward for score in scorer.score([Sample(text, "p", "", text, {}) for text in ("good", "bad", "?")])])
print(problems(leaf_keys(TrainConfig), EFFECTS["train"]))
"""
RECIPE = """
iterations: 1
model: {tiny: {hidden_size: 64, layers: 1, heads: 2, kv_heads: 1}}
data: {max_prompt_tokens: 16, arithmetic: {digits: 1, sft: 8, train: 16, heldout: 4}}
reward: {failure_value: 0.5, max_failure_share: 1}
rollout: {prompts: 4, samples: 2, max_response_tokens: 6, max_sequences: 8}
checkpoint: {every: 0}
"""
COMMAND = "from penstock.cli.main import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the packages and the tests, with the source but without its line of the table."""
    for package in ("penstock", "tests"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "penstock" / "rewards" / "lookup.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "tests" / "rewards" / "test_lookup.py").write_text(TEST, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "rewards.json").write_text('{"good": 1.0, "bad": 0.25}')
    for file, changes in EDITS.items():
        edit(tmp_path / file, changes)
    return tmp_path


def edit(path: Path, changes: tuple[tuple[str, str], ...]) -> None:
    text = path.read_text(encoding="utf-8")
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has `folder` before the repository."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = given | {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PREFECT_HOME": str(folder / "prefect"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def said(folder: Path, *overrides: str) -> tuple[str, str]:
    """Return what checking and opening this source gives, output and errors."""
    done = run(folder, PROGRAM, "recipe.yaml", *overrides)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_new_source_is_its_file_its_section_and_a_line_of_the_table(folder: Path) -> None:
    """It is checked, opened by the flow, and its key has its test. Control: the next test."""
    edit(folder / "penstock" / "rewards" / "source.py", TABLE)
    output, errors = said(folder, f"reward.lookup.path={folder / 'rewards.json'}")
    assert output.splitlines() == ["reward.lookup True", "[1.0, 0.25, 0.5]", "[]"], errors
    assert "there is no file nowhere.json" in said(folder, "reward.lookup.path=nowhere.json")[1]
    errors = said(folder, "reward.lookup.path=a", "reward.model=b")[1]
    assert "'model' and 'lookup' exclude each other: keep one" in errors
    errors = said(folder, "reward.lookup.path=a", "reward.workers=3")[1]
    assert "'workers' has no effect with 'lookup'" in errors


def test_without_its_line_of_the_table_nothing_opens_it(folder: Path) -> None:
    """The control, in the same copy."""
    output, errors = said(folder, f"reward.lookup.path={folder / 'rewards.json'}")
    assert (output, errors.strip()) == ("", "KeyError: 'lookup'")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.xdist_group("flows")
def test_a_training_takes_its_rewards(folder: Path) -> None:
    """Nothing else names the source: not the flow, not the tasks. All but known responses get the failures' value."""
    edit(folder / "penstock" / "rewards" / "source.py", TABLE)
    path = f"reward.lookup.path={folder / 'rewards.json'}"
    done = run(folder, COMMAND, "train", "recipe.yaml", path, "--run", str(folder / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    last = read_metrics(RunFolder(folder / "run"))[-1]["metrics"]
    assert (last["reward/mean"], last["reward/failures"]) == (0.5, 8)
