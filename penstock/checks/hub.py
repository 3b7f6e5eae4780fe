"""Models of the Hugging Face Hub where a folder is wanted: `ORG/NAME`, or `ORG/NAME@REVISION`, becomes its snapshot.

A folder of that name wins. No network is asked unless `HF_HUB_OFFLINE=0` says so: the model has to be in this machine's
cache. A run keeps the folder of the snapshot, whose name is the commit, so a resume asks nobody and starts from what it
started from. Weights are taken as safetensors alone, and code of the model's where it is trusted.

Left out: models that are registered (registered.py), and what a folder must hold (model/folder.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.model_code import OTHER_WEIGHTS

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# Weights, settings and tokenizers at the top: folders below, and files called consolidated, hold the same once more.
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
TWICE = ("*/*", "consolidated*")
OFFLINE = "HF_HUB_OFFLINE"


def snapshot(text: str, key: str, code: bool = False) -> Path | None:
    """Return the folder of a snapshot, downloaded if it has to be and may be; None: the text names no model of the Hub.

    Args:
        text: what a setting says.
        key: of the setting, for messages.
        code: whether the model's own code is wanted, which may read any file beside it.

    Raises:
        UserError: the cache of this machine has no such model, whole, and the Hub may not be asked or does not give it.
    """
    found = NAME.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    offline = is_offline()
    try:
        folder = snapshot_download(
            found["name"],
            revision=found["revision"],
            allow_patterns=None if code else [*WANTED],
            ignore_patterns=[*TWICE, *OTHER_WEIGHTS],
            local_files_only=offline,
        )
    except LocalEntryNotFoundError as error:
        raise UserError(*_not_here(text, key, offline, error)) from None
    except HfHubHTTPError as error:
        said = f"{key}: there is no folder {text}, and the Hub does not give that model: {_first_line(error)}"
        remedy = "a typo? if not, accept the terms on its page, and set HF_TOKEN to a token of yours"
        raise UserError(said, remedy) from None
    return Path(folder)


def moves(text: str) -> bool:
    """Whether a text names a model of the Hub without a commit, where the Hub may be asked: it gives what is newest."""
    found = NAME.fullmatch(text)
    if found is None or Path(text).exists() or is_offline():
        return False
    return re.fullmatch("[0-9a-f]{40}", found["revision"] or "") is None


def revision_of(folder: Path) -> str | None:
    """Return the name and the commit of the snapshot that a folder is, `ORG/NAME@COMMIT`; None: it is none."""
    organisation, dashes, name = folder.parent.parent.name.removeprefix("models--").partition("--")
    if folder.parent.name != "snapshots" or not dashes:
        return None
    return f"{organisation}/{name}@{folder.name}"


def is_offline() -> bool:
    """Whether the Hub may not be asked."""
    return os.environ.get(OFFLINE, "1").upper() not in ("0", "FALSE", "NO", "OFF")


def _not_here(text: str, key: str, offline: bool, error: Exception) -> tuple[str, str]:
    missing = f"{key}: there is no folder {text}"
    if offline:
        said = f"{missing}, and this machine's cache of the Hugging Face Hub has no such model, or not all of it"
        return said, f"with {OFFLINE}=0 in its environment Penstock downloads it, and asks no network otherwise"
    said = f"{missing}, and the Hugging Face Hub cannot be asked: {_first_line(error)}"
    return said, "look at the network and at HF_ENDPOINT, or name a folder"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
