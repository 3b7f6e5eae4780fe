"""The worker of a rank: it takes a command as it arrives, lets its handler carry it out, and measures what it used.

The rank loop (penstock/engines/groups/rank.py) receives a command and calls `Worker.handle`. Each command has one
handler, in a module beside this one; all of these are imported here, so that a new one is found by being there.

Left out: what commands do, when to do what (penstock/flows/), how commands travel (penstock/engines/groups/channel.py),
what goes on between messages (penstock/engines/ranks/serving/serve.py).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import torch

from penstock.engines import ranks
from penstock.engines.commands.logprob_gap import SampleToCompare
from penstock.engines.commands.message import decode, encode
from penstock.engines.commands.rollout import Generate
from penstock.engines.groups import interface
from penstock.engines.groups.channel import Tell
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import HANDLERS, Later
from penstock.engines.ranks.serving.serve import Serving
from penstock.engines.ranks.serving.usage import begin_usage
from penstock.engines.training import start

if TYPE_CHECKING:
    from penstock.engines.groups.rank import Pending

for _module in iter_modules(ranks.__path__):  # each registers the commands that it carries out
    import_module(f"{ranks.__name__}.{_module.name}")


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
        self.serving = Serving(self.models)

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any] | Pending:
        """Carry out one command, or begin it.

        Args:
            command: its name.
            arguments: its fields.
            tell: takes its news, as {"news": the fields}.

        Returns:
            `reply`, the fields of what the handler returned, and beside it `usage`: what the command took
            (penstock/engines/ranks/serving/usage.py) and what it did. For a command that is carried out in steps, or
            beside a generation, the place where both will be.

        Raises:
            KeyError: there is no such command.
            WrongMessage: it has other fields.
        """
        handler, models = HANDLERS[command], self.models
        asked, usage = decode(handler.kind, arguments, command), dict[str, float]()
        if handler.kind.changes_state:
            models.await_snapshot()
        end_usage = begin_usage(models.device)
        sleeps = models.generator is not None and not isinstance(asked, Generate | SampleToCompare)

        def result(reply: Any) -> dict[str, Any]:
            asleep = models.generator.asleep if models.generator is not None and sleeps else ()
            return {"reply": encode(reply), "usage": usage | end_usage(asleep)}

        def carry_out() -> Any:
            models.newest.tell, models.newest.usage = lambda news: tell({"news": encode(news)}), usage
            return handler.function(models, asked)

        if handler.beside and models.generates:
            return self.serving.begin_beside(lambda: result(carry_out()))
        reply = carry_out()
        return self.serving.begin(reply, result) if isinstance(reply, Later) else result(reply)

    def after_reply(self) -> None:
        """Let a rollout engine that has generated sleep."""
        generator = self.models.generator
        if generator is not None and not generator.loop.busy:
            generator.sleep()

    def close(self) -> None:
        """End the rollout engine, which leaves the process group itself, or leave the group."""
        self.models.environments.close()
        if self.models.generator is not None:
            self.models.generator.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
