"""ZeRO-3 within machines and over them (hpZ): the same steps, bit for bit, from weights that are nearer.

Two hosts of two ranks each, on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engines.groups.group import EngineGroup, GroupSpec, RankDevice
from tests.engines.groups.test_hosts import NAMES, two_hosts
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import STEADY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = Shape("qwen3", tied=True, intermediate=1024)  # DeepSpeed shards nothing below 100,000 elements at stage 3
STEPS = 3
Parameters = dict[str, torch.Tensor]
WORKER = "tests.engines.inspected_worker:InspectedWorker"


def _trained(
    ranks: Ranks, folder: Path, rows: str, hpz: bool, saved: Path | None = None
) -> tuple[Parameters, list[Any], list[Any]]:
    """Take the steps; return the weights, the figures, and what ranks held beside their share in each.

    Args:
        saved: where the state is saved before the last step, which a model that is made anew takes.
    """
    actor = {"zero_stage": 3, "hpz": hpz, "optimizer": STEADY}
    step = {"path": rows, "version": -1, "split": {**SPLIT, "micro_batch_tokens": 40}, "loss": LOSS}
    ranks.build(folder, actor=actor)
    ranks.ask("host_shards", role="actor")
    figures = [ranks.ask("update_actor", **step, learning_rate=0.2)[0] for _ in range(STEPS - 1)]
    beside = ranks.ask("host_shards", role="actor")
    if saved is not None:
        saved.mkdir()
        ranks.ask("save", folder=str(saved))
        ranks.build(folder, actor=actor)
        ranks.ask("load", folder=str(saved), version=0)
    figures.append(ranks.ask("update_actor", **step, learning_rate=0.2)[0])
    return ranks.parameters(), figures, beside


def test_weights_that_a_machine_holds_once_more_train_alike(folder_of: Callable[[Shape], Path], tmp_path: Path) -> None:
    """Figures and weights, also from a saved state on; each rank holds half of them. Control: without it none."""
    rows = write_rows(tmp_path / "rows.parquet", random_rows(8, samples=2))
    devices = tuple(RankDevice(None, name) for name in NAMES for _ in range(2))
    limits = {"start_timeout_s": 300.0, "command_timeout_s": 200.0, "heartbeat_timeout_s": 100.0}
    spec = GroupSpec(name="main", roles=("actor",), devices=devices, log_dir=tmp_path, worker=WORKER, **limits)  # type: ignore[arg-type]
    with two_hosts(tmp_path) as (hosts, _), EngineGroup(spec, hosts) as group:
        ranks = Ranks(group, len(devices))
        plain, figures, none = _trained(ranks, folder_of(SHAPE), rows, hpz=False)
        nearer, same_figures, beside = _trained(ranks, folder_of(SHAPE), rows, True, tmp_path / "saved")
        again, _, none_again = _trained(ranks, folder_of(SHAPE), rows, hpz=False)
    assert all(torch.equal(plain[name], nearer[name]) and torch.equal(plain[name], again[name]) for name in plain)
    assert figures == same_figures
    assert [held["beside"] for held in (*none, *none_again)] == [[0, 0]] * 8
    for held in beside:
        assert all(held["all"] / 4 < many <= held["all"] / 2 + 1000 for many in held["beside"])
    assert len({step["grad_norm"] for step in figures}) == len(figures) == STEPS
