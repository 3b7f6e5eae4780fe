"""Agents that do what the data row's `plan` says, through the clients that people use."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError, OpenAI

from penstock.environments.agent import Policy

QUESTION = {"role": "user", "content": "2+2?"}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
left: dict[str, Any] = {}


class Scripted:
    """One step of the plan after the other; worth how many were answered, or the parts that a step gives."""

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> Any:
        self.policy, self.client = policy, AsyncOpenAI(base_url=policy.url, api_key="-", max_retries=0)
        self.messages, self.text_so_far = list[dict[str, Any]](), "a"
        self.order, self.choice = row.get("order", 1), row.get("choice", 0)
        parts: dict[str, float] = {}
        try:
            for step in row["plan"]:
                found = await getattr(self, step.strip("?").replace(" ", "_"))()
                parts = found or {**parts, "reward": parts.get("reward", 0.0) + 1.0}
        except BadRequestError:
            if not row.get("ends"):
                raise
        except asyncio.CancelledError:
            left["cancelled"] = 1.0
            raise
        return parts

    async def chat(self, **others: Any) -> Any:
        self.messages.append({"role": "user", "content": "and now?"} if self.messages else QUESTION)
        return await self._chat(self.messages, **others)

    async def _chat(self, messages: list[dict[str, Any]], **others: Any) -> Any:
        left["url"] = self.policy.url
        create: Any = self.client.chat.completions.create
        said = await create(model=self.policy.model, messages=messages, **others)
        messages.append(said.choices[0].message.model_dump())
        return None

    async def rewritten(self) -> None:
        self.messages = [{"role": "user", "content": "In short: 2+2?"}]
        await self._chat(self.messages)
        self.messages = [QUESTION, {"role": "assistant", "content": "four"}]

    async def trimmed(self) -> None:
        await self.chat()
        self.messages[-1]["content"] = self.messages[-1]["content"].strip()

    async def reworded(self) -> None:
        await self.chat()
        self.messages[-1]["content"] = "4"

    async def beside(self) -> None:
        await self._chat([{"role": "user", "content": "something else"}])

    async def tools(self) -> dict[str, float]:
        create: Any = self.client.chat.completions.create
        said = (await create(model="policy", messages=[QUESTION], tools=[ADD])).choices[0]
        (call,) = said.message.tool_calls
        assert said.finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
        messages = [QUESTION, said.message.model_dump(exclude_none=True), result]
        then = (await create(model="policy", messages=messages, tools=[ADD])).choices[0]
        return {f"called_{call.function.name}": 1.0, f"said_{then.message.content}": 1.0}

    async def stream(self) -> None:
        create: Any = self.client.chat.completions.create
        self.messages.append(QUESTION)
        text = ""
        async for chunk in await create(model="policy", messages=self.messages, stream=True):
            text += chunk.choices[0].delta.content or ""
        self.messages.append({"role": "assistant", "content": text})

    async def stream_helper(self) -> dict[str, float]:
        options = {"include_usage": True}
        create: Any = self.client.chat.completions.stream
        async with create(model="policy", messages=[QUESTION], stream_options=options) as stream:
            usage = (await stream.get_final_completion()).usage
        return {"reward": 1.0, "prompt": float(usage.prompt_tokens), "drawn": float(usage.completion_tokens)}

    async def text(self) -> None:
        said = await self.client.completions.create(model="policy", prompt=self.text_so_far)
        self.text_so_far += said.choices[0].text + ";"

    async def tokens(self) -> dict[str, float]:
        url = self.policy.url.removesuffix("/v1") + "/inference/v1/generate"
        said = await self._posted(url, {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}})
        choice = said["choices"][0]
        known = [item["logprob"] for item in choice["logprobs"]["content"]]
        return {
            "tokens": float(sum(choice["token_ids"])),
            "logprobs": sum(known),
            "policy_version": float(said["policy_version"]),
            "prompt": float(sum(said["prompt_token_ids"])),
        }

    async def _posted(self, url: str, body: Any) -> Any:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(url, json=body)
        if answer.is_error:
            raise ValueError(answer.json()["error"]["message"])
        return answer.json()

    async def _sent(self, **body: Any) -> None:
        await self._posted(f"{self.policy.url}/chat/completions", {"messages": [QUESTION], **body})

    async def ends_at(self) -> None:
        await self._sent(stop=["."])

    async def unheard(self) -> None:
        with suppress(ValueError):
            await self.ends_at()

    async def warm(self) -> None:
        await self._sent(temperature=0.3, top_p=0.9, seed=5, user="somebody")

    async def logprobs(self) -> None:
        await self._sent(logprobs=True)

    async def nothing(self) -> None:
        await self._sent(messages=[])

    async def gigantic(self) -> None:
        await self._sent(messages=[{"role": "user", "content": "x" * (17 << 20)}])

    async def image(self) -> None:
        await self._sent(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}])

    async def stranger(self) -> None:
        address = self.policy.url.removesuffix("/v1").rpartition("/")[0]
        await self._posted(f"{address}/another-key/v1/chat/completions", {"messages": [QUESTION]})

    async def at_once(self) -> dict[str, float]:
        asked = [self.client.completions.create(model="policy", prompt="q") for _ in range(3)]
        return {said.choices[0].text: 1.0 for said in await asyncio.gather(*asked)}

    async def long_and_short(self) -> None:
        prompts = ("x" * (6 << 20), "q")[:: self.order]
        await asyncio.gather(*[self.client.completions.create(model="policy", prompt=prompt) for prompt in prompts])

    async def two_stories(self) -> None:
        asked = [self.client.completions.create(model="policy", prompt=prompt) for prompt in ("once", "twice")]
        await asyncio.gather(*asked[:: self.order])

    async def two_ways(self) -> None:
        ways = [[*self.messages, {"role": "user", "content": text}] for text in ("left", "right")]
        await asyncio.gather(*[self._chat(messages) for messages in ways[:: self.order]])

    async def chat_meanwhile(self) -> None:
        late = [*self.messages, {"role": "user", "content": "and now?"}]
        first = asyncio.create_task(self.chat())
        await asyncio.sleep(0.25)
        await self._chat(late)
        await first

    async def choices(self) -> dict[str, float]:
        create: Any = self.client.chat.completions.create
        self.messages.append(QUESTION)
        said = await create(model="policy", messages=self.messages, n=2)
        self.messages.append(said.choices[self.choice].message.model_dump())
        assert [choice.index for choice in said.choices] == [0, 1]
        texts = {choice.message.content: 1.0 for choice in said.choices}
        return {**texts, "prompt": said.usage.prompt_tokens, "completion": said.usage.completion_tokens}

    async def flood(self, **others: Any) -> dict[str, float]:
        create: Any = self.client.completions.create
        asked = [create(model="policy", prompt="q", **others) for _ in range(100)]
        refused = sum(
            isinstance(said, BadRequestError) for said in await asyncio.gather(*asked, return_exceptions=True)
        )
        return {"answered": 100.0 - refused, "refused": float(refused)}

    async def flood_of_choices(self) -> dict[str, float]:
        return await self.flood(n=30)

    async def never_reads(self) -> None:
        await self._begun(b'{"prompt": "q"}')
        await asyncio.sleep(600)

    async def stalled(self) -> None:
        self.kept_open = await self._begun(b'{"prompt": ', missing=9)

    async def _begun(self, body: bytes, missing: int = 0) -> asyncio.StreamWriter:
        """Send a request without reading an answer, or all but its last bytes."""
        address = httpx.URL(f"{self.policy.url}/completions")
        _, writer = await asyncio.open_connection(address.host, address.port, limit=1)
        length = len(body) + missing
        head = f"POST {address.path} HTTP/1.1\r\nHost: policy\r\nContent-Length: {length}\r\n\r\n"
        writer.write(head.encode() + body)
        return writer

    async def odd_calls(self) -> None:
        await self._sent(messages=[{"role": "assistant", "content": "", "tool_calls": [1]}])

    async def odd_limit(self) -> None:
        url = self.policy.url.removesuffix("/v1") + "/inference/v1/generate"
        await self._posted(url, {"token_ids": [1], "sampling_params": {"max_tokens": "many"}})

    async def broken(self) -> None:
        raise LookupError("no such thing")

    async def sleeps(self) -> None:
        await asyncio.sleep(600)

    async def left(self) -> dict[str, float]:
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{left['url']}/completions", json={"prompt": "q"})
        return {"cancelled": left["cancelled"], "answers": float(answer.status_code)}


class InThreads:
    """One question by the client that is not `async`."""

    def run(self, row: dict[str, Any], seed: int, policy: Policy) -> dict[str, float]:
        client = OpenAI(base_url=policy.url, api_key="-", max_retries=0)
        return {client.completions.create(model=policy.model, prompt=row["question"]).choices[0].text: 1.0}
