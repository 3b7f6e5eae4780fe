"""Imports without garbage collection and without libraries that nobody needs; both are there again afterwards."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import pytest

from penstock.base.importing import importing


def test_a_library_is_not_found_until_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: one that is imported already stays, and the hidden one is found later, also after a failure."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ModuleNotFoundError, match="colorsys"), importing(["colorsys", "json"]):
        assert import_module("json").loads("1") == 1
        import_module("colorsys")
    assert import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_the_collector_rests_meanwhile() -> None:
    """Control: where it rested before, it goes on to rest."""
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
