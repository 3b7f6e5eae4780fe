"""Environments of the package `verifiers` 0.4 (Prime Intellect), which has an interpreter of its own.

    environment: {type: "penstock.environments.verifiers:Taskset", settings: {name: hangman}}

    {"tasksets": {"hangman": {"python": "verifiers-env/bin/python",
                              "taskset": {"id": "textarena", "game": "Hangman-v0"}}}}

The second is `.verifiers.json` in the working folder. What verifiers requires does not fit into Penstock's interpreter,
so a process of the other one plays (verifiers_runner.py, which also says what they tell each other). A worker process
has one for each entry, which its episodes share: it starts with the first and ends with this process. One that dies
fails the episodes that were in it; the next begins another. verifiers asks the policy at the episode's address, and
scores by the taskset's functions.

    python -m penstock.environments.verifiers PYTHON --tasks '{"id": "textarena", "game": "Hangman-v0"}' --count 100

prints the rows of a data file: `task`, the number that an episode asks for, and `prompt`.

Left out: a seed, for which verifiers' tasks have no place; images; several policies in an episode.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.environments.agent import Policy
from penstock.environments.environment import Reward
from penstock.environments.named import NamedIn
from penstock.usercode.kept import command_of, unread

RUNNER = str(Path(__file__).with_name("verifiers_runner.py"))
FILE = ".verifiers.json"
IN = NamedIn(FILE, "tasksets", "taskset", '{"python": "...", "taskset": {"id": "..."}}')
LONGEST_LINE = 2**24
PACKAGE = "verifiers==0.4.0"


class EpisodeError(Exception):
    """An episode failed in verifiers, whose words these are."""


class Taskset:
    """One episode of a taskset.

    Args:
        name: of an entry of `.verifiers.json`. Its `python` is the interpreter in which verifiers and the taskset are
            installed, `taskset` verifiers' configuration of the taskset, with its `id` at least, and `env`, which may
            be left out, the rest of verifiers' `[env]`, such as {"agent": {"max_turns": 4}}.

    Raises:
        UserError: there is no such file, entry or interpreter, or no id.
    """

    def __init__(self, name: str) -> None:
        entry = _entry(name)
        self._python = _interpreter(entry["python"])
        self._settings = {"taskset": entry["taskset"], "env": entry.get("env", {})}

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> Reward:
        """Play the row's task, and return what the taskset makes of it: the reward and its parts by name.

        Raises:
            UserError: verifiers does not start, or the row names no task.
            EpisodeError: the episode failed.
            ConnectionError: verifiers' process ended meanwhile.
        """
        if "task" not in row:
            raise UserError(
                "a data row has no column 'task', the number of its task in the verifiers taskset",
                f"python -m penstock.environments.verifiers {self._python} --tasks ... --count ... prints such rows",
            )
        runner = await _running(self._python, self._settings)
        told = await runner.ask(task=row["task"], url=policy.url, model=policy.model)
        if told["failure"] is not None:
            raise EpisodeError(told["failure"])
        if told["reward"] is None:
            return None
        return {**told["parts"], "reward": told["reward"]}  # in this name, last, so that no part takes its place


def _entry(name: str) -> dict[str, Any]:
    entry = IN.entry(name)
    if unknown := entry.keys() - {"python", "taskset", "env"}:
        raise UserError(f"'{name}' in {FILE} has '{min(unknown)}', which is unknown", "remove it, or put it into env")
    if "python" not in entry or not isinstance(entry.get("taskset"), dict) or not entry["taskset"].get("id"):
        raise UserError(f"'{name}' in {FILE} needs a python, and a taskset with an id", f"for instance {IN.example}")
    return entry


def _interpreter(python: str) -> str:
    found = shutil.which(python)
    if found is None:
        raise UserError(
            f"there is no interpreter '{python}' for verifiers",
            f"make one: python -m venv verifiers-env && verifiers-env/bin/python -m pip install {PACKAGE}",
        )
    return found


# ---- the process ---------------------------------------------------------------------------------------------------


@dataclass
class _Runner:
    """A process of the other interpreter.

    Attributes:
        awaited: answers, by the number of the request.
        numbers: of requests.
        last_line: of its standard error.
        ended: why it answers nothing any more; empty while it lives.
    """

    process: asyncio.subprocess.Process
    awaited: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    last_line: str = "nothing"
    ended: str = ""

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request; if the caller is cancelled, so is what it asked for.

        Raises:
            ConnectionError: the process has ended.
        """
        if self.ended:
            raise ConnectionError(self.ended)
        number = next(self.numbers)
        self.awaited[number] = answer = asyncio.get_running_loop().create_future()
        self._send({"id": number, **request})
        try:
            return await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            del self.awaited[number]

    async def watch(self, forget: Callable[[], object]) -> None:
        """Hear the process until it ends; it is told to end where this task is cancelled, with its event loop.

        Args:
            forget: called once it is of no use any more.
        """
        try:
            await asyncio.gather(self._hear(), self._repeat())
            code = await self.process.wait()
            self.ended = f"verifiers' process ended (exit code {code}); its last words: {self.last_line}"
        finally:
            forget()
            self.ended = self.ended or "verifiers' process is not heard any more"
            for answer in self.awaited.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(self.ended))
            if self.process.returncode is None:
                self.process.terminate()
                await self.process.wait()

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _hear(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            told = json.loads(line)
            answer = self.awaited.get(told["id"])
            if answer is not None and not answer.done():
                answer.set_result(told)

    async def _repeat(self) -> None:
        """Repeat what it says to standard error in ours."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self.last_line = text or self.last_line
            print(text, file=sys.stderr)


_starting: dict[tuple[int, str], asyncio.Task[_Runner]] = {}  # or started, by event loop and settings
_watching: set[asyncio.Task[None]] = set()  # a loop alone would not keep them


async def _running(python: str, settings: dict[str, Any]) -> _Runner:
    """Return the process of these settings, started where there is none."""
    loop = asyncio.get_running_loop()
    key = (id(loop), json.dumps([python, settings], sort_keys=True))
    if key not in _starting:
        _starting[key] = loop.create_task(_start(python, settings, lambda: _starting.pop(key, None)))
    return await asyncio.shield(_starting[key])


async def _start(python: str, settings: dict[str, Any], forget: Callable[[], object]) -> _Runner:
    with unread() as descriptor:
        process = await asyncio.create_subprocess_exec(
            *command_of([python, "-P", RUNNER], [descriptor]),
            pass_fds=[descriptor],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
        )
    runner = _Runner(process)
    watching = asyncio.get_running_loop().create_task(runner.watch(forget))
    _watching.add(watching)
    watching.add_done_callback(_watching.discard)
    try:
        told = await runner.ask(**settings)
    except ConnectionError as error:
        raise UserError(
            f"verifiers does not start in '{python}': {runner.last_line}", f"{python} -m pip install {PACKAGE}"
        ) from error
    if told["failure"] is not None:
        raise UserError(
            f"verifiers cannot load the taskset '{settings['taskset']['id']}': {told['failure']}",
            f"correct its entry in {FILE}, or install the taskset's package into that interpreter",
        )
    return runner


def _list_tasks(python: str, *arguments: str) -> None:
    """Become the program that lists tasks."""
    found = _interpreter(python)
    os.execv(found, [found, "-P", RUNNER, *arguments])


if __name__ == "__main__":
    _list_tasks(*sys.argv[1:])
