"""Train: supervised warm-up if asked for, then iterations of reinforcement learning; anew, or from a checkpoint.

    check -> engines -> prompts -> (supervised warm-up) -> load models -> evaluate -> iteration 1, 2, ... -> report

Each iteration is a child flow (flows/iteration.py). Engines live exactly as long as this flow: they start inside its
`with` block and end with it, on every path. Left out: restarting engines while the flow runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import flow, get_run_logger

from configs.schema import TrainConfig
from flows.iteration import iteration
from flows.sft import supervise
from state.manifest import Progress, check_kind, check_resumable, completed
from state.run_folder import RunFolder, new_run_folder, open_run_folder
from tasks.admission import admission
from tasks.check import check_inputs, check_memory
from tasks.checkpoint import begin_manifest, restore
from tasks.child_flows import quick_child_flows
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.laps import lap
from tasks.prepare import build_engines, load_prompts, starting_model
from tasks.progress import show_iterations, show_progress
from tasks.record import finite, record, recording
from tasks.session import Training, open_session, read_config, write_config
from tasks.settings import forget_overrides, live_overrides, offer_overrides
from tasks.tokenized import check_tokenized


@flow(name="train", flow_run_name="train-{config.name}")
def train(config: TrainConfig = TrainConfig(), run_folder: str | None = None, resume: str | None = None) -> str:  # noqa: B008
    """Train a policy; return the run folder.

    Args:
        config: the whole configuration; `base` may name a recipe that fills what is not given.
        run_folder: where to put the run; default: a new folder under `config.folder`.
        resume: folder of an earlier run to continue; its own configuration is used.
    """
    if resume is not None and (done := completed_run(resume)):
        return done
    config, run = open_run(config, run_folder, resume)
    with admitted_session(config, run) as training, show_progress(training), recording(training):
        model = starting_model(training)
        load_prompts(training, model)
        if config.sft is not None:
            model = supervise(training, model)
        build_engines(training, model)

        progress = restore(training) if resume else Progress()
        if progress.iteration == 0:
            progress = begin(training, progress)
        offer_overrides(run, progress.overrides or {})
        progress = live_overrides(training, progress)
        show_iterations(training, progress.iteration)
        lap(training)
        with quick_child_flows():
            for number in range(progress.iteration + 1, config.iterations + 1):
                progress = iteration(training, number, progress)
        export(training)
    forget_overrides(run)  # a run whose end was not recorded repeats it with them
    return str(run.path)


def completed_run(folder: str) -> str | None:
    """Return the run folder if nothing is left to do in it, and say so: no engine starts, nothing is written."""
    run = open_run_folder(Path(folder))
    check_kind(run, "train")
    if not completed(run, read_config(run).iterations):
        return None
    get_run_logger().info("%s is complete: nothing is left to do; its report is %s", run.path, run.report)
    return str(run.path)


def open_run(config: TrainConfig, run_folder: str | None, resume: str | None) -> tuple[TrainConfig, RunFolder]:
    """Check all that does not depend on others' trainings and open the run folder, before anything waits or starts."""
    if resume is not None:
        run = open_run_folder(Path(resume))
        check_resumable(run, "train")
        config = read_config(run)
        check_inputs(config)
        check_tokenized(run, config)
        return config, run
    check_inputs(config)
    run = new_run_folder(Path(config.folder), config.name, Path(run_folder) if run_folder else None)
    offer_overrides(run)  # first: from the configuration on it is a run, whose live values may be set
    write_config(run, config)
    return config, run


@contextmanager
def admitted_session(config: TrainConfig, run: RunFolder) -> Iterator[Training]:
    """Wait for the GPUs, check the memory that is free then, and start the engine groups."""
    with admission(config):
        check_memory(config)
        with open_session(config, run) as training:
            yield training


def begin(training: Training, progress: Progress) -> Progress:
    """Evaluate the policy before any training, and write the first manifest."""
    record(training, 0, finite(evaluate(training, 0)))
    return begin_manifest(training, progress)
