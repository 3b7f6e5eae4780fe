"""A guess at what a misspelt name meant is near, or there is none."""

from __future__ import annotations

import pytest

from penstock.base.names import nearest_name


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [
        ("promt", ["answer", "prompt"], "prompt"),
        ("lr", ["lora", "learning_rate"], ""),
        ("x", ["_id", "", "__"], ""),
        ("id", ["_id", ""], "_id"),
        ("prompt", [], ""),
    ],
)
def test_a_near_name_is_meant(name: str, names: list[str], meant: str) -> None:
    """Columns and experiments have any name, also an empty one. Controls: nothing is near."""
    assert nearest_name(name, names) == meant
