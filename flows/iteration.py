"""One iteration of reinforcement learning, whole: this page is the dataflow.

    rollout -> reward -> [resample | greedy baseline] -> (old log-probs | reference log-probs | values) -> advantage
            -> (update actor | update critic) -> [fault] -> reshard -> [compare log-probs] -> evaluate
            -> [refresh reference] -> record -> checkpoint

Steps in brackets run side by side where their engine groups differ, and only if the algorithm needs them. The engines
begin the next rollout before the record. With `rollout.stream` nobody waits for the update: at staleness 0 all up to it
is done portion by portion (flows/parts/stream.py), above, the next rollout begins before it and gets the new weights on
the way. Each step is a task; the tasks hand on where the experience lies, never the experience. Left out: what each
step does (tasks/).
"""

from __future__ import annotations

from prefect import flow

from flows.parts.passes import forward_passes
from flows.parts.state_before import go_back
from flows.parts.stream import streamed
from flows.parts.updates import update
from penstock.session.figures import alarms, utilisation
from penstock.session.record import advanced, finite
from penstock.session.requests import Rollout
from penstock.session.session import Stage, Training
from penstock.session.settings import Settings, live_figures, live_overrides, next_kl_coefficient, next_settings
from penstock.state.manifest import Progress
from tasks.iteration.advantage import advantage
from tasks.iteration.checkpoint import checkpoint_due, save_checkpoint, snapshot
from tasks.iteration.compare_logprobs import compare_logprobs, comparison_due
from tasks.iteration.evaluate import evaluate
from tasks.iteration.faults import batch_kept, known_after, known_before, meet, tell_of_skipped_steps
from tasks.iteration.greedy_baseline import greedy_baseline
from tasks.iteration.record import record
from tasks.iteration.refresh_reference import refresh_due, refresh_reference
from tasks.iteration.resample import groups_to_replace, resample
from tasks.iteration.reshard import reshard
from tasks.iteration.reward import reward
from tasks.iteration.rollout import begin_next_rollout, begin_rollout, begin_rollout_ahead, rollout


@flow(name="iteration", flow_run_name="iteration-{number:06d}", validate_parameters=False)
def iteration(
    training: Training, number: int, progress: Progress, begun: Rollout | None = None
) -> tuple[Progress, Rollout | None]:
    """Run iteration `number` (1 for the first), whose rollout may have begun.

    Returns the progress after it, and the next rollout if that has begun.
    """
    config = training.config
    settings = next_settings(training, progress)

    begun = begun or begin_rollout(training, settings, progress)
    following = None
    if config.rollout.in_portions:
        stage = streamed(training, settings, begun)
    else:
        stage = rollout(training, settings, begun)
        following = begin_rollout_ahead(training, progress, stage, scored=False)
        stage = reward(training, settings, stage)
        stage = resampled(training, settings, progress, stage)
        if "greedy" in config.algorithm.needs:
            stage = greedy_baseline(training, settings, stage)
        following = following or begin_rollout_ahead(training, progress, stage, scored=True)
        stage = advantage(training, settings, stage, forward_passes(training, settings, stage))

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
    metrics |= reshard(training, settings, version=number)
    if comparison_due(config, number):
        metrics |= compare_logprobs(training, number)
    if config.evaluate.every and number % config.evaluate.every == 0 or number == config.iterations:
        metrics |= evaluate(training, number)

    if refresh_due(config, number):
        metrics |= refresh_reference(training, number)

    progress = advanced(
        training,
        progress,
        iteration=number,
        policy_version=number,
        prompt_cursor=progress.prompt_cursor + stage.experience.prompts,
        deferred=stage.experience.deferred,
        kl_coefficient=next_kl_coefficient(training, settings, metrics),
    )
    metrics |= utilisation(training, number)
    metrics |= alarms(training, metrics)
    progress = live_overrides(training, progress)
    metrics |= snapshot(training, progress)
    following = following or begin_next_rollout(training, progress)
    record(training, number, finite(metrics))
    if checkpoint_due(config, number):
        with training.session().clock.stopped():
            save_checkpoint(training, progress)
    return progress, following


def resampled(training: Training, settings: Settings, progress: Progress, stage: Stage) -> Stage:
    """Dynamic sampling: as long as groups are refused, and rollouts left, answer further prompts."""
    dynamic = training.config.algorithm.dynamic_sampling
    for number in range(1, dynamic.max_rollouts if dynamic else 0):
        if not groups_to_replace(training, stage):
            break
        stage = resample(training, settings, progress, stage, number)
    return stage
