"""What a configuration may name as `module:name`.

Invariant: whoever fills in a form chooses among functions that whoever owns the machine has put or allowed there; what
is refused was not even imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.algorithms.registry import choice_named, needs
from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.prompt_selection import DynamicSamplingConfig, SamplerConfig
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.data.group_filters import load_filter
from penstock.data.samplers import load_sampler
from penstock.environments.loading import load_environment
from penstock.evaluators.loading import load_evaluator
from penstock.rewards.function import load_reward_function
from penstock.usercode.imports import OURS, import_named

NOTES_ITS_IMPORT = "import os\nos.environ['IMPORTED'] = __name__\ndef score(response): return 1.0\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of a user, without what the tests allow."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("PENSTOCK_ALLOWED_MODULES")
    monkeypatch.delenv("IMPORTED", raising=False)
    return folder


def named(spec: str) -> Callable[..., object]:
    return import_named("reward.function", spec, "function", "my_rewards:score")


def installed(folder: Path, name: str) -> None:
    """Put a module where the interpreter finds it and where nobody works."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(NOTES_ITS_IMPORT)
    sys.path.insert(0, str(folder))


NAMING = {
    "reward.function": lambda spec: load_reward_function(spec, {"command": "true"}, []),
    "environment.type": lambda spec: load_environment(EnvironmentConfig(type=spec, settings={"command": "true"})),
    "evaluate.evaluators": load_evaluator,
    "data.sampler.name": lambda spec: load_sampler(SamplerConfig(name=spec, settings={"command": "true"})),
    "algorithm.dynamic_sampling.function": lambda spec: load_filter(DynamicSamplingConfig(function=spec)),
    "algorithm.advantage": lambda spec: TrainConfig(algorithm={"advantage": spec}),  # type: ignore[arg-type]
    "algorithm.policy_loss": lambda spec: TrainConfig(algorithm={"policy_loss": spec}),  # type: ignore[arg-type]
    "what a loss chooses": choice_named,
    "what a loss needs": lambda spec: needs("grpo", spec),
}


@pytest.mark.parametrize("setting", NAMING)
def test_no_setting_imports_what_nobody_allowed(setting: str, tmp_path: Path) -> None:
    """Every way from a name to a module is the one with the check; the module was not imported."""
    installed(tmp_path / "elsewhere", "quiet_module")
    for spec in ("os:system", "quiet_module:score"):
        with pytest.raises(UserError, match="may not be named here"):
            NAMING[setting](spec)
    assert "IMPORTED" not in os.environ


def test_what_lies_in_the_working_folder_may_be_named(here: Path) -> None:
    """A module, and a module of a package; Penstock's own that are made for it as well."""
    (here / "my_reward.py").write_text("def score(response): return 1.0\n")
    (here / "my_package").mkdir()
    (here / "my_package" / "parts.py").write_text("from my_reward import score\n")
    assert named("my_reward:score")("") == named("my_package.parts:score")("") == 1.0
    for spec in (
        "penstock.rewards.builtin:exact_match",
        "penstock.environments.calculator:Calculator",
        "penstock.rewards.judge:found_number",
    ):
        assert spec.partition(":")[0] in OURS
        named(spec)


