"""Export: the trained actor as a Hugging Face folder, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.commands.checkpoint import Export
from penstock.base.files import filling
from penstock.session.session import Training
from tasks.finetuning.checkpoints import copy_tokenizer


@task(task_run_name="export", cache_policy=NO_CACHE)
def export(training: Training) -> str:
    """Write the actor to `models/final` of the run folder, complete or not at all, and wait for the last checkpoint."""
    final = training.run.model("final")
    if not final.exists():
        training.session().say("writing the trained model")
        with filling(final) as aside:
            training.session().call("actor", Export(str(aside)), "0/export")
            copy_tokenizer(Path(training.session().model_folder), aside)
    training.session().checkpoints.wait()
    return str(final)
