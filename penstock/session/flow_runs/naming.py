"""What a flow run that trains is called in Prefect, before anything has been read or checked.

Left out: the names of iterations (penstock/flows/iteration.py) and of run folders (penstock/state/run_folder.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run


def run_name() -> str:
    """Return the flow's name with that of the run: of its folder, of the form, of the configuration, or its recipe."""
    return f"{flow_run.flow_name}-{name_of(flow_run.parameters or {})}"


def name_of(parameters: Mapping[str, Any]) -> str:
    """Return what a run is called by what its flow was given; text of a form, which may be wrong."""
    config, recipe = parameters.get("config"), parameters.get("recipe")
    if folder := parameters.get("resume"):
        return Path(folder).name
    if name := parameters.get("name") or _key(config, "name"):
        return str(name)
    return Path(recipe).stem if recipe else "run"


def _key(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
