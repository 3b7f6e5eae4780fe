"""The form of a deployment as a person sees it: its fields empty but for the recipe, and recipes to choose from.

`prefect deploy` makes a form that works, and sends every default of the schema; this is what `penstock deploy` makes of
it. Recipes are those that lie ready where it runs: one that is added later is offered after the next deployment.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import UserError
from penstock.base.home import HOME, RECIPES
from penstock.configs.chain import read_chain
from penstock.configs.loading.blank import blank, plain
from penstock.configs.loading.form import config_from_form
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.recipes import FOLDERS_VARIABLE, SUFFIXES
from penstock.configs.tree.section import Recipe

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

TREES: dict[str, type[Recipe]] = {
    "train": TrainConfig,
    "retrain": TrainConfig,
    "sft": TrainConfig,
    "preference": PreferenceConfig,
    "reward-model": RewardModelConfig,
}
CHAIN = "chain"  # the flow whose recipes have stages
MEASURED = "bench_*"  # recipes of benchmarks, which nobody trains with


def put_form(client: SyncPrefectClient, deployment: str, home: Path) -> None:
    """Give the deployment `flow/name` its form: with recipes to choose from, if it trains by one.

    Args:
        home: the folder in which its runs begin.

    Raises:
        UserError: the deployment's recipe is wrong.
    """
    flow = deployment.partition("/")[0]
    there = client.read_deployment_by_name(deployment)
    if flow not in (*TREES, CHAIN) or "recipe" not in there.parameters:
        _put(client, there, plain(there.parameter_openapi_schema or {"properties": {}}))
        return
    recipe = there.parameters["recipe"]
    check_recipe(flow, next(place / recipe for place in (home, HOME) if place == HOME or (place / recipe).exists()))
    schema = blank(there.parameter_openapi_schema or {}, {"recipe": sorted({recipe, *recipes(flow, home)})})
    _put(client, there, schema)


def _put(client: SyncPrefectClient, deployment: DeploymentResponse, schema: dict[str, Any]) -> None:
    from prefect.client.schemas.actions import DeploymentUpdate

    client.update_deployment(deployment.id, DeploymentUpdate.model_validate({"parameter_openapi_schema": schema}))


@cache
def recipes(flow: str, home: Path) -> list[str]:
    """Return the recipes of a flow, as a form names them: ours, and those in `home` and in the operator's folders."""
    theirs = [Path(entry) for entry in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if entry]
    files = [path for folder in (RECIPES, home / "configs", home, *theirs) for path in sorted(folder.glob("*"))]
    named = (
        next(
            (str(path.relative_to(place)) for place in (home, HOME) if path.is_relative_to(place)), str(path.absolute())
        )
        for path in dict.fromkeys(files)
        if path.suffix in SUFFIXES and not path.match(MEASURED) and _holds(flow, path)
    )
    return list(dict.fromkeys(named))


def _holds(flow: str, path: Path) -> bool:
    try:
        check_recipe(flow, path)
    except UserError:
        return False
    return True


def check_recipe(flow: str, path: Path) -> None:
    """Check that a recipe is one of the flow.

    Raises:
        UserError: it cannot be read, has a mistake, or is for another flow.
    """
    if flow == CHAIN:
        read_chain(path, anywhere=False)
        return
    config = config_from_form(TREES[flow], str(path), {}, None, None)
    if flow == "sft" and isinstance(config, TrainConfig) and config.sft is None:
        raise UserError(f"{path} has no 'sft' section", "name a recipe that has one")
