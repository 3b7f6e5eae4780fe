"""What each GPU and the host would need for a recipe and a model, phase by phase: no GPU, no weights.

It is the estimate by which a training is started or refused (penstock/engines/sizing/memory.py), for GPUs that are not
here. Left out: groups of several kinds, each of which has an estimate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.engines.families.shape import ModelShape
from penstock.engines.sizing.memory import (
    GIB,
    Rank,
    choose_recomputed,
    decide_sleep,
    folder_bytes,
    offloaded_bytes,
    rank_phases,
    slot_bytes,
)

BFLOAT16 = 2  # bytes
# GiB that a card of 80 and of 141 GB has free, and which a rank may take.
CARDS: Mapping[str, float] = {"80 GB": 78.0, "141 GB": 139.0}


def measure(config: TrainConfig, shape: ModelShape, gpus: int, command: str) -> BenchResult:
    """Return what each GPU needs in every phase, a row for each, and the host in all.

    Args:
        gpus: of the one group that holds all roles.

    Raises:
        UserError: a role is in a group of its own.
    """
    if len(config.groups) > 1:
        raise UserError("the recipe has several groups", "name one that has all roles in one: its GPUs are estimated")
    roles: dict[Role, ModelShape] = dict.fromkeys(config.roles, shape)
    rank = Rank(roles, gpus, "cuda", BFLOAT16, ranks_on_host=gpus)
    rows = [row for card, free in CARDS.items() for row in _rows(config, rank, card, free)]
    host = gpus * offloaded_bytes(config, rank) / GIB
    figures = {
        "parameters": float(shape.parameters),
        "host_gib": round(host, 1),
        "files_gib": round(gpus * sum(folder_bytes(config, rank).values()) / GIB, 1),
        "host_load_gib": round(gpus * BFLOAT16 * shape.parameters / GIB, 1),
        "snapshots_gib": round(gpus * slot_bytes(config, rank, gpus) / GIB, 1),
        **{f"needs_gib_of_{card.split()[0]}": max(row["GiB"] for row in rows if row["card"] == card) for card in CARDS},
    }
    settings = {"gpus": gpus, "cards": dict(CARDS), "recipe": config.model_dump(mode="json", include={"actor"})}
    return new_result("sizes", command, figures, settings=settings, details=rows)


def _rows(config: TrainConfig, rank: Rank, card: str, free: float) -> list[dict[str, Any]]:
    rank = replace(rank, free=int(free * GIB))
    recomputed = choose_recomputed(config, rank, rank.free)
    decided = decide_sleep(config, rank, recomputed, rank.free)
    rows = []
    for phase, parts in rank_phases(decided, rank, recomputed).items():
        needed = sum(parts.values()) / GIB
        named = sorted(((size, part) for part, size in parts.items() if size >= 0.05 * GIB), reverse=True)
        described = ", ".join(f"{part} {size / GIB:.1f}" for size, part in named)
        fits = "yes" if needed <= free else "no"
        rows.append({"card": card, "phase": phase, "GiB": round(needed, 1), "fits": fits, "parts": described})
    return rows
