"""An agent that asks a model that talks at random, in the way that the data row's `kind` says."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx

from penstock.environments.agent import Policy

WAIT_S = 600.0
BEHIND = "(3)"


class Asking:
    """Three turns of text or of tokens, one of them beside the others, or until it is cut; worth 1 for each turn.

    Or several at once: texts, of which two are the same, or choices.
    """

    stop = ("=", "7", "e")

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> float:
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            self._post, self._url = client.post, policy.url
            return float(await getattr(self, row["kind"])())

    async def text(self, turns: int = 3, **others: Any) -> int:
        text = "go "
        for _ in range(turns):
            text += await self._said(text, **others) + BEHIND
        return turns

    async def short(self) -> int:
        return await self.text(max_tokens=2)

    async def beside(self) -> int:
        text = "go "
        text += await self._said(text) + BEHIND
        await self._said("another story ")
        await self._said(text)
        return 3

    async def at_once(self, order: int = 1) -> int:
        stories = ["go ", "another story ", "another story "][::order]
        said = await asyncio.gather(*[self._said(text) for text in stories])
        first = stories.index("another story ")  # of two that are the same
        await self._said(stories[first] + said[first] + BEHIND)
        return 4

    async def at_once_in_another_order(self) -> int:
        return await self.at_once(-1)

    async def choices(self) -> int:
        posted = await self._posted("/v1/completions", {"prompt": "go ", "n": 3})
        texts = [choice["text"] for choice in posted["choices"]]
        await self._said("go " + texts[0] + BEHIND)
        return 4

    async def too_many(self) -> int:
        await self._posted("/v1/completions", {"prompt": "go ", "n": 9})
        return 9

    async def tokens(self) -> int:
        tokens = [4, 5, 6]
        for _ in range(3):
            said = await self._posted("/inference/v1/generate", {"token_ids": tokens})
            tokens = [*tokens, *said["choices"][0]["token_ids"], 9, 8]
        return 3

    async def branched(self) -> int:
        story = "go "
        story += await self._said(story) + BEHIND
        other = story + await self._said(story) + BEHIND
        await self._said(story)  # another end of the first turn
        await self._said(other)
        return 4

    async def branched_tokens(self) -> int:
        said = (await self._drew([4, 5, 6]))["token_ids"]
        first = [4, 5, 6, *said, 9]
        longer = [*first, *(await self._drew(first))["token_ids"], 8]
        await self._drew([*first, 8])
        await self._drew(longer)
        return 4

    async def many(self) -> int:
        for number in range(4):
            await self._said(f"story {number} ")
        return 4

    async def talkative(self) -> int:
        await asyncio.gather(*[self._said(f"{number} " + "9" * 9) for number in range(3)])
        return 3

    async def _drew(self, tokens: list[int]) -> dict[str, Any]:
        said = await self._posted("/inference/v1/generate", {"token_ids": tokens})
        choice: dict[str, Any] = said["choices"][0]
        return choice

    async def endless(self) -> int:
        return await self.text(100)

    async def long(self) -> int:
        await self._said("9" * 100)
        return 1

    async def gigantic(self) -> int:
        return await self.text(1) + await self._refused(prompt="9" * (8 << 20)) + await self._refused(prompt=[1] * 100)

    async def stubborn(self) -> int:
        for _ in range(100):
            with suppress(ValueError):
                await self._said("9" * 100)
        return 0

    async def _refused(self, **body: Any) -> int:
        try:
            await self._posted("/v1/completions", body)
        except ValueError as error:
            assert "beyond the maximum context length" in str(error), error
        return 1

    async def chat(self) -> int:
        await self._posted("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
        return 1

    async def _said(self, text: str, **others: Any) -> str:
        said = await self._posted("/v1/completions", {"prompt": text, **others})
        return str(said["choices"][0]["text"])

    async def _posted(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._post(self._url.removesuffix("/v1") + path, json=body)
        if answer.is_error:
            raise ValueError(answer.json()["error"]["message"])
        found: dict[str, Any] = answer.json()
        return found
