"""Agents that ask the policy over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

from penstock.environments.agent import Policy
from penstock.environments.calculator import Calculator

PATIENT_S = 600.0


async def completed(client: httpx.AsyncClient, policy: Policy, text: str) -> str | None:
    """The policy's turn behind a text; None: there is none any more."""
    answer = await client.post(f"{policy.url}/completions", json={"model": policy.model, "prompt": text})
    if answer.status_code == 400:
        return None
    return str(answer.raise_for_status().json()["choices"][0]["text"])


class CalculatorAgent:
    """The calculator's rules, played by somebody who asks for each turn."""

    stop = Calculator.stop

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> float:
        game, text, reward = Calculator(), row["prompt"], 0.0
        game.reset(row, seed)
        async with httpx.AsyncClient(timeout=PATIENT_S) as client:
            while (turn := await completed(client, policy, text)) is not None:
                step = game.step(turn)
                reward += float(step.reward or 0.0)  # type: ignore[arg-type]
                text += turn + (step.observation or "")
                if step.done:
                    break
        return reward
