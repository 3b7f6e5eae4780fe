"""Branches of verifiers' message graph are paths: its harness asks through the gateway, as any agent does."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.gateway.asks import Turn
from penstock.environments.pool import EnvironmentPool
from penstock.environments.verifiers import FILE
from tests.environments.agents.test_gateway import play
from tests.gateway.verifiers_interpreter import verifiers_python as verifiers_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("verifiers")]

TASKSET = Path(__file__).with_name("verifiers_branches.py")


@pytest.mark.parametrize("max_paths", [1, 2])
def test_its_branches_are_paths(
    verifiers_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_paths: int
) -> None:
    """The last request goes on with the first turn, and the one between is a path by itself.

    Control: where one path is learnt from, that turn is taken aside, and the last request goes on all the same.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copy(TASKSET, tmp_path)
    entry = {"python": verifiers_python, "taskset": {"id": TASKSET.stem}}
    (tmp_path / FILE).write_text(json.dumps({"tasksets": {"twice": entry}}))
    section = {"type": "penstock.environments.verifiers:Taskset", "settings": {"name": "twice"}, "timeout_s": 120}
    numbers = count(1)

    def says(number: int) -> Turn:
        learnt = max_paths > 1 or number != 2
        return Turn(f"It is {number}.", prompt=[1], tokens=[2], learnt=learnt, number=number if max_paths > 1 else 0)

    with closing(EnvironmentPool(EnvironmentConfig(**section, workers=1, max_paths=max_paths))) as pool:
        reply, asked = play(pool, lambda _: says(next(numbers)), {"task": 0})
    assert reply.failure is None and reply.parts["branches"] == 2
    assert [ask.follows for ask in asked] == [False, False, True]
    assert [ask.after for ask in asked] == [0, 0, 1 if max_paths > 1 else 0]
    assert asked[2].messages == [{"role": "user", "content": "Are you sure?"}]
