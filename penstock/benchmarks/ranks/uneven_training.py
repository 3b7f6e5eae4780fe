"""The command line of Penstock, with ranks whose responses are uneven (uneven_rank.py) in place of the engines' own."""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

from penstock.engines.groups.spec import GroupSpec
from penstock.session import session

_place = session.place


def _place_uneven(*arguments: Any) -> list[GroupSpec]:
    return [replace(spec, worker="penstock.benchmarks.ranks.uneven_rank:UnevenWorker") for spec in _place(*arguments)]


if __name__ == "__main__":
    setattr(session, "place", _place_uneven)  # noqa: B010 - a type checker knows it as a function
    runpy.run_module("penstock.cli.main", run_name="__main__")
