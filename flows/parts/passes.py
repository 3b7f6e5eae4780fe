"""The forward passes over experience that an algorithm needs before its advantages."""

from __future__ import annotations

from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from tasks.iteration.forward_passes import ColumnRef, old_logprobs, reference_logprobs, values


def forward_passes(training: Training, settings: Settings, stage: Stage) -> list[ColumnRef]:
    """Run the passes that this algorithm needs, side by side; an on-policy update needs no old log-probs."""
    config, wanted = training.config, []
    if config.old_logprobs_needed:
        wanted.append(old_logprobs)
    if config.algorithm.reference_pass:
        wanted.append(reference_logprobs)
    if config.algorithm.needs_critic:
        wanted.append(values)
    if len(wanted) == 1:
        return [wanted[0](training, settings, stage.experience)]
    futures = [step.submit(training, settings, stage.experience) for step in wanted]
    return [future.result() for future in futures]
