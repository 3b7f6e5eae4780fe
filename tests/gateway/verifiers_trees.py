"""A taskset of verifiers whose agent's conversations are a tree, as a user would write one; it runs where verifiers is.

One kind of task compacts its history, by the very code of verifiers' harness `bash`; others take a turn again from its
middle, or ask sub-agents, one after the other or at once. The environment may keep the traces that verifiers returns,
and may ask by verifiers' client for trainings, whose traces have tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from verifiers import v1 as vf
from verifiers.v1.harnesses.utils import compaction, core

__all__ = ["Keeping", "Tree", "Trees"]

compaction.chat = core.chat  # verifiers bundles both into one program, in which they see each other
Message = dict[str, Any]
Ask = Callable[..., Awaitable[Message]]


# ---- the agent -----------------------------------------------------------------------------------------------------


class TreeConfig(vf.HarnessConfig):
    summarize_at_tokens: int = 1


class Tree(vf.Harness[TreeConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    SUPPORTS_RESUME = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        client: Any = _client().with_options(base_url=endpoint, api_key=secret)
        compactor = compaction.Compactor(client, ctx.model, [], True, self.config.summarize_at_tokens)

        async def ask(*messages: Message) -> Message:
            return _said(await core.chat(client, ctx.model, [*messages], []))

        question = _user(data.prompt)
        try:
            if data.kind == "compacts":
                await _compact(compactor, question)
            else:
                await KINDS[data.kind](ask, question)
        except SystemExit as error:  # by which verifiers' loop, a program, ends without its endpoint
            raise ConnectionError("the endpoint does not answer") from error
        except compaction.CompactionFailed as error:
            return vf.ProgramResult(1, "", str(error))
        return vf.ProgramResult(0, "", "")


async def _compact(compactor: Any, question: Message) -> None:
    """Answer, hand over a summary once the conversation is long, and answer again behind that alone."""
    compactor.note_good([question])
    completion, messages = await compactor.complete([question])
    messages.append(_said(completion))
    if compactor.reached(completion) and compaction.compactable(messages):
        messages = await compactor.compact(messages)
    else:
        messages.append(_user("Are you sure?"))
    await compactor.complete(messages)


async def _retake(ask: Ask, question: Message) -> None:
    """Go on from the first turn twice, and then behind the first of these."""
    first = await ask(question)
    sure = [question, first, _user("Are you sure?")]
    again = await ask(*sure)
    await ask(question, first, _user("In short."))
    await ask(*sure, again, _user("So?"))


async def _delegate(ask: Ask, question: Message) -> None:
    """Ask a sub-agent between two turns, and repeat what it said."""
    first = await ask(question)
    said = await ask({"role": "system", "content": "You check sums."}, question)
    await ask(question, first, _user(said["content"]))


async def _delegate_at_once(ask: Ask, question: Message) -> None:
    """Ask three sub-agents at the same time, and one more with what they said."""
    checkers = [{"role": "system", "content": f"You are checker {number}."} for number in range(3)]
    said = await asyncio.gather(*(ask(checker, question) for checker in checkers))
    await ask(question, *said[:1], _user(" ".join(message["content"] for message in said)))


KINDS = {"retakes": _retake, "delegates": _delegate, "delegates_at_once": _delegate_at_once}


@functools.cache
def _client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(completion: Any) -> Message:
    return {"role": "assistant", "content": completion.choices[0].message.content or ""}


# ---- tasks ---------------------------------------------------------------------------------------------------------


class TreesConfig(vf.TasksetConfig):
    largest: int = 9
    kinds: list[str] = ["compacts"]


class SumData(vf.TaskData):
    answer: int
    kind: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last turn is the right one."""
        return float(trace.last_reply.removesuffix(".") == f"It is {self.data.answer}")

    @vf.metric
    async def branches(self, trace: vf.Trace) -> float:
        """How many there are."""
        return float(trace.num_branches)

    @vf.metric
    async def sampled(self, trace: vf.Trace) -> float:
        """The tokens that the policy is said to have drawn."""
        return float(trace.usage.completion_tokens if trace.usage else 0)


class Trees(vf.Taskset[Sum, TreesConfig]):
    def load(self) -> Iterator[Sum]:
        numbers = range(self.config.largest + 1)
        for kind in self.config.kinds:
            for a in numbers:
                for b in numbers:
                    yield Sum(SumData(prompt=f"What is {a}+{b}?", answer=a + b, kind=kind), self.config.task)


# ---- what verifiers returns ----------------------------------------------------------------------------------------


class KeepingConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    traces: str = ""
    """The folder that gets them; none: they are not kept."""
    model: str = ""
    """The folder of the model, for the client that renders chats itself; none: the client that relays them."""


class Keeping(vf.Env[KeepingConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)

    async def run_episode(self, task: vf.Task, ctx: Any, **others: Any) -> vf.Episode:
        if self.config.model:
            client = vf.TrainClientConfig(
                base_url=ctx.client.base_url, api_key_var=ctx.client.api_key_var, renderer_model_name=self.config.model
            )
            ctx = replace(ctx, client=client)
        episode = await super().run_episode(task, ctx, **others)
        if self.config.traces:
            for trace in episode.traces:
                (Path(self.config.traces) / f"{trace.id}.json").write_text(json.dumps(_told(trace, task.data.kind)))
        return episode


def _told(trace: Any, kind: str) -> dict[str, Any]:
    """Return a trace's branches: the tokens of each, which of them were sampled, and which no branch before has."""
    known: set[int] = set()
    branches = []
    for branch in trace.branches:
        new = [id(node) not in known for node in branch.nodes for _ in node.token_ids]
        known |= {id(node) for node in branch.nodes}
        said = [node.message.content or "" for node in branch.nodes if node.sampled]
        branches.append({"tokens": branch.token_ids, "sampled": branch.sampled_mask, "new": new, "said": said})
    rewards = {name: reward.value for name, reward in trace.rewards.items()}
    parts = {**trace.metrics, **rewards, "reward": trace.reward}
    return {"kind": kind, "branches": branches, "turns": trace.num_turns, "parts": parts}
