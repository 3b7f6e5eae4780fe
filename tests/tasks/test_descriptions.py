"""Every task and flow says on its page in Prefect what it does, in a sentence: the docstring's first line."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prefect import Flow, Task, task

SENTENCE = re.compile(r"[A-Z][a-z]+,? .+\.", re.DOTALL)


def described() -> Iterator[Task[..., Any] | Flow[..., Any]]:
    """Return all that Prefect shows, each where it is defined."""
    for room in ("penstock.tasks", "penstock.flows", "penstock.session"):
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, f"{room}."):
            for found in vars(importlib.import_module(module.name)).values():
                if isinstance(found, Task | Flow) and found.fn.__module__ == module.name:
                    yield found


def says_what_it_does(found: Task[..., Any] | Flow[..., Any]) -> bool:
    """Whether the description begins with a sentence that has a verb in front."""
    first = str(found.description or "").partition("\n\n")[0]
    return bool(SENTENCE.fullmatch(first))


FOUND = {f"{type(found).__name__} {found.name}": found for found in described()}


def test_all_are_found() -> None:
    """Those of an iteration, of offline training and of other machines among them."""
    assert {"Flow train", "Flow iteration", "Flow engine-host", "Task rollout", "Task reward", "Task save_step"} <= {
        *FOUND
    }


@pytest.mark.parametrize("name", FOUND)
def test_each_says_what_it_does(name: str) -> None:
    """In one sentence, which the page shows below the name."""
    assert says_what_it_does(FOUND[name]), FOUND[name].description


def test_one_that_says_nothing_is_noticed() -> None:
    """The control."""

    @task
    def silent() -> None: ...

    @task
    def mumbling() -> None:
        """log-probs"""

    assert not says_what_it_does(silent)
    assert not says_what_it_does(mumbling)
