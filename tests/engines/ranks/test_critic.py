"""Critics of several agents: each values and learns its own rows alone, and a checkpoint holds them all.

Two ranks, so that an agent's rows lie on one rank, on the other, on both, or on none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import Rows
from penstock.state.experience import AGENT, add_columns
from tests.engines.rows import SPLIT, gathered, random_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape

FolderOf = Callable[[Shape], Path]
SHAPE = Shape("qwen3", tied=False)
BOTH = ["left", "right"]
AGENTS_B = np.array([0, 0, 1, 1, 0, 0, 1, 1])  # by prompt, of which each has two rows
PLAN: dict[str, Any] = {**SPLIT, "mini_batches": 2, "epochs": 2, "micro_batch_tokens": 60}
UPDATE: dict[str, Any] = {"split": PLAN, "clip": 0.2, "learning_rate": 1e-2}


def build(ranks: Ranks, folder: Path, agents: list[str]) -> None:
    """Start critics anew: one each for `agents`, the one of ppo without any."""
    sections = {"algorithm": {"name": "ppo"}}
    if agents:
        sections = {"algorithm": {"name": "ippo"}, "data": {"agents": {"column": "role", "names": agents}}}
    ranks.build(folder, ("critic",), **sections, critic={"zero_stage": 1})


def rows_of_two(change: float = 0.0) -> Rows:
    """Rows with values and returns; `change` is added to the returns of the second agent."""
    rows = random_rows(8, samples=2)
    noise_T = np.random.default_rng(3).normal(size=len(rows.responses.values_T))
    rows = with_columns(rows, {"values": 0.1 * noise_T})
    own_T = np.repeat(AGENTS_B == 1, rows.responses.lengths_B)
    returns_T = (rows.columns["returns"].values_T + change * own_T).astype(np.float32)
    return replace(rows, columns={**rows.columns, "returns": Ragged(returns_T, rows.responses.offsets_B1)})


def write(path: Path, rows: Rows, agents_B: np.ndarray) -> str:
    """Write the experience with the column of agents."""
    write_rows(path, rows)
    add_columns(path, {AGENT: agents_B})
    return str(path)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether all parameters are bit by bit the same."""
    return all(torch.equal(first[name], second[name]) for name in first)


