"""The rewards of a batch, and what follows from them at once: other groups for those that are refused, a baseline."""

from __future__ import annotations

from penstock.session.session import Stage, Training
from penstock.session.settings import Settings
from penstock.state.manifest import Progress
from penstock.tasks.iteration.greedy_baseline import greedy_baseline
from penstock.tasks.iteration.resample import groups_to_replace, resample
from penstock.tasks.iteration.reward import reward


def rewarded(training: Training, settings: Settings, progress: Progress, stage: Stage) -> Stage:
    """Score a batch; with dynamic sampling replace groups, with ReMax score the greedy responses, too."""
    stage = reward(training, settings, stage)
    stage = resampled(training, settings, progress, stage)
    if "greedy" in training.config.algorithm.needs:
        stage = greedy_baseline(training, settings, stage)
    return stage


def resampled(training: Training, settings: Settings, progress: Progress, stage: Stage) -> Stage:
    """Dynamic sampling: as long as groups are refused, and rollouts left, answer further prompts."""
    dynamic = training.config.algorithm.dynamic_sampling
    for number in range(1, dynamic.max_rollouts if dynamic else 0):
        if not groups_to_replace(training, stage):
            break
        stage = resample(training, settings, progress, stage, number)
    return stage
