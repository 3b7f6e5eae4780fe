"""Commands that make and load models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.configs.sections.run import Role
from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class MakeTiny(Command[None]):
    """Make a tiny random model beside the tokenizer in `folder`; `config` is a `TrainConfig` as plain data."""

    measured: ClassVar[bool] = False
    config: dict[str, Any]
    folder: str


@dataclass(frozen=True)
class Kernels:
    """Which kernel attention takes, and what keeps a GPU from faster kernels that there are for it."""

    attention: str
    slower: list[str]


@dataclass(frozen=True)
class Built:
    """What a rank has built: parameters of the actor, and of the rollout engine those that are the actor's own.

    A number of models that are not in this group is 0.
    """

    parameters: int
    trained: int
    parameters_shared: int
    parameters_copied: int
    strategy: str | None  # by which weights reach the rollout engine, if it is in this group
    kernels: Kernels


@dataclass(frozen=True)
class Build(Command[Built]):
    """Load the models of `roles` from the actor's starting folder; `config` is a `TrainConfig` as plain data.

    `keep_logits`: the actor's updates hold a micro-batch's logits for the backward pass. `engines`: of all rollout
    groups that stay, which share the prompts when no other is there. `images`: folder of those that rows name, if any.
    """

    measured: ClassVar[bool] = False
    changes_state: ClassVar[bool] = True
    config: dict[str, Any]
    folder: str
    roles: tuple[Role, ...]
    keep_logits: bool = False
    engines: int | None = None
    images: str | None = None


@dataclass(frozen=True)
class BuildFrozen(Command[Built]):
    """Load the models of `roles` for a use that trains none; `config` is an `EvaluationConfig` as plain data.

    `folder` holds the policy, `config.reference` the model that it is compared with. `engines`, `images`: see `Build`.
    """

    measured: ClassVar[bool] = False
    changes_state: ClassVar[bool] = True
    config: dict[str, Any]
    folder: str
    roles: tuple[Role, ...]
    engines: int | None = None
    images: str | None = None
