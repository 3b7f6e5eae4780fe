"""What may change when a training is resumed: how long it goes on, deadlines, checkpoints, records, and where it runs.

On another number of ranks, or at another ZeRO stage, sums are taken in another order and nothing else changes. Anything
else would make another run: its first iterations would be of other settings than its last. What may change while a
training runs has a way of its own (penstock/session/settings.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.loading.load import config_from_mapping, parse_override
from configs.schema import TrainConfig
from configs.tree.recipes import merge
from penstock.base.errors import UserError

RESUMABLE_KEYS = (
    "iterations",
    "reward.timeout_s",
    "reward.workers",
    "reward.max_failure_share",
    "evaluate.every",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.best",
    "record.samples_every",
    "record.samples",
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
    "groups",  # and all below it
    "rollout.tensor_parallel",
    "faults",  # likewise
    *("actor.zero_stage", "actor.offload_optimizer", "critic.zero_stage", "critic.offload_optimizer", "sft.zero_stage"),
)


def resumed_config(config: TrainConfig, overrides: Sequence[str], done: int) -> TrainConfig:
    """Return the configuration with which a run goes on.

    Args:
        config: the run's own.
        overrides: `section.key=value`, the value in YAML.
        done: iterations behind the checkpoint from which it goes on.

    Raises:
        UserError: an override is malformed, its key may not change, a value is not allowed, or fewer iterations are
            asked for than are done.
    """
    tree = config.model_dump(exclude={"base"})
    for override in overrides:
        _refuse_others(override)
        tree = merge(tree, parse_override(override, TrainConfig))
    resumed = config_from_mapping(tree, "what is to change")
    if resumed.iterations < done:
        raise UserError(f"iterations={resumed.iterations}: the run has done {done} already", f"ask for {done} or more")
    return resumed


def _refuse_others(override: str) -> None:
    key = override.partition("=")[0].strip()
    if "=" not in override or key in RESUMABLE_KEYS or key.startswith(("groups.", "faults.")):
        return
    raise UserError(
        f"'{key}' cannot change in a run: --resume continues it with its own configuration",
        f"keys that can: {', '.join(RESUMABLE_KEYS)}",
    )
