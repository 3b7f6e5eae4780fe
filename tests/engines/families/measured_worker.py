"""The worker of `penstock bench families` that lets go of its model when it is told to, for many families in turn."""

from __future__ import annotations

from penstock.benchmarks.ranks.family_rank import FamilyRank
from tests.engines.inspected_worker import InspectedWorker


class MeasuredWorker(InspectedWorker, FamilyRank):
    """Both: the commands of the benchmark, and inspections."""
