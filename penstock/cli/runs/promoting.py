"""`penstock promote`: a version of a registered model becomes `best` by the rule of a retraining, and not otherwise."""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.session.registry.judgement import Judgement, judge_and_promote
from penstock.trackers.registry import best_of, find, reference
from penstock.trackers.table import registry_in


def promoted(text: str, folder: Path) -> Judgement:
    """Judge a version beside the one that is best, and let it be best if it is better.

    Args:
        folder: directory of the run folders.

    Raises:
        UserError: there is no such version, or the two cannot be compared.
    """
    if (wanted := reference(text)) is None:
        raise UserError(f"'{text}' names no version of a model", "write models:/NAME/3 or models:/NAME@latest")
    registry = registry_in(folder)
    version = find(registry, wanted)
    return judge_and_promote(registry, version, best_of(registry, version.name))
