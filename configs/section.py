"""What every section of the configuration shares: its base, common types, how settings are refused or filled in."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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
