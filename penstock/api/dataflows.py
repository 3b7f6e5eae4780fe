"""Dataflows that a recipe may name: `dataflow: penstock.api.dataflows:sampled`."""

from __future__ import annotations

from penstock.flows.parts.own_steps import Iteration


def sampled(step: Iteration) -> None:
    """Sample and score responses, and learn nothing: what `penstock select` takes the best of."""
    step.rollout()
    step.reward()
