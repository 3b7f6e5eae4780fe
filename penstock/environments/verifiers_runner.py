"""What runs in the interpreter that has verifiers 0.4: it plays episodes, and lists tasks. Penstock is not there.

    PYTHON verifiers_runner.py                                               # for penstock/environments/verifiers.py
    PYTHON verifiers_runner.py --tasks '{"id": "textarena", "game": "Hangman-v0"}' --count 100 > train.jsonl

Without arguments it speaks JSON lines. Each request has an `id`, under which it is answered; the first one begins:

    {"id": 0, "taskset": {"id": ...}, "env": {...}}                {"id": 0, "failure": null or text}
    {"id": 1, "task": 12, "url": "http://...", "model": "policy"}  {"id": 1, "failure": ..., "reward": 1.0, "parts": {}}
    {"cancel": 1}                                                  (none, nor to what it cancels)

Standard output belongs to these answers: what verifiers and environments print goes to standard error instead. When
standard input ends, so do all episodes and this process.

An agent whose harness the user leaves open is played by `Chat`, verifiers' loop `null` without a process and an
installation for each turn. One whose runtime is left open is on this machine: verifiers' own default is a paid service.
Left out: retries, which are refused, since a repeated request is another sample of the policy; what samples (the
policy's endpoint).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import math
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TextIO

if not sys.flags.safe_path:
    sys.path.pop(0)  # this folder, where files are called as packages are: mcp, verifiers
sys.path.append(os.getcwd())  # noqa: PTH109 - a taskset may be a file in the working folder, as a reward function is

from openai import APIStatusError, AsyncOpenAI, omit
from verifiers import v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import (
    default_harness_id,
    harness_class,
    load_environment,
    load_taskset,
    resolve_env_config,
    taskset_config_type,
)

__all__ = ["Chat"]  # verifiers finds a harness by what its module exports

CHAT = "penstock_chat"
LONGEST_LINE = 2**24
LONGEST_MESSAGE = 1000
TOOLS_CONNECT_S = 60.0


class Chat(vf.Harness[vf.HarnessConfig]):
    """The policy answers a conversation and calls the task's tools until it calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        """Converse until the policy is done; a context that is full ends the conversation, too."""
        client: Any = _client().with_options(base_url=endpoint, api_key=secret)
        messages = self._opening(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            connecting = connect_mcp({"mcpServers": servers}, stack)
            tools, named, connections = await asyncio.wait_for(connecting, TOOLS_CONNECT_S)
            while True:
                try:
                    completion = await client.chat.completions.create(
                        model=ctx.model, messages=messages, tools=tools or omit
                    )
                except APIStatusError as error:
                    if is_context_overflow(error):
                        break
                    raise
                said = completion.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    break
                for call in said.tool_calls:
                    result = await _result(connections, named, call.function.name, call.function.arguments)
                    answer = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result}
                    messages.append(bound_tool_message(answer))
        return vf.ProgramResult(0, "", "")

    def _opening(self, data: Any) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or [])]


sys.modules[CHAT] = sys.modules[__name__]  # where verifiers looks a harness up by its id


@functools.cache
def _client() -> AsyncOpenAI:
    """Return what all requests share; each is given its address and key."""
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None)


async def _result(connections: Any, named: dict[str, Any], name: str, text: str) -> Any:
    """Return what a tool answers; the policy's own mistakes are for it to read."""
    if name not in named:
        return f"error: unknown tool {name!r}"
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return "error: tool arguments must be a JSON object"
    return await call_mcp(connections, named, name, arguments)


# ---- an environment and its tasks ----------------------------------------------------------------------------------


def _env_config(taskset: dict[str, Any], env: dict[str, Any]) -> Any:
    """Return verifiers' configuration of an environment.

    Raises:
        ValueError: what an agent does with code that the policy writes would run unconfined, or what the policy said in
            an attempt that verifiers has given up would be learnt from.
    """
    config = resolve_env_config({**env, "taskset": taskset})
    _refuse_retries("env", config.retries)
    for name, agent in agent_config_fields(config).items():
        if agent.client is None:
            _refuse_retries(f"env.{name}", agent.retries)
    has_own_harness = default_harness_id(config.taskset.id) == config.taskset.id
    for name, agent in agent_config_fields(config).items():
        left_open: dict[str, Any] = {}
        if "runtime" not in agent.model_fields_set:
            left_open["runtime"] = vf.SubprocessConfig()
        if agent.harness is None and not has_own_harness:
            left_open["harness"] = vf.HarnessConfig(id=CHAT)
        setattr(config, name, agent.model_copy(update=left_open))
    for name, agent in agent_config_fields(config).items():
        harness = config.agent_harnesses()[name]
        if harness_class(harness.id).EXECUTES_CODE and isinstance(agent.runtime, vf.SubprocessConfig):
            raise ValueError(
                f"the harness '{harness.id}' of '{name}' runs what the policy writes, on this machine and unconfined; "
                f"name a container in env.{name}.runtime"
            )
    return config


def _refuse_retries(name: str, retries: Any) -> None:
    if retries.max_retries or any(rule.max_retries for rule in retries.rules):
        raise ValueError(
            f"{name}.retries plays again what failed, and the policy would learn from what it said before: remove it"
        )


