"""Environments of verifiers: the real package in an interpreter of its own, and policies that follow a script."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.base.errors import UserError
from penstock.environments.agent import Policy
from penstock.environments.environment import Reward
from penstock.environments.verifiers import FILE, RUNNER, EpisodeError, Taskset
from tests.gateway.verifiers_interpreter import verifiers_python as verifiers_python
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("verifiers")]

SUMS = {"id": "verifiers_sums"}
HANGMAN = {"id": "textarena", "game": "Hangman-v0"}
PRODUCTS = {"id": "verifiers_tools"}
Body = dict[str, Any]


# ---- the policy ----------------------------------------------------------------------------------------------------


class Endpoint:
    """Answers for the policies that its paths name, `/NAME/v1`; each is a method."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Body]] = []
        self.waiting: set[str] = set()
        self.left: set[str] = set()
        self.open = False
        app = Starlette(routes=[Route("/{name}/v1/chat/completions", self._answer, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started, 30.0, "the endpoint to start")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def policy(self, name: str) -> Policy:
        return Policy(f"http://127.0.0.1:{self.port}/{name}/v1", "scripted")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _answer(self, request: Request) -> Response:
        name, body = request.path_params["name"], json.loads(await request.body())
        self.seen.append((name, body))
        play: Callable[[Request, Body], Awaitable[Body | Response]] = getattr(self, name.partition("-")[0])
        said = await play(request, body)
        if isinstance(said, Response):
            return said
        reason = "tool_calls" if "tool_calls" in said else "stop"
        choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": reason}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return JSONResponse({**whole, "usage": usage})

    async def adds(self, request: Request, body: Body) -> Body:
        """Sums, rightly."""
        numbers = re.findall(r"\d+", body["messages"][-1]["content"])
        return {"content": f"It is {sum(map(int, numbers))}."}

    async def guesses(self, request: Request, body: Body) -> Body:
        """Sums, wrongly."""
        return {"content": "It is 1000."}

    async def meets(self, request: Request, body: Body) -> Body:
        """Sums, once eight wait for it."""
        name = request.path_params["name"]
        self.waiting.add(name)
        while len({other for other in self.waiting if other.startswith("meets")}) < 8:
            await asyncio.sleep(0.01)
        return await self.adds(request, body)

    async def waits(self, request: Request, body: Body) -> Body:
        """Sums, once it may; notices when nobody wants the answer any more."""
        name = request.path_params["name"]
        self.waiting.add(name)
        while not self.open:
            if await request.is_disconnected():
                self.left.add(name)
                break
            await asyncio.sleep(0.01)
        return await self.adds(request, body)

    async def breaks(self, request: Request, body: Body) -> Response:
        """An error inside the server."""
        return JSONResponse({"error": {"message": "the engine is out of order"}}, 500)

    async def is_full(self, request: Request, body: Body) -> Response:
        """The conversation has become too long."""
        return JSONResponse({"error": {"message": "this exceeds the maximum context length of 64 tokens"}}, 400)

    async def spells(self, request: Request, body: Body) -> Body:
        """The letters of the only word there is."""
        return {"content": f"[{'TEA'[_turns(body)]}]"}

    async def misses(self, request: Request, body: Body) -> Body:
        """Letters that the word does not have."""
        return {"content": f"[{'BCDFGHIJ'[_turns(body)]}]"}

    async def multiplies(self, request: Request, body: Body) -> Body:
        """By the tool, whose result it repeats."""
        last = body["messages"][-1]
        if last["role"] == "tool":
            return {"content": f"It is {last['content']}."}
        name = body["tools"][0]["function"]["name"]
        call = {"name": name, "arguments": json.dumps({"a": 17, "b": 23})}
        return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}


def _turns(body: Body) -> int:
    return sum(message["role"] == "assistant" for message in body["messages"])


def named(python: str, taskset: Body, name: str = "it", **others: Any) -> Taskset:
    """An episode of what the file in the working folder says, from now on, under a name."""
    entry = {"python": python, "taskset": taskset, **{key: value for key, value in others.items() if value is not None}}
    Path(FILE).write_text(json.dumps({"tasksets": {name: entry}}))
    return Taskset(name)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for all tests, as a worker has it: they share the processes of verifiers. Then none is left."""
    with asyncio.Runner() as runner:
        yield runner
    until(lambda: not runners(), 60.0, "verifiers' processes to end")


@pytest.fixture(autouse=True, scope="module")
def surroundings(in_this_folder: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """TextArena finds its words here and asks no server for them; a tool's server finds its module."""
    folder = tmp_path_factory.mktemp("words")
    words = folder / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("tea\n")
    with pytest.MonkeyPatch.context() as patch:
        for taskset in Path.cwd().glob("verifiers_*.py"):
            shutil.copy(taskset, folder)
        patch.chdir(folder)
        patch.setenv("NLTK_DATA", str(folder))
        patch.setenv("PYTHONPATH", str(folder))
        yield


def runners(of: int | None = None) -> list[psutil.Process]:
    """The processes of verifiers below a process, without their keepers."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.cmdline()[-1:] == [RUNNER]:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def waiting(endpoint: Endpoint, *names: str) -> None:
    while not {*names} <= endpoint.waiting:
        await asyncio.sleep(0.01)


# ---- rewards -------------------------------------------------------------------------------------------------------


def test_a_taskset_judges_what_the_policy_says(verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint) -> None:
    """The reward and its parts, by name; a task by number or id. Control: a policy that is wrong.

    The policy is told nothing of sampling: that is the training's.
    """
    taskset = named(verifiers_python, SUMS)
    for task in (34, "3+4"):
        reward = loop.run(taskset.run({"task": task}, 0, endpoint.policy("adds")))
        assert reward == {"right": 1.0, "length": 8.0, "reward": 1.0}
    reward = loop.run(taskset.run({"task": 34}, 0, endpoint.policy("guesses")))
    assert reward == {"right": 0.0, "length": 11.0, "reward": 0.0}
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "What is 3+4?"}]}
    assert endpoint.seen == [("adds", asked), ("adds", asked), ("guesses", asked)]


def test_settings_reach_verifiers_and_infinite_parts_are_left_out(
    verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint
) -> None:
    """A taskset's own setting, a weight, and a metric that is infinite. Control: the weight changes the reward."""
    extra = {"metrics": {"endless": {"fn": "verifiers_sums.endless"}}, "rewards": {"right": {"weight": 0.5}}}
    taskset = named(verifiers_python, {**SUMS, "largest": 99, "task": extra})
    reward = loop.run(taskset.run({"task": 99}, 0, endpoint.policy("adds")))
    assert endpoint.seen[0][1]["messages"][0]["content"] == "What is 0+99?"
    assert reward == {"right": 0.5, "length": 9.0, "reward": 0.5}


def test_a_game_of_several_turns(verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint) -> None:
    """TextArena's Hangman, in verifiers' own environment: it answers each guess. Control: a policy that loses."""
    taskset = named(verifiers_python, HANGMAN)
    won = loop.run(taskset.run({"task": 0}, 0, endpoint.policy("spells")))
    assert won == {"game_reward": 1.0, "reward": 1.0}
    roles = [[message["role"] for message in body["messages"]] for _, body in endpoint.seen]
    assert roles[0] == ["system", "user"]
    assert roles[1:] == [["system", *["user", "assistant"] * turns, "user"] for turns in (1, 2)]
    lost = loop.run(taskset.run({"task": 0}, 0, endpoint.policy("misses")))
    assert lost == {"game_reward": 0.0, "reward": 0.0}


def test_limits_of_verifiers_end_an_episode_that_still_counts(
    verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint
) -> None:
    """A number of turns, and a conversation that is full: the policy's doing, not failures."""
    short = named(verifiers_python, HANGMAN, env={"player": {"max_turns": 2}})
    assert loop.run(short.run({"task": 0}, 0, endpoint.policy("spells"))) == {"game_reward": 0.0, "reward": 0.0}
    assert len(endpoint.seen) == 2
    sums = named(verifiers_python, SUMS)
    full = loop.run(sums.run({"task": 0}, 0, endpoint.policy("is_full")))
    assert full == {"right": 0.0, "length": 0.0, "reward": 0.0}


def test_tools_of_a_task(verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint) -> None:
    """The policy is told of them, and what it calls is answered by the task's server. Control: one that calls none."""
    taskset = named(verifiers_python, PRODUCTS)
    reward = loop.run(taskset.run({"task": 0}, 0, endpoint.policy("multiplies")))
    assert reward == {"right": 1.0, "results": 1.0, "reward": 1.0}
    (tool,) = endpoint.seen[0][1]["tools"]
    assert tool["function"]["description"] == "Multiply two numbers."
    reward = loop.run(taskset.run({"task": 0}, 0, endpoint.policy("guesses")))
    assert reward == {"right": 0.0, "results": 0.0, "reward": 0.0}


def test_episodes_of_a_process_go_on_concurrently(
    verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint
) -> None:
    """Eight, none of which is answered before all have asked; each has the reward of its own task, in one process."""

    async def play() -> list[Reward]:
        episodes = [named(verifiers_python, SUMS) for _ in range(8)]
        policies = [endpoint.policy("guesses"), *(endpoint.policy(f"meets-{number}") for number in range(8))]
        runs = zip([episodes[0], *episodes], policies, strict=True)
        return await asyncio.gather(*(taskset.run({"task": 10 + k}, 0, at) for k, (taskset, at) in enumerate(runs)))

    before = {process.pid for process in runners()}
    rewards = loop.run(play())
    assert [reward["reward"] for reward in rewards if isinstance(reward, dict)] == [0.0] + [1.0] * 8
    assert len({process.pid for process in runners()} - before) <= 1


def test_tasks_become_rows_of_a_data_file(verifiers_python: str) -> None:
    """From the command that the documentation names; what verifiers and the taskset print is not among them."""
    listed = subprocess.run(
        [sys.executable, "-m", "penstock.environments.verifiers", verifiers_python]
        + ["--tasks", json.dumps(HANGMAN), "--count", "2"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [row["task"] for row in rows] == [0, 1]
    assert all("You are playing Hangman" in row["prompt"] and row.keys() == {"task", "prompt"} for row in rows)


# ---- failures ------------------------------------------------------------------------------------------------------


def test_what_fails_in_verifiers_fails_the_episode_in_words(
    verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint
) -> None:
    """A policy that answers with an error, asked once; a task that is not there. The address is not told."""
    taskset = named(verifiers_python, SUMS)
    with pytest.raises(EpisodeError, match="ProviderError: upstream 500: .*the engine is out of order") as failed:
        loop.run(taskset.run({"task": 1}, 0, endpoint.policy("breaks")))
    assert len(endpoint.seen) == 1
    assert str(endpoint.port) not in str(failed.value)
    game = named(verifiers_python, HANGMAN)
    with pytest.raises(EpisodeError, match="the engine is out of order"):
        loop.run(game.run({"task": 0}, 0, endpoint.policy("breaks")))
    with pytest.raises(EpisodeError, match="LookupError: the taskset has no task 100"):
        loop.run(taskset.run({"task": 100}, 0, endpoint.policy("adds")))
    with pytest.raises(EpisodeError, match="LookupError: the taskset is endless"):
        loop.run(game.run({"task": "first"}, 0, endpoint.policy("adds")))


def test_an_episode_has_one_run_that_is_the_policys(
    verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint
) -> None:
    """Two attempts that verifiers compares would be one episode with two rewards. Control: one attempt."""

    def attempts(n: int) -> Reward:
        taskset = named(verifiers_python, SUMS, env={"id": "best-of-n", "n": n})
        return loop.run(taskset.run({"task": 34}, 0, endpoint.policy("adds")))

    assert attempts(1) == {"right": 1.0, "length": 8.0, "best": 1.0, "pass_at_n": 1.0, "reward": 1.0}
    with pytest.raises(EpisodeError, match="one run of one agent that is the policy.*; here 2 .*: agent, agent"):
        attempts(2)


def test_a_process_that_dies_fails_its_episodes_and_the_next_begins_another(
    verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint
) -> None:
    """By SIGKILL, with an episode inside that waits for the policy."""
    taskset = named(verifiers_python, {**SUMS, "largest": 8})

    async def killed() -> None:
        before = {process.pid for process in runners()}
        playing = asyncio.create_task(taskset.run({"task": 0}, 0, endpoint.policy("waits-1")))
        await waiting(endpoint, "waits-1")
        (mine,) = [process for process in runners() if process.pid not in before]
        mine.kill()
        await playing

    with pytest.raises(ConnectionError, match=r"verifiers' process ended \(exit code -9\); its last words: "):
        loop.run(killed())
    reward = loop.run(taskset.run({"task": 8}, 0, endpoint.policy("adds")))
    assert isinstance(reward, dict) and reward["reward"] == 1.0


def test_a_cancelled_episode_is_cancelled_in_verifiers(
    verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint
) -> None:
    """It takes back its request to the policy. Control: another one in the process, which waits on and is answered."""
    taskset = named(verifiers_python, SUMS)

    async def cancelled() -> Reward:
        one, other = (
            asyncio.create_task(taskset.run({"task": 12}, 0, endpoint.policy(name))) for name in ("waits-a", "waits-b")
        )
        await waiting(endpoint, "waits-a", "waits-b")
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        while not endpoint.left:
            await asyncio.sleep(0.01)
        assert endpoint.left == {"waits-a"}
        endpoint.open = True
        return await other

    reward = loop.run(cancelled())
    assert isinstance(reward, dict) and reward["reward"] == 1.0


DIES = """
import asyncio, sys
from penstock.environments.agent import Policy
from penstock.environments.verifiers import Taskset
asyncio.run(Taskset(sys.argv[1]).run({"task": 0}, 0, Policy(sys.argv[2], "scripted")))
"""


def test_nothing_of_it_outlives_a_worker(verifiers_python: str, endpoint: Endpoint) -> None:
    """A worker that is killed in mid-episode takes verifiers' process with it. Control: it was there before."""
    named(verifiers_python, SUMS, "sums")
    worker = subprocess.Popen(
        [sys.executable, "-c", DIES, "sums", endpoint.policy("waits-1").url],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    until(lambda: "waits-1" in endpoint.waiting, 60.0, "the episode to ask the policy")
    (mine,) = runners(worker.pid)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(lambda: not mine.is_running() or mine.status() == psutil.STATUS_ZOMBIE, 30.0, "verifiers' process to end")


def test_mistakes_are_the_users_to_correct(verifiers_python: str, loop: asyncio.Runner, endpoint: Endpoint) -> None:
    """Each says what is wrong: before anything runs where that can be known, else with the first episode."""

    def first(python: str = verifiers_python, taskset: Body = SUMS, env: Body | None = None) -> None:
        loop.run(named(python, taskset, env=env).run({"task": 0}, 0, endpoint.policy("adds")))

    with pytest.raises(UserError, match="there is no interpreter 'nowhere/python' for verifiers"):
        named("nowhere/python", SUMS)
    with pytest.raises(UserError, match="needs a python, and a taskset with an id"):
        named(verifiers_python, {"game": "Hangman-v0"})
    with pytest.raises(UserError, match="has 'harness', which is unknown"):
        named(verifiers_python, SUMS, harness={})
    with pytest.raises(UserError, match="has no taskset 'sum' .did you mean 'sums'"):
        _ = named(verifiers_python, SUMS, "sums"), Taskset("sum")
    with pytest.raises(UserError, match="no column 'task'"):
        loop.run(named(verifiers_python, SUMS).run({}, 0, endpoint.policy("adds")))
    with pytest.raises(UserError, match="does not start in .*: ModuleNotFoundError: No module named 'verifiers'"):
        first(python=sys.executable)
    with pytest.raises(
        UserError, match="cannot load the taskset 'no_such': ModuleNotFoundError: .*'no_such' not found"
    ):
        first(taskset={"id": "no_such"})
    with pytest.raises(UserError, match="ValidationError: .*smallest"):
        first(taskset={**SUMS, "smallest": 1})
    with pytest.raises(UserError, match="harness 'bash' of 'agent' runs what the policy writes"):
        first(env={"agent": {"harness": {"id": "bash"}}})
    again = {"max_retries": 1}
    for name, env in (("env", {"retries": again}), ("env.agent", {"agent": {"retries": {"rules": [again]}}})):
        with pytest.raises(UserError, match=rf"{name}.retries plays again what failed"):
            first(env=env)
    assert endpoint.seen == []
