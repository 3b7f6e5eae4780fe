"""Promote: the new version becomes `best` if it is better than that beyond chance, and the verdict is told."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from penstock.base.errors import UserError
from penstock.session.registry.judgement import Judgement, judge_and_promote
from penstock.session.session import read_config
from penstock.state.run_folder import RunFolder
from penstock.trackers.registry import DATA, PARENT, RUN, Registry, Version, best_of
from penstock.trackers.table import registry_in


@task(task_run_name="promote", cache_policy=NO_CACHE)
def promote(folder: str) -> str:
    """Judge the model of a run beside the best one, promote it or not, and say so; return the verdict.

    The verdict goes to the log, to an artifact, to a tag of the version, and out as an event.

    Raises:
        UserError: the registry does not hold the run's model, or the two cannot be compared.
    """
    run = RunFolder(Path(folder))
    registry = registry_in(run.path.parent)
    version = version_of(registry, run)
    judgement = judge_and_promote(registry, version, best_of(registry, version.name))
    get_run_logger().info("%s", judgement)
    create_markdown_artifact(page(judgement), key="retraining", description=str(version))
    emit_event(
        f"penstock.model.{'promoted' if judgement.better else 'kept'}",
        {"prefect.resource.id": f"penstock.model.{version.name}", "prefect.resource.name": version.name},
        payload={"version": version.number, "run": run.name, "verdict": str(judgement)},
    )
    return str(judgement)


def version_of(registry: Registry, run: RunFolder) -> Version:
    """Return the newest version that a run has registered.

    Raises:
        UserError: there is none.
    """
    name, place = str(read_config(run).record.registered_model), str(run.path.resolve())
    if found := [version for version in registry.versions(name) if version.tags.get(RUN) == place]:
        return found[0]
    raise UserError(
        f"{registry.where} lacks the model of {run.path}",
        f"penstock sync {run.path} delivers it; then penstock promote models:/{name}@latest",
    )


def page(judgement: Judgement) -> str:
    """Return the verdict as Markdown."""
    version, best = judgement.version, judgement.best
    rows = [
        ("Version", str(version)),
        ("Run", str(version.run)),
        ("Started from", version.tags.get(PARENT, "the recipe's model")),
        ("Data, sha256", version.tags.get(DATA, "made by the recipe")),
    ]
    if best is not None:
        mean, low, high = judgement.difference
        rows += [
            ("Held-out reward", f"{judgement.rewards[1]:.4f}"),
            (f"of {best}", f"{judgement.rewards[0]:.4f}"),
            ("Difference", f"{mean:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}, {judgement.prompts} prompts"),
        ]
    table = "\n".join(f"| {label} | {value} |" for label, value in rows)
    return f"# {'Promoted' if judgement.better else 'Not promoted'}\n\n{judgement}\n\n| | |\n| --- | --- |\n{table}\n"
