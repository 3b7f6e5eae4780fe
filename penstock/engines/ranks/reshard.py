"""Brings the actor's weights to the rollout engine, in the same group or from another one."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from penstock.engines.commands.reshard import Connect, Listen, Reshard, Resharded, Store
from penstock.engines.groups import interface
from penstock.engines.groups.placement import reshard_strategy
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import always, carries_out
from penstock.engines.weights.broadcast import Receiver, Sender
from penstock.engines.weights.joint import join


@carries_out(Listen)
def listen(models: RankModels, command: Listen) -> Store | None:
    """Open the store in which both groups meet, on rank 0 alone; return where it is."""
    if models.rank:
        return None
    models.store, port = interface.open_store(timedelta(seconds=models.config.engine.start_timeout_s))
    return Store(interface.own_address(), port)


@carries_out(Connect, during_generation=always)
def connect(models: RankModels, command: Connect) -> None:
    """Join the groups: the actor's first rank will send, all rollout ranks receive, the actor's others take no part.

    The rollout engines count in the actor's store from then on, whichever group they are of.
    """
    engine, size = models.config.engine, command.rollout_ranks + 1
    place = (size, models.device, models.lm, engine.command_timeout_s)
    if models.generator is None:
        joint = None if models.rank else join(_meeting(models.store, command), 0, *place)
        models.transfer = Sender(models.lm, joint)
        return
    met, timeout = command.store, timedelta(seconds=engine.start_timeout_s)
    store = interface.connect_store(met.address, met.port, timeout)
    joint, generator = join(_meeting(store, command), command.before + models.rank + 1, *place), models.generator
    models.transfer = Receiver(generator.model, generator.binding, models.lm, models.storage, joint)
    generator.store = store


def _meeting(store: Any, command: Connect) -> Any:
    """Return the part of a store that no other meeting uses."""
    return torch.distributed.PrefixStore(f"meeting/{command.number}", store)


@carries_out(Reshard, during_generation=always)
def reshard(models: RankModels, command: Reshard) -> Resharded:
    """Bring the weights, verified. Responses that are under way go on with them.

    Raises:
        RuntimeError: a parameter of the rollout engine is not the actor's afterwards.
    """
    begin = time.perf_counter()
    moved = bring_weights(models, command.version)
    seconds = time.perf_counter() - begin
    return Resharded(reshard_strategy(models.config), *shared_and_copied(models), moved, seconds)


def bring_weights(models: RankModels, version: int) -> int:
    """Bring the actor's weights of `version` to the rollout engine, verified; return the bytes that reached this rank.

    Raises:
        RuntimeError: a parameter of the rollout engine is not the actor's afterwards.
    """
    assert models.transfer is not None
    if models.generator is None:
        moved = models.transfer()
    else:
        moved = models.generator.reshard(models.transfer)
        models.generator.loop.weights_changed(version)
    models.verified_version, models.updated_since = version, False
    return moved


def shared_and_copied(models: RankModels) -> tuple[int, int]:
    """Return how many of the rollout engine's parameters are the actor's own, and how many have to be written."""
    if models.generator is None:
        return 0, 0
    binding = models.generator.binding
    shared, copied, in_fp8 = len(binding.shared), len(binding.copied), len(binding.fp8)
    if reshard_strategy(models.config) in ("broadcast", "folder"):  # shared with this rank's own buffer
        return 0, shared + copied + in_fp8
    return shared, copied + in_fp8
