"""What is complete of a generation is learnt from while the rest is generated, by the ranks that generate.

Invariants: the gradient's sum and the responses are to the last bit those of one after the other; nothing begins before
what is carried out beside the generation has ended; what fails there is told.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.ranks import reshard, update  # noqa: F401 - they say which commands begin when
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.serve import PendingThread, Serving
from tests.engines.ranks.serving.test_serve import SHAPE, Asking, FolderOf, _asked, _rows
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import Ranks

PORTIONS = ([4, 1], [0, 5], [3], [2])
RATE = 0.2
CPU = torch.device("cpu")


def _sections(beside: bool) -> dict[str, Any]:
    rollout = {"prompts": 8, "samples": 4, "max_response_tokens": 400, "max_sequences": 128}
    if beside:
        rollout["stream"] = {"portions": 4}
    return {"rollout": rollout, "algorithm": {"name": "grpo", "mini_batches": 1}}


def _portion(path: str, number: int) -> dict[str, Any]:
    split = {**SPLIT, "micro_batch_tokens": 48, "aggregation": "token-mean"}
    ends = {"first": number == 0, "last": number == len(PORTIONS) - 1}
    return {"path": path, "version": 0, "split": split, "loss": LOSS, "groups": PORTIONS[number], **ends}


def _step(rank: Ranks) -> dict[str, float]:
    limit = SPLIT["max_response_tokens"]
    figures: dict[str, float]
    (figures,) = rank.ask("step_actor", aggregation="token-mean", max_response_tokens=limit, learning_rate=RATE)
    return figures


@pytest.mark.parametrize("beside", [True, False])
def test_a_gradient_is_summed_while_a_generation_goes_on(
    beside: bool, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """All portions have ended before it. Control: by a recipe that learns from whole batches they wait for its end."""
    folder, asked = folder_of(SHAPE), _asked(folder_of(SHAPE), max_tokens=400, temperature=1.0, samples=16)
    path = write_rows(tmp_path / "rows.parquet", random_rows(12, samples=2))
    one_rank.build(folder, ("actor", "rollout"), **_sections(beside))
    one_rank.ask("reshard", version=0)
    asking, before = Asking(one_rank), one_rank.parameters()
    generation = asking.begin("generate", **asked)
    sums = [asking.begin("sum_gradient", **_portion(path, number)) for number in range(len(PORTIONS))]
    asking.replies(sums[0])
    assert generation.answered != beside
    for call in sums[1:]:
        asking.replies(call)
    (generated,) = asking.replies(generation)
    figures, found = _step(one_rank), one_rank.parameters()
    assert any(not torch.equal(value, before[name]) for name, value in found.items())

    one_rank.build(folder, ("actor", "rollout"), **_sections(beside))
    one_rank.ask("reshard", version=0)
    (alone,) = one_rank.ask("generate", **asked)
    assert _rows(generated) == _rows(alone)
    np.testing.assert_array_equal(generated.truncated_B, alone.truncated_B)
    for number in range(len(PORTIONS)):
        one_rank.ask("sum_gradient", **_portion(path, number))
    assert _step(one_rank) == figures
    assert all(torch.equal(value, found[name]) for name, value in one_rank.parameters().items())


def test_nothing_begins_before_what_is_beside_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another portion nor what may begin at any time. What failed there ends the step that finds it."""
    config = TrainConfig.model_validate({**_sections(beside=True)})
    serving, go = Serving(RankModels(0, 1, CPU, config=config)), threading.Event()
    monkeypatch.setattr(Serving, "_generator", _Idle())
    assert serving.admitted(["reshard", "export", "reshard"]) == 1
    assert serving.admitted(["reshard", "sum_gradient", "sum_gradient", "reshard"]) == 2
    pending = serving.begin_beside(lambda: {"ended": go.wait(60)})
    assert serving.admitted(["reshard"]) == 0
    serving.step()
    assert pending.result is None
    go.set()
    pending.wait(60)
    serving.step()
    assert pending.result == {"ended": True} and serving.admitted(["reshard"]) == 1

    def fails() -> dict[str, Any]:
        raise UserError("no space", "make some")

    failing = serving.begin_beside(fails)
    failing.wait(60)
    with pytest.raises(UserError, match="no space"):
        serving.step()


class _Idle:
    """A rollout engine of one rank whose generation has ended; what is beside it goes on."""

    class loop:  # noqa: N801 - an attribute of the engine
        busy = False

    class place:  # noqa: N801
        ranks_per_engine = 1


def test_figures_of_what_is_beside_are_its_own() -> None:
    """Of two threads each adds to what its own command did. Control: one thread's second command adds to the first."""
    models = RankModels(0, 1, CPU)
    models.newest.usage = here = {"tokens": 1.0}
    there: dict[str, float] = {}

    def carry_out() -> dict[str, Any]:
        models.newest.usage = there
        models.use({"tokens": 5.0})
        return {}

    PendingThread(Serving(models), carry_out, CPU).wait(60)
    models.use({"tokens": 2.0})
    assert (here, there) == ({"tokens": 3.0}, {"tokens": 5.0})
