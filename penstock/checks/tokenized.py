"""What a run's prompts, pairs or preferences were made with: they are tokenized once, so a resume may not change it.

Files are known by their content, all of it: a run folder may go on where its data lie elsewhere, and other rows under
the same path are noticed. The digests are of the bytes that the checks have read (penstock/data/source.py). Left out:
the model's tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig
from penstock.data.source import digest_of
from penstock.environments.loading import tools_told
from penstock.state.digests import read_sealed, write_sealed
from penstock.state.run_folder import RunFolder

FILES = {"prompts": ("data.train", "data.heldout"), "sft": ("data.sft",), "preferences": ("data.train", "data.heldout")}
TEXT = ("data.prompt", "data.chat", "data.chat_arguments", "data.template", "data.images")
COLUMNS = ("data.chosen", "data.rejected", "data.response", "data.label", "data.margin")
KEYS = {
    "prompts": ("data.arithmetic", "data.squares", *TEXT, "data.max_prompt_tokens", "data.too_long"),
    "sft": ("data.arithmetic", "data.squares", *TEXT, "data.response", "sft.max_tokens"),
    "preferences": (*TEXT, *COLUMNS, "trainer.max_tokens"),
}
CONTENT = "content of "  # before a key that names a file


def note_tokenized(run: RunFolder, name: str, config: TrainConfig | PairConfig) -> None:
    """Keep what makes the rows that are about to be tokenized: `name` is "prompts", "sft" or "preferences"."""
    write_sealed(_note(run, name), made_with(config, name))


def noted(run: RunFolder, name: str) -> dict[str, Any]:
    """Return what was kept of a run's rows."""
    return read_sealed(_note(run, name))


def check_tokenized(run: RunFolder, config: TrainConfig | PairConfig) -> None:
    """Check that a run to be resumed would tokenize its data as it did; its files have been checked to be there.

    Raises:
        UserError: a key that decides it, or the content of a file, has changed since.
    """
    for name in _names(config):
        if not _note(run, name).is_file():
            continue
        was, now = noted(run, name), made_with(config, name)
        changed = [key for key in now if now[key] != was.get(key, now[key])]  # a file may be added
        if changed and changed[0].startswith(CONTENT):
            raise UserError(
                f"the {changed[0]} is not what the rows of this run ({run.path}) were made from",
                "put the old file back, or start a new run",
            )
        if changed:
            raise UserError(
                f"{changed[0]} in {run.config} is {now[changed[0]]!r}, and the rows of this run were made with "
                f"{was[changed[0]]!r}",
                "put the old value back, or start a new run",
            )


def _note(run: RunFolder, name: str) -> Path:
    return run.prompts(name).with_suffix(".json")


def _names(config: TrainConfig | PairConfig) -> tuple[str, ...]:
    if isinstance(config, PairConfig):
        return ("preferences",)
    return ("prompts",) if config.sft is None else ("prompts", "sft")


def made_with(config: TrainConfig | PairConfig, name: str) -> dict[str, Any]:
    """Return what decides which rows there are and their tokens, by dotted key."""
    tree: dict[str, dict[str, Any]] = config.model_dump(mode="json")
    places = {key: key.split(".") for key in KEYS[name] + FILES[name]}
    values = {key: tree[section].get(leaf) for key, (section, leaf) in places.items()}
    made = {key: values[key] for key in KEYS[name]} | _told_of_tools(config)
    if values.get("data.arithmetic") is not None or values.get("data.squares") is not None:
        return made | {"seed": config.seed}  # it makes the problems
    return made | {CONTENT + key: digest_of(Path(str(values[key]))) for key in FILES[name] if values[key] is not None}


def _told_of_tools(config: TrainConfig | PairConfig) -> dict[str, Any]:
    """Return what the chat template is told of an environment's tools, by a key as of a file's content."""
    tools = tools_told(config.environment) if isinstance(config, TrainConfig) else None
    return {} if tools is None else {f"{CONTENT}the tools of environment.type": tools}
