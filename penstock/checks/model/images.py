"""Checks of models that see images: they have some to see, and what makes these ready."""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.engines.families.images import sees
from penstock.engines.families.shape import read_settings


def check_sight(folder: Path, column: str | None) -> None:
    """Check that a model sees images exactly if rows have some, in a `column`.

    Raises:
        UserError: it does not, or its folder lacks what makes images ready.
    """
    able = sees(read_settings(folder))
    if column is not None and not able:
        raise UserError(
            f"data has images (column '{column}'), and the model in {folder} sees none that Penstock knows",
            "use a model of a family with images: docs/models.md, Images",
        )
    if column is None and able:
        raise UserError(
            f"the model in {folder} sees images, and the rows have none", "name their column with data.images"
        )
    if able and not (folder / "preprocessor_config.json").is_file():
        raise UserError(
            f"{folder} has no preprocessor_config.json, which says how images become pixels",
            "copy it from the original",
        )


def refuse_sight(path: str | None, why: str) -> None:
    """Refuse a model folder with an encoder of images where it would have nothing to see.

    Raises:
        UserError: it has one.
    """
    if path is not None and (Path(path) / "config.json").is_file() and sees(read_settings(Path(path))):
        raise UserError(f"the model in {path} sees images, and {why}", "use a model of text")
