"""Train: supervised warm-up if asked for, then iterations of reinforcement learning; anew, or from a checkpoint.

    check -> engines -> prompts -> (supervised warm-up) -> load models -> restore -> compare log-probs -> evaluate
          -> iteration 1, 2, ... -> export -> report

Each iteration is a child flow (flows/iteration.py). Engines live exactly as long as this flow: they start inside its
`with` block and end with it, on every path. Where ranks or hosts are lost meanwhile, they are replaced, and the
training goes on from what it has kept (flows/recovery.py).
"""

from __future__ import annotations

from prefect import flow, get_run_logger

from configs.schema import TrainConfig
from flows.iteration import iteration
from flows.recovery import despite_losses
from flows.sft import supervise
from penstock.session.opening import TRAIN, Resume, is_complete, opened, resume_of, started
from penstock.session.prefect import quick_child_flows
from penstock.session.progress import show_iterations, show_progress
from penstock.session.record import finite
from penstock.session.session import Training
from penstock.session.settings import forget_overrides, live_overrides, offer_overrides
from penstock.state.manifest import Progress
from tasks.export import export
from tasks.iteration.checkpoint import begin_manifest, restore
from tasks.iteration.compare_logprobs import compare_logprobs
from tasks.iteration.evaluate import evaluate
from tasks.iteration.record import record, recording
from tasks.start import build_engines, load_prompts, starting_model


@flow(name="train", flow_run_name="train-{config.name}")
def train(
    config: TrainConfig = TrainConfig(),  # noqa: B008
    run_folder: str | None = None,
    resume: str | None = None,
    from_checkpoint: str | None = None,
    changes: list[str] | None = None,
) -> str:
    """Train a policy; return the run folder.

    Args:
        config: the whole configuration; `base` may name a recipe that fills what is not given.
        run_folder: where to put the run; default: a new folder under `config.folder`.
        resume: folder of an earlier run to continue; its own configuration is used.
        from_checkpoint: of the run to continue, e.g. 000010, with what came after taken back; default: its newest.
        changes: of the run to continue, as key=value, e.g. iterations=200; docs/recipes.md lists what may change.
    """
    going_on = resume_of(config, run_folder, resume, from_checkpoint, changes)
    if going_on is not None and (done := completed_run(going_on)):
        return done
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
    compared = compare_logprobs(training, progress.iteration)
    if progress.iteration == 0:
        progress = begin(training, progress, compared)
    offer_overrides(training.run, progress.overrides or {})
    progress = live_overrides(training, progress)
    show_iterations(training, progress.iteration)
    training.session().clock.lap()
    begun = None
    with quick_child_flows():
        for number in range(progress.iteration + 1, config.iterations + 1):
            progress, begun = iteration(training, number, progress, begun)
    export(training)


def completed_run(resume: Resume) -> str | None:
    """Return the run folder if nothing is left to do in it, and say so: no engine starts, nothing is written."""
    if not is_complete(resume):
        return None
    run = resume.run
    get_run_logger().info("%s is complete: nothing is left to do; its report is %s", run.path, run.report)
    return str(run.path)


def begin(training: Training, progress: Progress, compared: dict[str, float]) -> Progress:
    """Evaluate the policy before any training, and write the first manifest."""
    record(training, 0, finite(compared | evaluate(training, 0)))
    return begin_manifest(training, progress)
