"""One iteration of reinforcement learning, whole: this page is the dataflow.

    rollout -> reward -> [resample | greedy baseline] -> (old log-probs | reference log-probs | values) -> advantage
            -> (update actor | update critic) -> [fault] -> reshard -> [compare log-probs] -> evaluate
            -> [refresh reference] -> record -> checkpoint

With `dataflow` a user's function says what stands before the reshard, in its own order
(penstock/flows/parts/own_steps.py). Steps in brackets run side by side where their engine groups differ, and only if
the algorithm needs them. The engines begin the next rollout before the record. With `rollout.stream` nobody waits for
the update: at staleness 0 all up to it is done portion by portion (penstock/flows/parts/stream.py), above, the next
rollout begins before it and gets the new weights on the way. Each step is a task; the tasks hand on where the
experience lies, never the experience. Left out: what each step does (penstock/tasks/).
"""

from __future__ import annotations

from prefect import flow

from penstock.flows.parts.learning import learnt
from penstock.flows.parts.own_steps import own_steps
from penstock.flows.parts.passes import forward_passes
from penstock.flows.parts.rewards import rewarded
from penstock.flows.parts.stream import streamed
from penstock.session.callbacks import call_back
from penstock.session.figures import alarms, throughput, utilisation
from penstock.session.logged import with_logged
from penstock.session.record import advanced, finite
from penstock.session.requests import Rollout
from penstock.session.session import Training
from penstock.session.settings import live_overrides, next_kl_coefficient, next_settings
from penstock.state.manifest import Progress
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.checkpoint import checkpoint_due, save_checkpoint, snapshot
from penstock.tasks.iteration.compare_logprobs import compare_logprobs, comparison_due
from penstock.tasks.iteration.evaluate import evaluate
from penstock.tasks.iteration.record import record
from penstock.tasks.iteration.refresh_reference import refresh_due, refresh_reference
from penstock.tasks.iteration.reshard import reshard
from penstock.tasks.iteration.rollout import begin_next_rollout, begin_rollout, begin_rollout_ahead, rollout


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
    if config.dataflow is not None:
        stage, metrics = own_steps(training, settings, progress, begun)
    elif config.rollout.in_portions:
        stage = streamed(training, settings, begun)
        metrics = learnt(training, settings, progress, stage)
    else:
        stage = rollout(training, settings, begun)
        following = begin_rollout_ahead(training, progress, stage, scored=False)
        stage = rewarded(training, settings, progress, stage)
        following = following or begin_rollout_ahead(training, progress, stage, scored=True)
        stage = advantage(training, settings, stage, forward_passes(training, settings, stage))
        metrics = learnt(training, settings, progress, stage)

    metrics |= reshard(training, settings, version=number)
    if comparison_due(config, number):
        metrics |= compare_logprobs(training, number, settings.micro_batch_tokens)
    if config.evaluate.every and number % config.evaluate.every == 0 or number == config.iterations:
        metrics |= evaluate(training, number, settings.micro_batch_tokens)

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
    metrics |= throughput(config, stage.experience.samples, metrics)
    metrics = with_logged(metrics, training.session().logged)
    metrics |= alarms(training, metrics)
    progress = live_overrides(training, progress)
    metrics |= snapshot(training, progress)
    following = following or begin_next_rollout(training, progress)
    record(training, number, finite(metrics))
    if checkpoint_due(config, number):
        with training.session().clock.stopped():
            save_checkpoint(training, progress)
    call_back(training, number, metrics)
    return progress, following
