"""Reward functions for the tests; worker processes import this module from the working directory."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from tests.processes import leave_children

EVIL = (r"(a+)+b", "a" * 40)  # matching takes exponential time
NOT_CALLABLE = 3


def hang() -> None:
    """Loop for ever inside one call of C code, where no signal handler of Python runs."""
    sum(itertools.repeat(0))


def length(response: str) -> int:
    return len(response)


def sources(response: str, prompt: str, prompt_id: str, answer: str, row: dict[str, Any], bonus: float = 0) -> float:
    assert row["answer"] == answer
    return float(f"{response}{prompt}{prompt_id}{answer}") + bonus


def anything(response: str, **settings: float) -> float:
    return sum(settings.values())


def misbehave(response: str) -> Any:
    """Do what the response says."""
    match response:
        case "raise":
            raise LookupError("no such answer")
        case "loop":
            while True:
                pass
        case "swallow":
            try:
                time.sleep(30)
            except BaseException:
                return 1.0
        case "regex":
            return re.match(*EVIL) is None
        case "hang":
            hang()
        case "die":
            os._exit(7)
        case "exit":
            sys.exit(3)
        case "print":
            print("noise \ud800", flush=True)
            sys.stderr.write("more noise\n")
            return 1.0
        case "parts":
            return {"format": 1, "correct": 0.5}
        case "named":
            return {"reward": 0.25, "length": 9.0}
        case "nan":
            return float("nan")
        case "huge":
            return 1e300
        case "infinite part":
            return {"format": 1.0, "correct": float("inf")}
        case "no parts":
            return {}
        case "text":
            return "1.0"
        case "none":
            return None
        case "true":
            return True
    return float(response)


def batch(responses: list[str], answer: list[int], rows: list[dict[str, Any]], prompt_ids: list[str]) -> list[Any]:
    assert [row["answer"] for row in rows] == answer
    assert len(prompt_ids) == len(responses)
    if "short" in responses:
        return [0.0] * (len(responses) - 1)
    if "raise" in responses:
        raise LookupError("no such batch")
    if "one" in responses:
        return 1.0  # type: ignore[return-value]
    return [float("nan") if response == "nan" else number for response, number in zip(responses, answer, strict=True)]


async def batch_async(responses: list[str]) -> list[int]:
    await asyncio.sleep(30 if "slow" in responses else 0)
    return [len(response) for response in responses]


gate = asyncio.Event()
arrived: list[str] = []


async def meet(response: str) -> float:
    """Return only once as many rows as `response` says have been called: possible only if they run concurrently."""
    arrived.append(response)
    if len(arrived) == int(response):
        gate.set()
    await gate.wait()
    return 1.0


async def misbehave_async(response: str) -> float:
    match response:
        case "slow":
            await asyncio.sleep(30)
        case "raise":
            raise LookupError("no such answer")
        case "own timeout":
            raise TimeoutError("the judge is busy")
        case "hang":
            hang()
    return 1.0


def note_worker(response: str) -> float:
    """Leave this process's id in the folder `response`, then hang in C."""
    Path(response, str(os.getpid())).touch()
    hang()
    return 0.0


def leaving(response: str) -> float:
    """Leave three children, noted in a folder; `hang:` before its name says what follows."""
    leave_children(response.removeprefix("hang:"))
    if response.startswith("hang:"):
        hang()
    return 1.0


def printing(response: str) -> float:
    """Print on every way there is, and half of a surrogate pair, as a cut response may hold one."""
    if response != "silent":
        print("printed", response, "\ud83d")
        print("said", response, file=sys.stderr)
        os.write(1, f"written {response}\n".encode())
        os.system(f"echo run {response}")
    return 1.0


def worker_id(response: str) -> int:
    """Take as many seconds as `response` says."""
    time.sleep(float(response))
    return os.getpid()


def judge_parser(response: str, answer: str, bonus: float) -> dict[str, float]:
    """Reads a judge's text; hangs over one of them."""
    while response == "loop":
        pass
    return {"same": float(response == answer), "bonus": bonus}
