"""Commands that bring the actor's weights to the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class Store:
    """Where the ranks of actor and rollouts meet: a store on the machine of the actor's first rank."""

    address: str
    port: int


@dataclass(frozen=True)
class Listen(Command[Store | None]):
    """Open the store in which groups of actor and rollouts meet; the first rank replies."""

    measured: ClassVar[bool] = False


@dataclass(frozen=True)
class Connect(Command[None]):
    """Join the actor's first rank with the ranks of all rollout groups, which get this side by side."""

    measured: ClassVar[bool] = False
    store: Store
    number: int  # of this meeting in this store
    rollout_ranks: int
    before: int = 0  # of those, the ones of the groups before this one


@dataclass(frozen=True)
class Resharded:
    """What a reshard took on this rank.

    `shared` of the rollout engine's parameters are the actor's own, `copied` are written; both 0 on an actor's rank
    that has no rollout engine.
    """

    strategy: str
    parameters_shared: int
    parameters_copied: int
    bytes: int
    transfer_s: float


@dataclass(frozen=True)
class Reshard(Command[Resharded]):
    """Bring the actor's weights of policy `version` to the rollout engine, verified."""

    version: int
