"""What happens between two steps of a generation, after a number of steps that is known; runs in a rank.

Through the worker's own `handle` and the loop's own steps, as the rank loop does it (penstock/engines/groups/rank.py),
but without messages: those would come when they come.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from penstock.engines.commands.message import encode
from tests.engines.plain_commands import INSIDE, command_of, numbered


def generate(
    worker: Any,
    arguments: dict[str, Any],
    after: int,
    shift: float = 0.0,
    other: dict[str, Any] | None = None,
    salt: bool = True,
) -> dict[str, Any]:
    """Generate; return the reply, and where `other` is given, that of a second generation and which ended first.

    Args:
        after: steps of the first generation before something happens.
        shift: then change the actor's weights by that much, and reshard them as policy version 1.
        other: then begin another generation.
        salt: whether prefixes of several versions are kept apart, where they are kept.
    """
    loop = worker.models.generator.loop
    salted = loop._salt if salt else (lambda version: "")
    with patch.object(loop, "_salt", salted):
        pending = [_begin(worker, "generate", arguments)]
        for _ in range(after):
            worker.serving.step()
        if shift:
            before = [parameter.detach().clone() for parameter in worker.models.lm.parameters()]
            _shift(worker.models.lm, shift)
            _begin(worker, "reshard", {"version": 1})
        if other is not None:
            pending.append(_begin(worker, "generate", other))
        ended: list[int] = []
        while len(ended) < len(pending):
            worker.serving.step()
            ended += [n for n, item in enumerate(pending) if item.result is not None and n not in ended]
    if shift:
        with torch.no_grad():
            for parameter, value in zip(worker.models.lm.parameters(), before, strict=True):
                parameter.copy_(value)
    return {"replies": [item.result["reply"] for item in pending], "ended": ended}


def _begin(worker: Any, command: str, arguments: dict[str, Any]) -> Any:
    asked = command_of(command, numbered(command, arguments, INSIDE))
    return worker.handle(command, encode(asked), lambda news: None)


@torch.no_grad()
def _shift(lm: torch.nn.Module, by: float) -> None:
    """Change every parameter by a wave that depends on its place alone."""
    for parameter in lm.parameters():
        parameter += by * torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype)).view(parameter.shape)


def shifted(lm: torch.nn.Module, by: float) -> torch.nn.Module:
    """Return the model with weights as a rank shifts them."""
    _shift(lm, by)
    return lm
