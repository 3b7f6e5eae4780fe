"""Models of the registry where a folder is wanted: `models:/NAME@best` becomes the folder of a version.

It is looked up once, when a run begins; the run keeps the folder and the version in its configuration, so that a resume
asks no registry, and starts from what it started from (found_models.py beside this).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import names_of_trackers
from penstock.trackers.registry import Version, check_weights, find, reference
from penstock.trackers.table import TRACKERS, has_registry, registry_in


def registered(text: str, folder: Path) -> Version | None:
    """Return the version that a text names, whose folder is as it was registered; None: it names none.

    Args:
        folder: directory of the run folders, in whose store the registry is.

    Raises:
        UserError: there is no such version, or its folder is gone or changed.
    """
    if (wanted := reference(text)) is None:
        return None
    version = find(registry_in(folder), wanted)
    check_weights(version)
    return version


def is_alias(text: str) -> bool:
    """Whether a text names a version by what may be another's tomorrow: `latest`, `best` or an alias of the user's."""
    wanted = reference(text)
    return wanted is not None and isinstance(wanted.which, str)


def check_registering(config: TrainConfig) -> None:
    """Check that the trained model can be registered where the recipe says so.

    Raises:
        UserError: the tracker has no registry.
    """
    names = names_of_trackers(config.record.tracker)
    if config.record.registered_model is not None and not any(map(has_registry, names)):
        raise UserError(
            f"record.registered_model has no effect: no registry of models is in {', '.join(names)}",
            f"remove it, or use one that has: {', '.join(filter(has_registry, TRACKERS))}",
        )