@dataclass
class Tasks:
    """The tasks of a taskset, read as far as somebody has asked.

    Attributes:
        found: by number in the taskset, and by id where they have one.
    """

    taskset: Any
    found: dict[int | str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left = enumerate(self.taskset)

    def find(self, key: int | str) -> Any:
        """Return a task by its number or id.

        Raises:
            LookupError: there is none.
        """
        if isinstance(key, str) and not self.taskset.bounded:
            raise LookupError(f"the taskset is endless: a task has a number there, and {key!r} is none")
        while key not in self.found:
            number, task = next(self._left, (None, None))
            if number is None or task is None:
                raise LookupError(f"the taskset has no task {key!r}")
            self.found |= {number: task} if task.data.id is None else {number: task, task.data.id: task}
        return self.found[key]


def _client_config(url: str) -> Any:
    return vf.EvalClientConfig(base_url=url, api_key_var="PENSTOCK_HAS_NO_KEY")


def _outcome(episode: Any, url: str) -> dict[str, Any]:
    """Return what an episode was worth, or why it failed."""
    if not episode.ok:
        errors = [error for trace in episode.traces for error in trace.errors] + episode.errors
        return {"failure": f"{errors[0].type}: {errors[0].message}" if errors else "it failed and does not say why"}
    mine = [trace for trace in episode.traces if trace.agent.config.client.base_url == url]
    if len(mine) != 1:
        names = ", ".join(trace.agent.name for trace in mine) or "none"
        needed = "an episode needs one run of one agent that is the policy, others need a client of their own"
        return {"failure": f"{needed}; here {len(mine)} were the policy's: {names}"}
    (trace,) = mine
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        return {"failure": f"there is no reward '{missing[0]}' ({trace.stop_condition})"}
    parts = {**trace.metrics, **{name: reward.value for name, reward in trace.rewards.items()}}
    finite = {name: part for name, part in parts.items() if part is not None and math.isfinite(part)}
    return {"failure": None, "reward": trace.reward if trace.rewards else None, "parts": finite}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ---- the protocol --------------------------------------------------------------------------------------------------


@dataclass
class Episodes:
    """The episodes of one environment that are under way."""

    env: Any
    answers: TextIO
    tasks: Tasks = field(init=False)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.env.taskset)

    def take(self, request: dict[str, Any]) -> None:
        """Begin an episode or cancel one."""
        if "cancel" in request:
            if request["cancel"] in self.running:
                self.running[request["cancel"]].cancel()
            return
        task = asyncio.create_task(self._play(**request))
        self.running[request["id"]] = task
        task.add_done_callback(lambda _: self.running.pop(request["id"]))

    async def end(self) -> None:
        """Cancel what is under way, and wait for it."""
        tasks = [*self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, id: int, task: int | str, url: str, model: str) -> None:
        context = vf.ModelContext(model=model, client=_client_config(url))
        try:
            episode = await self.env.run_episode(self.tasks.find(task), context)
            outcome = _outcome(episode, url)
        except Exception as error:  # of the taskset, or of verifiers before its own record of errors
            outcome = {"failure": _said(error)}
        _tell(self.answers, id=id, **outcome)


def _tell(answers: TextIO, **answer: Any) -> None:
    if answer.get("failure"):
        answer["failure"] = " ".join(answer["failure"].split())[:LONGEST_MESSAGE]
    print(json.dumps(answer), file=answers, flush=True)


async def _serve(requests: TextIO, answers: TextIO) -> int:
    """Answer requests until there are no more; return the exit code."""
    lines = asyncio.StreamReader(limit=LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), requests)
    first = json.loads(await lines.readline())
    async with AsyncExitStack() as stack:
        try:
            env = load_environment(_env_config(first["taskset"], first["env"]))
            await stack.enter_async_context(env.serving())
        except Exception as error:
            _tell(answers, id=0, failure=_said(error))
            return 1
        # A server that episodes share keeps a client for each address, and each episode has its own: so each brings
        # a server, as agents do that are given none.
        assert env._interception is not None
        env._interception = None
        _tell(answers, id=0, failure=None)
        episodes = Episodes(env, answers)
        while line := await lines.readline():
            episodes.take(json.loads(line))
        await episodes.end()
    return 0


def _list(taskset: dict[str, Any], count: int, answers: TextIO) -> None:
    """Print the first tasks as rows of a data file."""
    tasks = load_taskset(taskset_config_type(taskset["id"]).model_validate(taskset))
    for number, task in enumerate(itertools.islice(tasks, count)):
        print(json.dumps({"task": number, "prompt": task.data.prompt_text}, ensure_ascii=False), file=answers)


def main() -> int:
    """Serve, or list tasks; return the exit code."""
    parser = argparse.ArgumentParser(description="Lists the tasks of a verifiers taskset as rows of a data file.")
    parser.add_argument("--tasks", type=json.loads, metavar="JSON", help='the taskset: {"id": ...} and its settings')
    parser.add_argument("--count", type=int, metavar="N", help="how many tasks, from the first")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if given.tasks is None:
        requests = os.fdopen(os.dup(0), encoding="utf-8")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs of verifiers get no requests to read
        return asyncio.run(_serve(requests, answers))
    if given.count is None or "id" not in given.tasks:
        parser.error('--tasks needs an "id", and --count')
    try:
        _list(given.tasks, given.count, answers)
    except Exception as error:
        print(_said(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
