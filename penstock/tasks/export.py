"""Export: the trained actor as a Hugging Face folder, with its tokenizer, and as a version of a registered model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.base.files import filling
from penstock.engines.commands.checkpoint import Export
from penstock.session.registry.registering import deliver_version, final_version, with_registry
from penstock.session.session import Training
from penstock.tasks.finetuning.checkpoints import copy_tokenizer


@task(task_run_name="export", cache_policy=NO_CACHE)
def export(training: Training) -> str:
    """Write the actor to `models/final` of the run folder, complete or not at all, and wait for the last checkpoint."""
    final = training.run.model("final")
    if not final.exists():
        training.session().say("writing the trained model")
        with filling(final) as aside:
            training.session().call("actor", Export(str(aside)), "0/export")
            copy_tokenizer(Path(training.session().model_folder), aside, training.config.model.code)
    training.session().checkpoints.wait()
    if training.config.record.registered_model is not None:
        _register(training)
    return str(final)


def _register(training: Training) -> None:
    """Let the tracker with a registry have the model, after all that the tracker gets before."""
    session, run = training.session(), training.run
    tracked = with_registry(session.tracked)
    assert tracked is not None
    session.say("registering the model")
    new = final_version(run, training.config, tracked)
    session.outboxes[session.tracked.index(tracked)].put(
        f"the registered model '{new.name}'", partial(deliver_version, new, run.path.parent)
    )
