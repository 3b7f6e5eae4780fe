"""The forward passes over experience that an algorithm needs before its advantages."""

from __future__ import annotations

from collections.abc import Container

from penstock.configs.schema import TrainConfig
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.tasks.iteration.forward_passes import ColumnRef, old_logprobs, reference_logprobs, values

PASSES = {"logprobs_old": old_logprobs, "logprobs_reference": reference_logprobs, "values": values}


def needed(config: TrainConfig, name: str) -> bool:
    """Whether the algorithm needs a pass."""
    return {
        "logprobs_old": config.old_logprobs_needed,
        "logprobs_reference": config.algorithm.reference_pass,
        "values": config.algorithm.needs_critic,
    }[name]


def forward_passes(
    training: Training, settings: Settings, stage: Stage, done: Container[str] = frozenset()
) -> list[ColumnRef]:
    """Run the passes that this algorithm needs, side by side; an on-policy update needs no old log-probs.

    Args:
        done: names of those that have run already.
    """
    wanted = [step for name, step in PASSES.items() if needed(training.config, name) and name not in done]
    if len(wanted) == 1:
        return [wanted[0](training, settings, stage.experience)]
    futures = [step.submit(training, settings, stage.experience) for step in wanted]
    return [future.result() for future in futures]
