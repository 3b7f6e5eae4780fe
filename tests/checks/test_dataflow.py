"""A dataflow that cannot be one is refused before anything starts, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.checks.dataflow import load_dataflow
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.usercode.given import given, name_of

MINE = """
def right(step): ...
def more(step, also): ...
def none(): ...
async def later(step): ...
def yields(step): yield
number = 3
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TrainConfig]:
    """Return a configuration whose dataflow is in the working folder."""
    (tmp_path / "mine_to_check.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return lambda name: TrainConfig(dataflow=f"mine_to_check:{name}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("more", "missing a required argument: 'also'"),
        ("none", "too many positional arguments"),
        ("later", "asynchronous"),
        ("yields", "a generator"),
        ("number", "is not a function but of type int"),
        ("rigt", "did you mean 'right'"),
    ],
)
def test_what_is_no_dataflow_is_refused(named: Callable[[str], TrainConfig], name: str, said: str) -> None:
    """Control: one that takes the iteration is found."""
    with pytest.raises(UserError, match=said):
        load_dataflow(named(name))
    assert load_dataflow(named("right")).__name__ == "right"


def test_a_function_that_is_handed_over_is_found_as_long_as_that_lasts() -> None:
    """Afterwards the message says that a program gave it; it is never taken from anywhere else."""

    def steps(step: object) -> None: ...

    config = TrainConfig(dataflow=name_of(steps))
    with given(steps):
        assert load_dataflow(config) is steps
    with pytest.raises(UserError, match="was given by a program, and no module has it"):
        load_dataflow(config)


def test_a_stream_and_a_dataflow_exclude_each_other() -> None:
    """Control: each of them is taken alone."""
    apart = {"groups": {"one": {"roles": ["actor"]}, "other": {"roles": ["rollout"]}}}
    stream = {"rollout": {"stream": {"staleness": 0, "portions": 4}}}
    with pytest.raises(UserError, match="with a 'dataflow' of yours one follows the other"):
        config_from_mapping({"dataflow": "mine:steps", **apart, **stream}, "test")
    config_from_mapping({**apart, **stream}, "test")
    config_from_mapping({"dataflow": "mine:steps", **apart}, "test")