def test_an_operator_may_allow_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with all below it; the remedy of the refusal says how. A wrong entry is refused, not passed over."""
    installed(tmp_path / "elsewhere", "some_reward")
    with pytest.raises(UserError, match="PENSTOCK_ALLOWED_MODULES=some_reward"):
        named("some_reward:score")
    for allowed in ("other, some_reward", "some_reward.*"):
        monkeypatch.setenv("PENSTOCK_ALLOWED_MODULES", allowed)
        assert named("some_reward:score")("") == 1.0
    for others in ("some", "some_reward_too", "some_reward.part"):
        monkeypatch.setenv("PENSTOCK_ALLOWED_MODULES", others)
        with pytest.raises(UserError, match="may not be named here"):
            named("some_reward:score")
    monkeypatch.setenv("PENSTOCK_ALLOWED_MODULES", "some-reward")
    with pytest.raises(UserError, match="PENSTOCK_ALLOWED_MODULES has 'some-reward', which is no module"):
        named("some_reward:score")


@pytest.mark.parametrize(
    "spec",
    [
        "subprocess:run",
        "posix:system",
        "builtins:eval",
        "penstock.rewards.builtin:os.system",  # no way through attributes
        "penstock.rewards.builtin:re",
        "..os:system",
        "penstock.cli.serving.serve:serve",  # ours, but not made to be named
        "penstock.base.files:write_text",
        "penstock.usercode.guard:begin_worker",
        "penstock.rewards.judge:RewardPool",  # from a module of ours that is not made for it
        "penstock.environments.calculator:dataclass",
        "tests.own_algorithm:above_median",
    ],
)
def test_what_runs_commands_or_writes_files_has_no_name(spec: str) -> None:
    """Neither Python's, nor ours, nor what a module of ours imports for itself."""
    with pytest.raises(UserError):
        named(spec)


def test_what_a_users_module_imports_for_itself_is_not_offered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that uses `subprocess.run` does not make it a reward. Controls: its own, also bound or decorated."""
    (here / "uses_others.py").write_text(
        "import functools\nfrom os import system\nfrom subprocess import run\n"
        "def score(response, bonus=0.0): return bonus\n"
        "class Scorer:\n    def __call__(self, response): return 3.0\n"
        "more = functools.partial(score, bonus=2.0)\nscorer = Scorer()\n"
        "cached = functools.lru_cache(score)\nshell = functools.partial(run, shell=True)\n"
    )
    for name in ("system", "run", "shell"):
        with pytest.raises(UserError, match=f"'uses_others:{name}' is defined in '(posix|subprocess)'"):
            named(f"uses_others:{name}")
    assert [named(f"uses_others:{name}")("") for name in ("score", "more", "scorer", "cached")] == [0.0, 2.0, 3.0, 0.0]
    with pytest.raises(UserError, match=r"It has: score, Scorer, more, scorer, cached\."):
        named("uses_others:nothing")
    monkeypatch.setenv("PENSTOCK_ALLOWED_MODULES", "subprocess")
    named("uses_others:shell")


def test_an_environment_of_packages_in_the_working_folder_is_not_the_working_folder(here: Path) -> None:
    """`.venv` lies below it as a rule. Control: the same file beside the recipe."""
    installed(here / ".venv" / "lib" / "site-packages", "some_library")
    with pytest.raises(UserError, match="does not lie in the working folder"):
        named("some_library:score")
    assert "IMPORTED" not in os.environ
    (here / "some_script.py").write_text(NOTES_ITS_IMPORT)
    named("some_script:score")
    assert os.environ["IMPORTED"] == "some_script"


@pytest.mark.parametrize("name", ["rewards", "data", "tasks", "flows", "configs", "engines"])
def test_a_users_file_may_have_the_name_of_a_room_inside_penstock(here: Path, name: str) -> None:
    """The control is the next test: names of our top-level packages are refused."""
    (here / f"{name}.py").write_text("def score(response): return 1.0\n")
    assert named(f"{name}:score")("") == 1.0


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("penstock", "Penstock"),
        ("statistics", "Python or an installed package"),
        ("posix", "Python or an installed package"),
    ],
)
def test_a_file_that_another_module_hides_is_named_and_not_passed_over(
    here: Path, name: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not answered by what the other module lacks; under a name of its own the file is found."""
    (here / f"{name}.py").write_text("def score(response): return 1.0\n")
    with pytest.raises(UserError, match=rf"'{name}' is a module of {owner}, which hides .*/{name}\.py") as caught:
        named(f"{name}:score")
    assert caught.value.remedy == f"Rename yours, for instance my_{name}."
    (here / f"{name}.py").rename(here / f"my_{name}.py")
    assert named(f"my_{name}:score")("") == 1.0
