"""A taskset of verifiers whose harness asks twice from scratch, and once more after its first answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI
from verifiers import v1 as vf

__all__ = ["Twice", "Wondering"]


class Wondering(vf.Harness[vf.HarnessConfig]):
    """Two branches of verifiers' message graph."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    SUPPORTS_RESUME = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        client: Any = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
        question = [{"role": "user", "content": data.prompt}]

        async def answered(messages: list[Any]) -> Any:
            said = await client.chat.completions.create(model=ctx.model, messages=messages)
            return {"role": "assistant", "content": said.choices[0].message.content}

        first = await answered(question)
        await answered([*question, {"role": "user", "content": "In short."}])
        await answered([*question, first, {"role": "user", "content": "Are you sure?"}])
        return vf.ProgramResult(0, "", "")


class Question(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return 1.0

    @vf.metric
    async def branches(self, trace: vf.Trace) -> float:
        """How many there are in verifiers' own record of the episode."""
        return float(len(trace.branches))


class Twice(vf.Taskset[Question, vf.TasksetConfig]):
    def load(self) -> Iterator[Question]:
        yield Question(vf.TaskData(prompt="What is 2+2?"), self.config.task)
