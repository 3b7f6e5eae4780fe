"""A benchmark's result: one JSON file that says what was measured, where, with what, and against whom.

The same model validates on writing and on reading, so a file in `results/` is one that `bench compare` and
`bench chart` can use. Left out: how figures are shown (table.py, chart.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.benchmarks.reporting.machine import provenance

Figures = dict[str, FiniteFloat]

# Shares of held-out prompts that are answered rightly after a training, drawn as it evaluates and greedy: by the names
# that a training's summary has for them, and a peer's log.
HELDOUT = {"accuracy_heldout": "accuracy_after", "accuracy_greedy": "greedy_after"}


class BenchResult(BaseModel):
    """One result file.

    Figures that several benchmarks share: step_s, update_s, reshard_s, overhead_s (seconds), rollout_tokens_per_s,
    reshard_bytes, peak_gib (GiB of GPU memory), host_peak_gib (GiB that all processes hold together, servers included),
    mfu and scaling_efficiency (shares of 1). Medians, unless said.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bench: str = Field(min_length=1, description="which benchmark")
    command: str = Field(description="the command line that measured this")
    commit: str | None = Field(description="commit of the checkout; null outside of one")
    machine: str = Field(description="GPUs or processor")
    versions: dict[str, str] = Field(description="Python and the packages that decide speed")
    figures: Figures = Field(min_length=1, description="the result")
    peers: dict[str, Figures] = Field(default_factory=dict, description="other systems' figures, same work and machine")
    peers_command: str | None = Field(default=None, description="what added the peers, where the command did not")
    settings: dict[str, Any] = Field(default_factory=dict, description="what was fixed or tuned")
    details: list[dict[str, Any]] = Field(default_factory=list, description="a row per iteration, step or size")


def new_result(bench: str, command: str, figures: Mapping[str, float], **more: Any) -> BenchResult:
    """Return a validated result of this machine and checkout; `more` are the optional fields."""
    return BenchResult(bench=bench, **provenance(command), figures=dict(figures), **more)


def write_result(path: Path, result: BenchResult) -> None:
    """Write the file atomically."""
    write_text(path, result.model_dump_json(indent=2) + "\n")


def read_result(path: Path) -> BenchResult:
    """Read a result file.

    Raises:
        UserError: there is none, or it is not in this format.
    """
    return _validated(TypeAdapter(BenchResult), path, "a result file", "measure again with 'penstock bench'")


def read_peers(path: Path) -> dict[str, dict[str, float]]:
    """Read a file of peers' figures: `{"trl 1.16.0": {"step_s": 48.2}}`.

    Raises:
        UserError: there is none, or it is not in this format.
    """
    remedy = "write it with 'penstock bench peers'"
    return _validated(TypeAdapter(dict[str, Figures]), path, "a file of peers' figures", remedy)


def _validated(adapter: TypeAdapter[Any], path: Path, what: str, remedy: str) -> Any:
    if not path.is_file():
        raise UserError(f"there is no file {path}", f"name {what}, or {remedy}")
    try:
        return adapter.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is not {what}: {place or 'the file'}: {first['msg']}", remedy) from None


def medians(rows: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    """Return the median over `rows` of each metric that they hold; `names` maps a figure to its metric."""
    found = {figure: [row[metric] for row in rows if metric in row] for figure, metric in names.items()}
    return {figure: float(statistics.median(values)) for figure, values in found.items() if values}


def steady(rows: Sequence[Any], skip: int) -> Sequence[Any]:
    """Return the rows after the first `skip`, which are cold.

    Raises:
        UserError: nothing is left.
    """
    if len(rows) <= skip:
        raise UserError(f"{len(rows)} measured, and the first {skip} are not counted", "measure more, or lower --skip")
    return rows[skip:]
