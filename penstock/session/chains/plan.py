"""A chain planned: its stages checked before the first one begins, and each with what earlier ones have left.

A model that a stage will make has the shape of the one that it starts from, so that stands in for it in a check ahead.
Nothing stands in for a file that is yet to be selected, or for a reward model: what reads them is checked as it begins,
and its recipe alone ahead. Left out: what the recipe of a chain may say (penstock/configs/chain.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from penstock.base.errors import UserError
from penstock.base.files import write_text
from penstock.checks.found_models import with_models_found
from penstock.configs.chain import STAGE, TREES, Chain, SelectConfig, Stage, read_chain
from penstock.configs.sections.run import EngineConfig
from penstock.data.source import reading_once
from penstock.session.flow_runs.kept_alive import crashes
from penstock.session.opening import PREFERENCE, REWARD_MODEL, SFT, TRAIN, Kind, Resume, foreseen, is_complete
from penstock.state.chain import ChainFolder, is_chain
from penstock.state.run_folder import check_place, new_run_folder

SUFFIX = "-chain"
CHAIN_TAG = "chain:"  # before the name of its folder, a tag of the flow runs that have been at it
KINDS: dict[str, Kind[Any]] = {kind.name: kind for kind in (SFT, PREFERENCE, REWARD_MODEL, TRAIN)}


def planned(recipe: str, overrides: list[str], *, anywhere: bool) -> Chain:
    """Read a chain and check what can be checked of its stages.

    Args:
        recipe: path of a YAML file.
        overrides: `STAGE.section.key=value`.
        anywhere: whether it may lie anywhere, as for a person at a terminal; else where recipes of a form may lie.

    Raises:
        UserError: what is asked for is wrong, or a stage cannot work; names the stage.
    """
    return checked(read_chain(Path(recipe), overrides, anywhere=anywhere))


def checked(chain: Chain) -> Chain:
    """Return a chain that can begin, as far as it can be seen ahead.

    Raises:
        UserError: a stage cannot work, or there is no place for its folder.
    """
    check(chain)
    check_place(Path(chain.folder))
    return chain


@reading_once()
def check(chain: Chain) -> None:
    """Check the stages that train, as far as what they need is there or has a stand-in.

    Raises:
        UserError: names the stage.
    """
    for stage in chain.stages:
        if not stage.selects and (seen := _with_stand_ins(chain, stage)) is not None:
            _check_stage(seen)


def begin(chain: Chain) -> ChainFolder:
    """Make the folder of a chain, from which it can be resumed."""
    folder = ChainFolder(new_run_folder(Path(chain.folder), chain.name + SUFFIX).path)
    write_text(folder.chain, chain.to_yaml())
    return folder


def begin_chain(recipe: str | None, overrides: list[str] | None, resume: str | None) -> ChainFolder:
    """Return the folder of a chain that a form asks for: a new one, or that of the one to go on with.

    A flow run that Prefect runs once more, because it had crashed or somebody asks for a retry, goes on with the chain
    that it has begun.

    Raises:
        UserError: neither is named or both are, or the chain cannot begin.
        FlowLostTooOften: Prefect has started it again by itself, and it crashed more often than that is done.
    """
    if resume is not None and overrides:
        raise UserError("a chain goes on as it was asked for", "give 'resume', or 'recipe' and 'overrides'")
    crashes(EngineConfig())
    if resume is not None:
        return ChainFolder(Path(resume).resolve())
    if recipe is None:
        raise UserError("no recipe given", "name one, e.g. configs/chain.yaml")
    chain = read_chain(Path(recipe), overrides or [], anywhere=False)
    if (begun := _begun_before(chain)) is not None:
        return begun
    return begin(checked(chain))


def _begun_before(chain: Chain) -> ChainFolder | None:
    """Return the chain that an earlier attempt of this flow run has begun, if there is one."""
    if (flow_run.run_count or 0) <= 1:
        return None
    names = [tag.removeprefix(CHAIN_TAG) for tag in flow_run.tags or () if tag.startswith(CHAIN_TAG)]
    places = [Path(chain.folder) / name for name in names]
    return next((ChainFolder(place.resolve()) for place in places if is_chain(place)), None)


def read_chain_of(folder: ChainFolder) -> Chain:
    """Return what was asked for.

    Raises:
        UserError: there is no chain, or its file was changed.
    """
    if not folder.chain.is_file():
        raise UserError(f"{folder.path} holds no chain (no chain.yaml in it)", "name the folder that a chain printed")
    return read_chain(folder.chain)


def is_done(folder: ChainFolder, stage: Stage) -> bool:
    """Whether nothing of a stage is left to do."""
    if stage.selects:
        return folder.left_by(stage).is_file()
    run = folder.run(stage)
    return run.manifest.is_file() and is_complete(KINDS[stage.does], Resume(run.path))


def stages_left(folder: ChainFolder) -> list[Stage]:
    """Return the stages that are to be done, the next one first.

    Raises:
        UserError: there is no chain.
    """
    return [stage for stage in read_chain_of(folder).stages if not is_done(folder, stage)]


def config_of(folder: ChainFolder, stage: Stage) -> Any:
    """Return the configuration with which a stage that trains begins.

    Raises:
        UserError: a value is wrong.
    """
    return _filled(folder, stage).config(KINDS[stage.does].tree)


def selection_of(folder: ChainFolder, stage: Stage) -> tuple[Path, SelectConfig]:
    """Return the run folder whose responses a stage selects from, and which it takes.

    Raises:
        UserError: a value is wrong.
    """
    config: SelectConfig = stage.config(SelectConfig)
    return folder.run(read_chain_of(folder).stage(config.run.removeprefix(STAGE))).path, config


def _filled(folder: ChainFolder, stage: Stage) -> Stage:
    """Return a stage whose values are what the stages that they name have left."""
    chain = read_chain_of(folder)
    return stage.with_values({key: str(folder.left_by(chain.stage(name))) for key, name in stage.named.items()})


def _with_stand_ins(chain: Chain, stage: Stage) -> Stage | None:
    """Return a stage with models in place of those that are to be made; None: nothing stands in for what it needs."""
    named = stage.named
    if named.keys() - {"model.path"}:
        return None
    if not named:
        return stage
    origin = _with_stand_ins(chain, chain.stage(named["model.path"]))
    if origin is None:
        return None
    model = origin.config(TREES[origin.does]).model
    tiny = None if model.tiny is None else model.tiny.model_dump(mode="json")
    return stage.with_values({"model.path": model.path, "model.tiny": tiny})


def _check_stage(stage: Stage) -> None:
    kind = KINDS[stage.does]
    with _naming(stage):
        config = with_models_found(stage.config(kind.tree))
        kind.check(config)
        foreseen(kind, config)


@contextmanager
def _naming(stage: Stage) -> Iterator[None]:
    """Say of which stage a mistake is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"stage '{stage.name}': {error.problem}", error.remedy) from error
