"""A calculator as a tool: the worked example of an environment.

The policy writes `[1234+5678]`, the calculator answers `=6912 `, and a turn without a call is the answer, which is
worth 1 if it is the number in the row's column `answer`, closed by a full stop. The expression is parsed, never
evaluated as Python.

`CalculatorAgent` is the worked example of an agent: the same rules, played by somebody who asks for each turn.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import http
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import aiohttp

from penstock.environments.agent import Policy
from penstock.environments.environment import Step

CALL = re.compile(r"\[([^\[\]]*)\]$")
LONGEST_EXPRESSION = 64
ERROR = "=error "

_ANSWER = re.compile(r"-?[0-9]+(\.[0-9]+)?\.")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """One problem, with as many calls of the calculator as there are turns.

    Args:
        penalty: what an expression that cannot be calculated costs.
    """

    stop = ("]",)

    def __init__(self, penalty: float = 0.0) -> None:
        self.penalty = penalty
        self.answer = ""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Remember the right answer."""
        self.answer = str(row["answer"])

    def step(self, text: str) -> Step:
        """Calculate what the turn asks for, or judge it as the answer."""
        call = CALL.search(text)
        if call is None:
            return Step(done=True, reward=float(is_right(text, self.answer)))
        observation = calculated(call[1])
        return Step(observation, reward=-self.penalty if observation == ERROR else None)


class CalculatorAgent:
    """The same problem: the text goes on with each turn and what the calculator shows.

    Args:
        penalty: as of `Calculator`.
    """

    stop = Calculator.stop

    def __init__(self, penalty: float = 0.0) -> None:
        self.game = Calculator(penalty)

    async def run(self, row: dict[str, Any], seed: int, policy: Policy) -> float:
        """Ask for turns until one is the answer, or none is left."""
        text, reward = str(row["prompt"]), 0.0
        self.game.reset(row, seed)
        while (turn := await _completed(policy, text)) is not None:
            step = self.game.step(turn)
            reward += float(step.reward or 0.0)  # type: ignore[arg-type]
            text += turn + (step.observation or "")
            if step.done:
                break
        return reward


@functools.cache
def _client(_: asyncio.AbstractEventLoop) -> aiohttp.ClientSession:
    """Return the client of all episodes of a worker, which has one event loop.

    The engine may have other work, so nothing times out; and each of hundreds of episodes waits on a connection. The
    gateway closes one that rests for 5 s, so none is taken up again that may be on its way out.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def _completed(policy: Policy, text: str) -> str | None:
    """Return the policy's turn behind a text; None: the episode is cut."""
    asked = {"model": policy.model, "prompt": text}
    async with _client(asyncio.get_running_loop()).post(f"{policy.url}/completions", json=asked) as answer:
        if answer.status == http.HTTPStatus.BAD_REQUEST:
            return None
        answer.raise_for_status()
        return str((await answer.json())["choices"][0]["text"])


def calculated(expression: str) -> str:
    """Return what the calculator shows for an expression of + - * / and brackets, e.g. `=6912 `."""
    try:
        if len(expression) > LONGEST_EXPRESSION:
            return ERROR
        value = _value(ast.parse(_LEADING_ZEROS.sub("", expression).strip(), mode="eval").body)
        if isinstance(value, float):
            return f"={value:.10g} " if math.isfinite(value) else ERROR
        return f"={value} "
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return ERROR


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]  # the line above has looked
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not arithmetic")


def is_right(text: str, answer: str) -> bool:
    """Whether a text is the number of the answer, closed by a full stop; leading zeros do not count."""
    said = text.strip()
    return _ANSWER.fullmatch(said) is not None and float(said[:-1]) == float(answer)
