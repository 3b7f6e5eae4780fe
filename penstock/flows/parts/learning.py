"""What is learnt from a batch, between two looks at its numbers: a fault is met as the recipe says.

[fault known before] -> (update actor | update critic) -> [fault known after] -> [skip, roll back or stop]
"""

from __future__ import annotations

from penstock.flows.parts.state_before import go_back
from penstock.flows.parts.updates import update
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings, live_figures
from penstock.state.manifest import Progress
from penstock.tasks.iteration.faults import batch_kept, known_after, known_before, meet, tell_of_skipped_steps


def learnt(training: Training, settings: Settings, progress: Progress, stage: Stage) -> dict[str, float]:
    """Update the models on a batch unless its numbers forbid it; return the iteration's figures so far."""
    number = settings.iteration
    metrics = stage.metrics | live_figures(training, progress)
    fault = known_before(training, metrics)
    if fault is None:
        with batch_kept(training, number):
            metrics |= update(training, settings, stage)
        tell_of_skipped_steps(training, number, metrics)
        fault = known_after(training, metrics)
    if fault is not None:
        metrics |= meet(training, number, fault, stage, metrics)
        if fault.action == "rollback":
            go_back(training, number, fault)
    return metrics
