"""Supervised training in verbs: begin, and some steps.

The `sft` flow puts them together with penstock/tasks/finetuning/checkpoints.py.
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.configs.tree.schedule import value_at
from penstock.data.order import take
from penstock.engines.commands.finetuning import SftBegin, SftSteps
from penstock.session.session import Training
from penstock.state.manifest import Progress
from penstock.tasks.finetuning.checkpoints import model_to_train, taken
from penstock.tasks.iteration.checkpoint import begin_manifest


@task(task_run_name="begin", cache_policy=NO_CACHE)
def begin_supervised(training: Training, model_folder: str) -> None:
    """Load the model and the pairs on the actor's ranks; from here on the run can be resumed."""
    config = training.config
    assert config.sft is not None
    training.session().model_folder = model_folder
    if not training.run.manifest.is_file():
        begin_manifest(training, Progress())
    training.session().await_engines()
    training.session().say("loading the model for supervised training")
    model = model_to_train(training, config.model.dtype, config.seed, model_folder)
    begin = SftBegin(model, str(training.run.prompts("sft")), training.session().image_folder)
    training.session().call("actor", begin, "0/sft_begin")


@task(task_run_name="steps-{first:06d}", cache_policy=NO_CACHE)
def supervised_steps(training: Training, pairs: int, first: int, count: int) -> list[dict[str, float]]:
    """Take `count` optimizer steps from step `first` on, over `pairs` pairs; return the figures of each."""
    config = training.config
    assert config.sft is not None
    batch, shuffle = config.sft.batch, config.data.sampler.name != "sequential"
    batches = take(first * batch, count * batch, pairs, config.seed, shuffle).reshape(count, batch)
    steps = SftSteps(
        batches=batches,
        budget=value_at(config.sft.budget, first),
        learning_rate=float(value_at(config.sft.optimizer.learning_rate, first)),
    )
    return taken(training, steps, "sft_steps", first, count)
