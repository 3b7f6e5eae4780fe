"""Export: the trained actor as a Hugging Face folder, with its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.session import Training
from tasks.supervise import copy_tokenizer


@task(task_run_name="export", cache_policy=NO_CACHE)
def export(training: Training) -> str:
    """Write the actor to `models/final` of the run folder, complete or not at all."""
    final = training.run.model("final")
    if final.exists():
        return str(final)
    aside = final.with_name(".final.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    training.session().call("actor", "export", "0/export", folder=str(aside))
    copy_tokenizer(Path(training.session().model_folder), aside)
    aside.rename(final)
    return str(final)
