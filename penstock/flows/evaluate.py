"""Evaluate: models on held-out prompts, on tasks of lm-evaluation-harness, or both; the same prompts for all of them.

    look at models, recipe and tasks -> each model: (engines -> generate -> reward -> evaluators), (tasks)
                                     -> table with differences -> tracker

The evaluation is the training's own task, on engines that hold the model and train nothing. So the weights of an
iteration have the figures that the training recorded of them, on a CPU to the last bit.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from penstock.configs.tree.schedule import value_at
from penstock.session.flow_runs.failures import ends_in_words
from penstock.state.run_folder import RunFolder
from penstock.tasks.evaluation.harness import run_tasks
from penstock.tasks.evaluation.inputs import Plan, Subject, planned, weights_of
from penstock.tasks.evaluation.results import TASKS, finish, keep, results_folder
from penstock.tasks.evaluation.serve import served
from penstock.tasks.iteration.evaluate import evaluate as evaluate_heldout


def _name() -> str:
    first, *others = flow_run.parameters["models"] or [""]
    return f"evaluate-{Path(first).name}" + (f"-and-{len(others)}-more" if others else "")


@flow(name="evaluate", flow_run_name=_name)
@ends_in_words
def evaluate(
    models: list[str],
    recipe: str | None = None,
    overrides: list[str] | None = None,
    tasks: list[str] | None = None,
    include_path: str | None = None,
    to: str | None = None,
) -> str:
    """Evaluate models; return the folder with evaluation.md, evaluation.json and evaluation.parquet.

    Args:
        models: Hugging Face folders, run folders or checkpoints of runs; differences are to the first of them.
        recipe: a YAML recipe with held-out data, reward and evaluators; default: that of the first run.
        overrides: changes of the recipe, as key=value, e.g. evaluate.samples=4.
        tasks: of lm-evaluation-harness, e.g. arc_easy, where that package and their data are.
        include_path: folder with YAML files of tasks of your own.
        to: folder for the results; default: a new one in `evaluations`, beside the runs.
    """
    plan = planned(models, recipe, overrides or (), tasks or (), include_path, to)
    with results_folder(plan) as folder:
        for subject in plan.subjects:
            evaluate_one(plan, subject, RunFolder(folder / subject.label))
        finish(plan, folder)
    return str(folder)


def evaluate_one(plan: Plan, subject: Subject, run: RunFolder) -> None:
    """Evaluate one of the models; its figures and responses go into a folder of its own."""
    figures: dict[str, float] = {}
    run.path.mkdir()
    with weights_of(subject, run.path / "weights") as weights:
        if plan.config is not None:
            with served(plan, subject, weights, run) as training:
                budget = value_at(training.config.actor.budget, max(1, subject.iteration))
                figures = evaluate_heldout(training, subject.iteration, budget)
        if plan.tasks:
            place, chat = str(run.path / TASKS), plan.chat
            run_tasks(str(weights), list(plan.tasks), plan.own_tasks, place, plan.tensor_parallel, chat)
    keep(plan, subject, run, figures)
