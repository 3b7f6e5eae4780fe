"""Agents of two paths: one that asks a problem twice from scratch, and again after its first answer; one of texts."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from penstock.environments.agent import Policy
from penstock.environments.calculator import CalculatorAgent


class Twice:
    """Worth the share of right answers."""

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> float:
        client: Any = AsyncOpenAI(base_url=policy.url, api_key="-", timeout=None, max_retries=0)
        question = [{"role": "user", "content": row["prompt"]}]

        async def answered(messages: list[Any]) -> Any:
            said = await client.chat.completions.create(model=policy.model, messages=messages)
            return said.choices[0].message

        first, second = await answered(question), await answered(question)  # at once, rounds would be matters of time
        third = await answered([*question, first, *question])
        texts = [message.content for message in (first, second, third)]
        return sum(text in (f"It is {row['wanted']}.", f"It is {row['wanted']}") for text in texts) / len(texts)


class CalculatedTwice:
    """Asks the calculator's problem twice from scratch; worth the mean of both."""

    stop = CalculatorAgent.stop

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> float:
        return sum([await CalculatorAgent().run(row, seed, policy) for _ in range(2)]) / 2
