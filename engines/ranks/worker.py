"""The worker of a rank: it takes a command as it arrives, lets its handler carry it out, and measures what it used.

The rank loop (engines/groups/rank.py) receives a command and calls `Worker.handle`. The handlers stand in the modules
that are imported here; each command has one.

Left out: what commands do, when to do what (flows/), how commands travel (engines/groups/channel.py).
"""

from __future__ import annotations

from typing import Any

import torch

from engines.commands.logprob_gap import SampleToCompare
from engines.commands.message import decode, encode
from engines.commands.rollout import Generate
from engines.groups import interface
from engines.groups.channel import Tell
from engines.ranks import (  # noqa: F401 - each registers the commands that it carries out
    build,
    checkpoint,
    critic,
    finetuning,
    forward,
    logprob_gap,
    reference,
    reshard,
    rollout,
    start,
    update,
)
from engines.ranks.handlers import HANDLERS
from engines.ranks.models import RankModels
from engines.ranks.usage import begin_usage


class Worker:
    """Carries out commands on the models of one rank.

    Args:
        rank: this rank's number in the group.
        world_size: ranks in the group.
        gpu: index among the group's visible GPUs; None on a machine without one.
    """

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        start.settle_vector_functions()
        if gpu is None:
            start.prepare_deepspeed_for_cpu()
        else:
            torch.cuda.set_device(gpu)
        # By hand and without device_id: DeepSpeed's own call binds the group to a device, which hangs vLLM's groups.
        interface.init_process_group("gloo" if gpu is None else "cpu:gloo,cuda:nccl")
        self.models = RankModels(rank, world_size, device)

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Carry out one command.

        Args:
            command: its name.
            arguments: its fields.
            tell: takes its news, as {"news": the fields}.

        Returns:
            `reply`, the fields of what the handler returned, and beside it `usage`: what the command took
            (engines/ranks/usage.py) and what it did.

        Raises:
            KeyError: there is no such command.
            WrongMessage: it has other fields.
        """
        kind, handler = HANDLERS[command]
        asked, models = decode(kind, arguments, command), self.models
        models.tell, models.usage = lambda news: tell({"news": encode(news)}), {}
        end_usage = begin_usage(models.device)
        sleeps = models.generator is not None and not isinstance(asked, Generate | SampleToCompare)
        reply = encode(handler(models, asked))
        asleep = models.generator.asleep if models.generator is not None and sleeps else ()
        return {"reply": reply, "usage": models.usage | end_usage(asleep)}

    def after_reply(self) -> None:
        """Let a rollout engine that has generated sleep."""
        if self.models.generator is not None:
            self.models.generator.sleep()

    def close(self) -> None:
        """End the rollout engine, which leaves the process group itself, or leave the group."""
        self.models.environments.close()
        if self.models.generator is not None:
            self.models.generator.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
