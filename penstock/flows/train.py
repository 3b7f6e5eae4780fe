"""Train: supervised warm-up if asked for, then iterations of reinforcement learning; anew, or from a checkpoint.

    check -> engines -> prompts -> (supervised warm-up) -> load models -> restore -> compare log-probs -> evaluate
          -> iteration 1, 2, ... -> export -> report

Each iteration is a child flow (penstock/flows/iteration.py). Engines live exactly as long as this flow: they start
inside its `with` block and end with it, on every path. Where ranks or hosts are lost meanwhile, they are replaced, and
the training goes on from what it has kept (penstock/flows/parts/recovery.py).
"""

from __future__ import annotations

from prefect import flow

from penstock.configs.loading import fields as form
from penstock.configs.loading.parameters import with_form
from penstock.configs.schema import TrainConfig
from penstock.flows.iteration import iteration
from penstock.flows.parts.recovery import despite_losses
from penstock.flows.sft import supervise
from penstock.session.callbacks import call_back
from penstock.session.flow_runs.failures import ends_in_words
from penstock.session.flow_runs.naming import run_name
from penstock.session.opening import TRAIN, left_as_it_is, opened, resume_of, started
from penstock.session.prefect import quick_child_flows
from penstock.session.progress import show_iterations, show_progress
from penstock.session.record import finite
from penstock.session.session import Training
from penstock.session.settings import forget_overrides, live_overrides, next_settings, offer_overrides
from penstock.state.manifest import Progress
from penstock.tasks.export import export
from penstock.tasks.iteration.checkpoint import begin_manifest, restore
from penstock.tasks.iteration.compare_logprobs import compare_logprobs
from penstock.tasks.iteration.evaluate import evaluate
from penstock.tasks.iteration.record import record, recording
from penstock.tasks.start import build_engines, load_prompts, starting_model

KEYS = {
    "name": "name",
    "model": "model.path",
    "data": "data.train",
    "iterations": "iterations",
    "learning_rate": "actor.optimizer.learning_rate",
    "prompts": "rollout.prompts",
    "samples": "rollout.samples",
    "seed": "seed",
}


@flow(name="train", flow_run_name=run_name)
@ends_in_words
@with_form(TrainConfig, KEYS)
def train(
    config: TrainConfig,
    run_folder: form.RunFolder = None,
    resume: form.ResumedRun = None,
    from_checkpoint: form.Checkpoint = None,
    changes: form.Changes = None,
) -> str:
    """Train a policy with reinforcement learning; return the run folder.

    A new run is of a recipe and what is given beside it, or of a whole `config`, as the command line gives it.
    """
    going_on = resume_of(config, run_folder, resume, from_checkpoint, changes)
    if done := left_as_it_is(TRAIN, going_on):
        return str(done.path)
    with (
        opened(TRAIN, config, run_folder, going_on) as (config, run),
        started(TRAIN, config, run) as training,
        show_progress(training),
        recording(training),
    ):
        despite_losses(training, trained)
    forget_overrides(run)  # a run whose end was not recorded repeats it with them
    return str(run.path)


def trained(training: Training) -> None:
    """Train from where the run folder says that the run stands to its end."""
    config = training.config
    model = starting_model(training)
    load_prompts(training, model)
    if config.sft is not None:
        model = supervise(training, model)
    build_engines(training, model)

    progress = restore(training)
    offer_overrides(training.run, progress.overrides or {})
    progress = live_overrides(training, progress)
    budget = next_settings(training, progress).micro_batch_tokens
    compared = compare_logprobs(training, progress.iteration, budget)
    if progress.iteration == 0:
        progress = begin(training, progress, budget, compared)
    show_iterations(training, progress.iteration)
    training.session().clock.lap()
    begun = None
    with quick_child_flows():
        for number in range(progress.iteration + 1, config.iterations + 1):
            progress, begun = iteration(training, number, progress, begun)
    export(training)


def begin(training: Training, progress: Progress, budget: int, compared: dict[str, float]) -> Progress:
    """Evaluate the policy before any training, and write the first manifest."""
    metrics = finite(compared | evaluate(training, 0, budget))
    record(training, 0, metrics)
    progress = begin_manifest(training, progress)
    call_back(training, 0, metrics)
    return progress