def test_one_agent_is_ppo_bit_by_bit(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """The same steps, figures, values and weights as those of the one critic."""
    path = write(tmp_path / "rows.parquet", rows_of_two(), np.zeros(8, np.int64))
    found = []
    for agents in ([], ["only"]):
        build(two_ranks, folder_of(SHAPE), agents)
        reply = two_ranks.ask("update_critic", path=path, agents=agents, **UPDATE)[0]
        values_T = gathered(rows_of_two(), two_ranks.ask("values", path=path, budget=60, agents=agents))
        found.append((reply, values_T, two_ranks.parameters("critic/only" if agents else "critic")))
    (ppo, values_T, parameters), (ippo, own_values_T, own_parameters) = found
    assert ppo["steps"] == 4
    assert ippo == {**ppo, **{f"critic/only/{name}": value for name, value in ppo.items()}}
    np.testing.assert_array_equal(own_values_T, values_T)
    assert np.abs(values_T).max() > 0
    assert equal(own_parameters, parameters)


def test_a_critic_sees_its_own_rows_alone(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Other returns of one agent leave the other's critic, bit by bit, what it was; its own is another."""
    rows, critics = rows_of_two(), {}
    for change in (0.0, 3.0):
        path = write(tmp_path / f"{change}.parquet", rows_of_two(change), AGENTS_B)
        build(two_ranks, folder_of(SHAPE), BOTH)
        start = two_ranks.parameters("critic/left")
        reply = two_ranks.ask("update_critic", path=path, agents=BOTH, **UPDATE)[0]
        critics[change] = [two_ranks.parameters(f"critic/{agent}") for agent in BOTH]
        assert not equal(critics[change][0], start)
        assert reply["loss"] == pytest.approx((reply["critic/left/loss"] + reply["critic/right/loss"]) / 2)
    assert equal(critics[0.0][0], critics[3.0][0])
    assert not equal(critics[0.0][1], critics[3.0][1])

    # Each row has the value of its own agent's critic: what one critic alone says of all rows.
    values_T = gathered(rows, two_ranks.ask("values", path=path, budget=60, agents=BOTH))
    own_T = np.repeat(AGENTS_B == 0, rows.responses.lengths_B)
    for number, agents in enumerate((["left", "nobody"], ["nobody", "right"])):
        alone = write(tmp_path / f"alone-{number}.parquet", rows, np.full(8, number))
        whole_T = gathered(rows, two_ranks.ask("values", path=alone, budget=10_000, agents=agents))
        mine_T = own_T == (number == 0)
        np.testing.assert_allclose(values_T[mine_T], whole_T[mine_T], rtol=1e-5, atol=1e-6)
        assert not np.allclose(values_T[~mine_T], whole_T[~mine_T], atol=1e-3)


def test_skipped_steps_of_several_critics_are_counted(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Each critic's add up; a mean would halve them. Control: a loss is a mean still, in the test above."""
    rows = rows_of_two()
    rows = with_columns(rows, {"returns": np.full(len(rows.responses.values_T), np.nan)})
    build(two_ranks, folder_of(SHAPE), BOTH)
    split = {**UPDATE["split"], "mini_batches": 1, "epochs": 1}
    path = write(tmp_path / "odd.parquet", rows, AGENTS_B)
    reply = two_ranks.ask("update_critic", path=path, agents=BOTH, **UPDATE | {"split": split})[0]
    assert (reply["critic/left/skipped_steps"], reply["critic/right/skipped_steps"], reply["skipped_steps"]) == (
        1.0,
        1.0,
        2.0,
    )


def test_a_resumed_run_has_every_critic(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Also of an agent that had no row: its critic takes no step. After loading, a step is bit by bit the same step."""
    path = write(tmp_path / "rows.parquet", rows_of_two(), AGENTS_B)
    nobody = write(tmp_path / "left.parquet", rows_of_two(), np.zeros(8, np.int64))
    build(two_ranks, folder_of(SHAPE), BOTH)
    before = two_ranks.parameters("critic/right")
    reply = two_ranks.ask("update_critic", path=nobody, agents=BOTH, **UPDATE)[0]
    assert not any(name.startswith("critic/right/") for name in reply)
    assert equal(two_ranks.parameters("critic/right"), before)

    two_ranks.ask("update_critic", path=path, agents=BOTH, **UPDATE)
    (tmp_path / "saved").mkdir()
    two_ranks.ask("save", folder=str(tmp_path / "saved"))
    two_ranks.ask("update_critic", path=path, agents=BOTH, **UPDATE)
    went_on = [two_ranks.parameters(f"critic/{agent}") for agent in BOTH]
    build(two_ranks, folder_of(SHAPE), BOTH)
    two_ranks.ask("load", folder=str(tmp_path / "saved"), version=0)
    two_ranks.ask("update_critic", path=path, agents=BOTH, **UPDATE)
    resumed = [two_ranks.parameters(f"critic/{agent}") for agent in BOTH]
    assert equal(went_on[0], resumed[0])
    assert equal(went_on[1], resumed[1])
    assert not equal(resumed[0], resumed[1])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_query_key_and_value_of_a_critic_lie_side_by_side(stage: int, one_rank: Ranks, folder_of: FolderOf) -> None:
    """Also with biases, which follow each matrix in the model: as one matrix they are one product."""
    folder = folder_of(Shape("qwen2", tied=True))
    one_rank.build(folder, ("critic",), algorithm={"name": "ppo"}, critic={"zero_stage": stage})
    assert one_rank.ask("adjacent", role="critic") == [{"all": 2, "joint": 2}]


def test_a_checkpoint_of_another_model_is_refused(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """By the name of a parameter that it lacks. Controls: its own is restored, and one without images is refused."""
    folder, section = folder_of(Shape("qwen2", tied=True)), {"algorithm": {"name": "ppo"}, "critic": {"zero_stage": 1}}
    one_rank.build(folder, ("critic",), **section)
    one_rank.ask("save", folder=str(tmp_path))
    load = {"of": "load", "arguments": {"folder": str(tmp_path), "version": 0}}
    assert one_rank.ask("refusal", **load) == [{"error": ""}]
    one_rank.build(folder_of(SHAPE), ("critic",), **section)
    assert "does not fit the model: backbone.layers.0." in one_rank.ask("refusal", **load)[0]["error"]
    (image,) = tmp_path.glob("state-*.safetensors")
    image.unlink()
    assert "holds no trained state of 'critic'" in one_rank.ask("refusal", **load)[0]["error"]
