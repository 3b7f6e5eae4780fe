"""What may change when a run is resumed: how long it goes on, deadlines, checkpoints, records, and where it runs.

On another number of ranks, of all or of those that compute a micro-batch together, in other micro-batches, or at
another ZeRO stage, sums are taken in another order and nothing else changes. Anything else would make another run: its
first iterations or steps would be of other settings than its last. What may change while a training runs has a way of
its own (penstock/session/settings.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

from penstock.base.errors import UserError
from penstock.configs.loading.load import parse_override, tree_of
from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.recipes import merge

Tree = TypeVar("Tree", bound=TrainConfig | PairConfig)

WHERE_AND_DEADLINES = (
    "engine.start_timeout_s",
    "engine.command_timeout_s",
    "engine.heartbeat_timeout_s",
    "engine.restarts",
    "engine.restart_window_s",
    "hosts.address",
    "hosts.port",
    "hosts.interface",
    "hosts.join_timeout_s",
    "hosts.silence_s",
)
OF_STEPS = (
    *("steps", "checkpoint_every", "micro_batch_tokens", "gradient_checkpointing", "zero_stage"),
    *("offload", "offload_folder", "offload_activations"),
)


@dataclass(frozen=True)
class Resumable:
    """What may change in the runs of one command.

    Attributes:
        keys: the first of them says how long a run goes on.
        sections: of which every key may.
        unit: what that length counts, in the plural.
        trained: sections with an optimizer whose learning rate may depend on the length.
    """

    keys: tuple[str, ...]
    sections: tuple[str, ...]
    unit: str
    trained: tuple[str, ...]

    def length(self, config: TrainConfig | PairConfig) -> int:
        """Return how long a run goes on."""
        return int(reduce(getattr, self.keys[0].split("."), config))  # type: ignore[call-overload]

    def allows(self, key: str) -> bool:
        """Whether a key may change."""
        return key in self.keys or key.partition(".")[0] in self.sections


OF_TRAIN = Resumable(
    keys=(
        "iterations",
        "reward.timeout_s",
        "reward.workers",
        "reward.max_failure_share",
        "evaluate.every",
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.best",
        "record.tracker",
        "record.samples_every",
        "record.samples",
        *WHERE_AND_DEADLINES,
        "rollout.tensor_parallel",
        *("actor.zero_stage", "actor.offload_optimizer", "critic.zero_stage", "critic.offload_optimizer"),
        *("actor.offload", "actor.offload_activations", "critic.offload", "critic.offload_activations"),
        *("actor.offload_folder", "critic.offload_folder", "sft.offload_folder"),
        *("actor.sequence_parallel", "critic.sequence_parallel", "actor.expert_parallel"),
        *("sft.zero_stage", "sft.offload", "sft.offload_activations"),
    ),
    sections=("groups", "faults"),
    unit="iterations",
    trained=("actor", "critic"),
)
OF_SFT = Resumable((*(f"sft.{key}" for key in OF_STEPS), *WHERE_AND_DEADLINES), ("groups",), "steps", ("sft",))
OF_PAIRS = Resumable(
    (*(f"trainer.{key}" for key in OF_STEPS), *WHERE_AND_DEADLINES), ("devices",), "steps", ("trainer",)
)


def resumed_config(config: Tree, overrides: Sequence[str], done: int, may: Resumable = OF_TRAIN) -> Tree:
    """Return the configuration with which a run goes on.

    Args:
        config: the run's own.
        overrides: `section.key=value`, the value in YAML; what the run has already may be given, too.
        done: iterations or steps behind the checkpoint from which it goes on.
        may: what may change.

    Raises:
        UserError: an override is malformed, its key may not change, a value is not allowed, or less is asked for than
            is done.
    """
    own, changes = config.model_dump(exclude={"base"}), []
    for override in overrides:
        changes.append(parse_override(override, type(config)))
        _refuse_others(override, may, own, changes[-1])
    resumed = tree_of(own, changes, "what is to change", type(config))
    if (length := may.length(resumed)) < done:
        raise UserError(f"{may.keys[0]}={length}: the run has done {done} already", f"ask for {done} or more")
    return resumed


def course_changes(before: TrainConfig | PairConfig, after: TrainConfig | PairConfig, may: Resumable) -> list[str]:
    """Return a sentence for each learning rate that follows another course because a run goes on for another length."""
    old, new = may.length(before), may.length(after)
    sections = {name: getattr(after, name) for name in may.trained} if old != new else {}
    return [
        f"{name}.optimizer.decay is '{section.optimizer.decay}': from here on the learning rate is that of a training "
        f"of {new} {may.unit}, and what is done was of {old}"
        for name, section in sections.items()
        if section is not None and section.optimizer.decay != "constant"
    ]


def _refuse_others(override: str, may: Resumable, own: dict[str, Any], values: dict[str, Any]) -> None:
    key = override.partition("=")[0].strip()
    if may.allows(key) or merge(own, values) == own:
        return
    others = f", and all in {' and '.join(may.sections)}"
    raise UserError(
        f"'{key}' cannot change in a run: --resume continues it with its own configuration",
        f"keys that can: {', '.join(may.keys)}{others}",
    )
