"""What two trainings must agree in, to the last bit, and what is of the machine alone."""

from __future__ import annotations

from penstock.state.measured import is_measured
from penstock.state.run_folder import RunFolder, read_metrics
from penstock.trackers.mlflow import connect
from tests.delivering import tracked_run


def is_compared(figure: str) -> bool:
    """Whether two trainings agree in a figure: here rewards are of functions on the CPU, and none is begun ahead."""
    return not is_measured(figure) or figure == "reward/ahead_share"


def numbers(run: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """Return what was recorded, without what is measured."""
    return [
        (record["iteration"], {k: v for k, v in record["metrics"].items() if is_compared(k)})
        for record in read_metrics(run)
    ]


def memory(run: RunFolder) -> bytes:
    """Return what the sampler remembers; nothing for one that does not."""
    return run.prompt_rewards.read_bytes() if run.prompt_rewards.exists() else b""


def weights(run: RunFolder) -> bytes:
    """Return the trained model's file."""
    return (run.model("final") / "model.safetensors").read_bytes()


def logged(uri: str, run: RunFolder) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str], set[str], str]:
    """Return what MLflow holds of a run: figures that are not measured, parameters, names of tags, status."""
    client, run_id = connect(uri), tracked_run(run)
    found = client.get_run(run_id)
    names = [name for name in found.data.metrics if is_compared(name)]
    histories = {name: client.get_metric_history(run_id, name) for name in names}
    figures = {name: [(entry.step, entry.value) for entry in history] for name, history in histories.items()}
    return figures, found.data.params, set(found.data.tags), found.info.status
