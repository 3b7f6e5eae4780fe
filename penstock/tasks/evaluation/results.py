"""What is kept of an evaluation: a folder with tables, and a run of the tracker for each model.

    evaluation.json     figures of every model, differences   evaluation.md    the table
    evaluation.parquet  value of each figure and prompt       recipe.yaml      by which models were asked
    MODEL/              figures.json, prompts.parquet, responses in evaluation/, logs/

The folder is the truth. Left out: how figures and differences are made (penstock/evaluators, penstock/reports).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from penstock.base.files import write_text
from penstock.configs.loading.load import to_yaml
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import names_of_trackers
from penstock.evaluators.bootstrap import with_intervals
from penstock.evaluators.heldout import HeldOut
from penstock.evaluators.kl import KL
from penstock.evaluators.length import Length
from penstock.evaluators.rewards import Rewards
from penstock.reports.evaluations import Evaluated, as_json, page_of
from penstock.state.experience import column_names, read_columns
from penstock.state.run_folder import RunFolder, new_run_folder
from penstock.tasks.evaluation.harness import figures_in, values_in
from penstock.tasks.evaluation.inputs import Plan, Subject
from penstock.trackers.table import keeps, make_tracker
from penstock.trackers.tracker import Artifact, Figures, NewRun, flatten

FIGURES, PROMPTS = "figures.json", "prompts.parquet"
TASKS = "tasks"  # folder of a model with what the harness wrote
Z = 1.96  # standard errors to either end of a 95 % interval
# Evaluators whose figures are means over prompts.
PER_PROMPT: dict[str, Callable[[], Rewards | Length | KL]] = {"rewards": Rewards, "length": Length, "kl": KL}


@contextmanager
def results_folder(plan: Plan) -> Iterator[Path]:
    """Make the folder of the results; one that nothing has come into goes again."""
    folder = new_run_folder(plan.parent / "evaluations", plan.subjects[0].label, plan.to).path
    try:
        yield folder
    except BaseException:
        if not any(path.name in (FIGURES, "logs") for path in folder.glob("*/*")):
            shutil.rmtree(folder)
        raise


def keep(plan: Plan, subject: Subject, run: RunFolder, figures: Mapping[str, float]) -> None:
    """Write a model's figures, and the values that they are means of.

    Args:
        figures: those of the held-out evaluation; none without one. What took how long is left out.
    """
    values = pd.DataFrame(columns=["figure", "prompt", "value"])
    found = {name: value for name, value in figures.items() if not name.startswith("time/")}
    if plan.config is not None:
        values = heldout_values(plan.config, run.evaluation(subject.iteration))
    if plan.tasks:
        documents = pd.DataFrame(values_in(run.path / TASKS), columns=["figure", "prompt", "value"])
        found |= task_figures(run.path / TASKS, documents)
        values = documents if values.empty else pd.concat([values, documents], ignore_index=True)
    values.to_parquet(run.path / PROMPTS, index=False)
    write_text(run.path / FIGURES, json.dumps(found, indent=2) + "\n")


def heldout_values(config: TrainConfig, responses: Path) -> pd.DataFrame:
    """Return the value of each figure for each prompt, of responses in a file."""
    samples = config.evaluate.samples * config.conversations
    columns = read_columns(responses, column_names(responses))
    mask = columns.get("loss_mask")
    heldout = HeldOut(
        samples=samples,
        prompt_ids=columns["prompt_id"],
        prompts=columns["prompt"],
        rows=[],
        texts=columns["response"],
        tokens=columns["response_tokens"],
        rewards_B=np.asarray(columns["reward"]),
        truncated_B=np.asarray(columns["truncated"]),
        logprobs=columns.get("logprobs"),
        reference_logprobs=columns.get("logprobs_reference"),
        counted_T=None if mask is None else mask.values_T,
        agents=tuple(config.players),
    )
    wanted = ["rewards", *(name for name in config.evaluate.evaluators or () if name != "rewards")]
    per_prompt = {
        f"heldout/{figure}": values_P
        for name in wanted
        if name in PER_PROMPT
        for figure, values_P in PER_PROMPT[name]().per_prompt(heldout).items()
    }
    prompts = list(heldout.prompt_ids)[::samples]
    parts = [
        pd.DataFrame({"figure": figure, "prompt": prompts, "value": np.asarray(values_P, np.float64)})
        for figure, values_P in per_prompt.items()
    ]
    return pd.concat(parts, ignore_index=True)


def task_figures(folder: Path, documents: pd.DataFrame) -> dict[str, float]:
    """Return the figures of the harness's tasks with intervals.

    Of a mean over documents the bootstrap's, as of everything else; of others what the harness's standard error gives.
    """
    values = {str(name): group["value"].to_numpy() for name, group in documents.groupby("figure")}
    found: dict[str, float] = {}
    for name, value, error in figures_in(folder):
        if name in values and np.isclose(values[name].mean(), value, rtol=0, atol=1e-9):
            found |= with_intervals({name: values[name]})
        else:
            found |= {name: value}
            if error is not None:
                found |= {f"{name}/low": value - Z * error, f"{name}/high": value + Z * error}
    return found


def read_results(folder: Path, labels: list[str]) -> list[Evaluated]:
    """Return what is kept of each model."""
    return [
        Evaluated(
            label,
            json.loads((folder / label / FIGURES).read_text(encoding="utf-8")),
            pd.read_parquet(folder / label / PROMPTS),
        )
        for label in labels
    ]


@task(task_run_name="results", cache_policy=NO_CACHE)
def write_results(folder: str, labels: list[str], facts: dict[str, str], models: list[dict[str, Any]]) -> str:
    """Write the tables of all models, also as an artifact of this flow run; return the page.

    Args:
        facts: what people should know besides the figures.
        models: where each model's weights come from.
    """
    target, found = Path(folder), read_results(Path(folder), labels)
    content = {"models": models, **facts, **as_json(found)}
    write_text(target / "evaluation.json", json.dumps(content, indent=2) + "\n")
    parts = [item.prompts.assign(model=item.label) for item in found]
    table = pd.concat(parts, ignore_index=True)[["model", "figure", "prompt", "value"]]
    table.to_parquet(target / "evaluation.parquet", index=False)
    page = page_of(found, facts)
    write_text(target / "evaluation.md", page)
    create_markdown_artifact(page, key="evaluation")
    return page


@task(task_run_name="record", cache_policy=NO_CACHE)
def record_in_tracker(folder: str, subject: dict[str, Any], record: dict[str, str], config: dict[str, Any]) -> None:
    """Keep a model's figures as a run of the experiment, with tags that say what was evaluated.

    The figures are in the folder already, so a tracker that does not take them is a warning.

    Args:
        subject: label, source and iteration of the model, as in evaluation.json.
        record: tracker and experiment, and the directory that has the tracker's store.
        config: the recipe; empty: tasks alone.
    """
    target, label = Path(folder), str(subject["model"])
    figures: dict[str, float] = json.loads((target / label / FIGURES).read_text(encoding="utf-8"))
    tags = {f"penstock.evaluated.{name}": str(value) for name, value in subject.items() if value is not None}
    tags |= {"penstock.kind": "evaluate", "penstock.run": folder}
    if flow_run.id is not None:
        tags |= {"prefect.flow_run_id": str(flow_run.id), "prefect.flow_run_url": str(flow_run.ui_url)}
    tracker = make_tracker(record["tracker"], Path(record["parent"]))
    try:
        tracker.open(NewRun(f"{target.name}-{label}", record["experiment"], tags))
        tracker.configure(flatten(config))
        tracker.log([Figures(int(subject["iteration"]), figures)])
        for name in ("evaluation.md", "evaluation.json"):
            tracker.artifact(Artifact(name, target / name))
        tracker.close("completed", time.time())
    except Exception as error:  # whatever it is: the figures do not depend on it
        said = "%s (%s) does not hold the evaluation of %s, which is in %s: %s"
        get_run_logger().warning(said, tracker.label, tracker.address, label, folder, error)


def finish(plan: Plan, folder: Path) -> None:
    """Write the tables, and tell each tracker of every model."""
    models = [
        {
            "model": subject.label,
            "source": str(subject.source),
            "run": None if subject.run is None else subject.run.name,
            "checkpoint": subject.checkpoint,
            "iteration": subject.iteration,
        }
        for subject in plan.subjects
    ]
    facts = {"recipe": plan.origin or "none: tasks of lm-evaluation-harness alone"}
    if plan.config is not None:
        write_text(folder / "recipe.yaml", to_yaml(plan.config))
    write_results(str(folder), [subject.label for subject in plan.subjects], facts, models)
    config = plan.config or TrainConfig()
    record = {"experiment": config.record.experiment, "parent": str(plan.parent.resolve())}
    settings = {} if plan.config is None else plan.config.model_dump(mode="json")
    for name in filter(keeps, names_of_trackers(config.record.tracker)):
        for model in models:
            record_in_tracker(str(folder), model, record | {"tracker": name}, settings)
