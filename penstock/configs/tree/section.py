"""What every section of the configuration shares: its base, common types, how settings are refused or filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.configs.tree.annotations import without_idle_nulls
from penstock.configs.tree.recipes import compose

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Recipe(Section):
    """Base of every whole tree: it may name recipe files, so that a part of a tree can be a flow's parameter."""

    base: str | list[str] | None = Field(None, description="recipe files whose values fill what is not given here")

    @model_validator(mode="before")
    @classmethod
    def _over_base(cls, values: Any) -> Any:
        """Lay the given values over the recipes in `base`; a null takes back what those gave."""
        return without_idle_nulls(compose(values, Path.cwd()), cls) if isinstance(values, dict) else values


def refuse(section: BaseModel, names: tuple[str, ...], why: str) -> None:
    """Refuse the fields that are set although they would change nothing.

    Raises:
        ValueError: one of them is not None.
    """
    for name in names:
        if getattr(section, name) is not None:
            raise ValueError(f"'{name}' has no effect {why}: remove it")


def fill(section: BaseModel, **defaults: Any) -> None:
    """Set the fields still at None (the section is frozen for everyone else)."""
    for name, value in defaults.items():
        if getattr(section, name) is None:
            object.__setattr__(section, name, value)
