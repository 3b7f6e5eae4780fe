"""Reward of a response that is a Python program: its problem's tests, run in the sandbox of the reward's workers.

    reward: {function: "penstock.rewards.code:passes_tests", sandbox: {}}

Which share of k responses has one that passes is `heldout/pass_at_k` of an evaluation with as many samples
(penstock/evaluators/rewards.py). Left out: a policy that runs programs before it answers
(penstock/environments/code.py).
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.usercode.programs import Bounds, answer_of, passes
from penstock.usercode.sandbox import needs_sandbox

_FENCED = re.compile(r"^```[^\S\n]*(\w*)[^\S\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")


@needs_sandbox
def passes_tests(
    response: str, tests: object, seconds: float = 8.0, memory_mib: int = 512, partial: bool = False
) -> dict[str, float]:
    """1 if the program of a response passes all tests of its problem, else 0; and the share that it passes.

    The program is the last fenced block of Python, or without one the whole response.

    Args:
        tests: a program of assertions that is run behind that of the response; or cases of what is read and what is to
            be printed, [{"input": "2 3\\n", "output": "5\\n"}, ...] or {"inputs": [...], "outputs": [...]}. White space
            at the end of lines and of the output does not count.
        seconds: of all runs of a response together; what does not come to its turn is not passed.
        memory_mib: of each process.
        partial: the reward is the share of the cases that are passed.

    Raises:
        ValueError: the tests are neither, or there are none.
    """
    code, bounds = program_of(response), Bounds(seconds, memory_mib)
    if isinstance(tests, str):
        if not tests.strip():
            raise ValueError("the problem has no tests")
        with tempfile.TemporaryDirectory(prefix="run-") as folder:
            passed = float(passes(code, tests, Path(folder), bounds))
        return {"reward": passed, "passed": passed}
    cases = cases_of(tests)
    share = sum(_passed(code, cases, bounds, to_the_end=partial)) / len(cases)
    return {"reward": share if partial else float(share == 1.0), "passed": share}


def program_of(response: str) -> str:
    """Return the program of a response: its last fenced block of Python, or without one the whole text."""
    blocks = [code for language, code in _FENCED.findall(response) if language.lower() in _PYTHON]
    return str(blocks[-1]) if blocks else response


def cases_of(tests: object) -> list[tuple[str, str]]:
    """Return what is read and what is to be printed, of each case.

    Raises:
        ValueError: these are no cases, or there are none.
    """
    tests = _listed(tests)
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        given, due = _listed(tests["inputs"]), _listed(tests["outputs"])
        if len(given) != len(due):
            raise ValueError(f"{len(given)} inputs and {len(due)} outputs in the tests")
        cases = list(zip(given, due, strict=True))
    elif isinstance(tests, list) and all(isinstance(case, Mapping) for case in tests):
        cases = [(case.get("input"), case.get("output")) for case in tests]
    else:
        raise ValueError("the tests are no program, and no cases with 'input' and 'output'")
    if not cases or not all(isinstance(text, str) for case in cases for text in case):
        raise ValueError("the tests have no cases, or one without a text 'input' and 'output'")
    return cases


def _listed(value: object) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value  # lists in a data file are arrays of numpy


def _passed(code: str, cases: Sequence[tuple[str, str]], bounds: Bounds, to_the_end: bool) -> Iterator[bool]:
    """Yield whether a program passes each case, up to the first that it does not unless it is to go to the end."""
    ends = time.monotonic() + bounds.seconds
    for given, due in cases:
        left = ends - time.monotonic()
        if left <= 0:
            return
        with tempfile.TemporaryDirectory(prefix="run-") as folder:
            status, printed = answer_of(code, given, Path(folder), replace(bounds, seconds=left))
        right = status == 0 and _lines(printed) == _lines(due)
        yield right
        if not (right or to_the_end):
            return


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
