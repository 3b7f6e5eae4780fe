"""The picture of a placement: which rank is on which device of which host, what it needs, and what is free there; and
what a run would gain if nobody waited.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import write_family
from penstock.checks import memory
from penstock.checks.memory import NOWHERE, Elsewhere
from penstock.cli.dry_run import describe_actor, describe_together, describe_waiting, print_placement
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.hosts import GpuFacts, HostFacts
from penstock.engines.sizing.memory import GIB
from penstock.session import opening
from penstock.session.machines import claims
from penstock.session.opening import TRAIN, foreseen

Drawn = Callable[..., list[list[str]]]
GRPO: dict[str, Any] = {"model": {"tiny": {"max_positions": 1024}}}
PPO = GRPO | {"algorithm": {"name": "ppo", "kl": {}}}
WIDTH = 80


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Draw a training on a machine with so many GPUs; return the cells of each line, which all fit."""

    def draw(groups: dict[str, Any], gpus: int, elsewhere: Elsewhere = NOWHERE, tree: Any = PPO) -> list[list[str]]:
        monkeypatch.setattr(memory, "visible_gpus", lambda: list(range(gpus)))
        monkeypatch.setattr(memory, "free_gpu_bytes", lambda index: (70 + index) * GIB)
        monkeypatch.setattr(memory, "free_host_bytes", lambda: 8 * GIB)
        monkeypatch.setattr(memory, "has_gated_mlp", lambda index: False)
        told = io.StringIO()
        config = TrainConfig.model_validate({**tree, "groups": groups})
        print_placement(memory.estimate_groups(config, elsewhere=elsewhere), Console(file=told, width=WIDTH))
        lines = told.getvalue().splitlines()
        assert max(map(len, lines)) <= WIDTH
        return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines]

    return draw


def places(lines: list[list[str]]) -> list[list[str]]:
    """Return host, device, rank, roles and what is free, of each rank; what it needs is above nothing and not huge."""
    ranks = [line for line in lines if len(line) == 6]
    whole = [line for line in ranks if line[1]]
    for line in whole:
        assert 0.5 < float(line[4]) < 8
    for more in (line for line in ranks if not line[1]):  # roles that go on in a second line
        before = whole[[line[2] for line in whole].index(_above(ranks, more))]
        before[3] += f" {more[3]}"
    return [[*line[:4], line[5]] for line in whole]


def _above(ranks: list[list[str]], line: list[str]) -> str:
    at = next(index for index, other in enumerate(ranks) if other is line)
    return next(other[2] for other in reversed(ranks[:at]) if other[1])


def test_one_machine(drawn: Drawn) -> None:
    """Every GPU with its own free memory; CPU ranks with their share of the machine's."""
    assert places(drawn({}, 2)) == [
        ["this machine", "GPU 0", "main 0", "actor, critic, reference, rollout", "70.00"],
        ["", "GPU 1", "main 1", "actor, critic, reference, rollout", "71.00"],
    ]
    assert places(drawn({"main": {"ranks": 2, "roles": ["actor", "rollout"]}}, 0, tree=GRPO)) == [
        ["this machine", "CPU", "main 0", "actor, rollout", "4.00"],
        ["", "CPU", "main 1", "actor, rollout", "4.00"],
    ]


def test_which_gpus_it_would_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others than a training that goes on has; those, empty again, where it would wait. Control: nobody has any."""
    monkeypatch.setenv(claims.FOLDER, str(tmp_path / "claims"))
    monkeypatch.setattr(claims, "gpu_uuid", lambda index: f"GPU-{index}")
    for module in (claims, memory, opening):
        monkeypatch.setattr(module, "visible_gpus", lambda: [0, 1])
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda index: GIB if index == 0 else 70 * GIB)
    monkeypatch.setattr(memory, "gpu_bytes", lambda index: 80 * GIB)
    monkeypatch.setattr(memory, "has_gated_mlp", lambda index: False)

    short = PPO | {"rollout": {"max_response_tokens": 256}}

    def seen(ranks: int) -> tuple[str, list[tuple[int | None, int]]]:
        group = {"ranks": ranks, "roles": ["actor", "rollout", "critic", "reference"]}
        (estimate,), text = foreseen(TRAIN, TrainConfig.model_validate({**short, "groups": {"main": group}}))
        gpus = [device.gpu for device in estimate.devices]
        return text, list(zip(gpus, [(free or 0) // GIB for free in estimate.free], strict=True))

    with claims.claimed(claims.Wanted((0,)), "sums"):
        has = f"(sums (process {os.getpid()}) has GPU 0)"
        assert seen(1) == (f"GPUs: 1 of this machine, free now {has}", [(1, 70)])
        assert seen(2) == (f"GPUs: it would wait for 2 GPUs {has}", [(0, 80), (1, 70)])
        with pytest.raises(UserError, match="asks for 3 GPUs, and of 2 visible ones 2 are left"):  # it would never get
            seen(3)
    with pytest.raises(UserError, match="GPU 0"):  # of whom nobody knows whose its memory is
        seen(1)


def test_a_group_that_comes_and_goes_is_called_so(drawn: Drawn) -> None:
    """Control: the one that stays is not."""
    one = {"ranks": 1, "roles": ["rollout"]}
    groups = {"learning": {"ranks": 1, "roles": ["actor"]}, "staying": one, "spare": {**one, "elastic": True}}
    found = [line[2:4] for line in places(drawn(groups, 0, tree=GRPO))]
    assert found[1:] == [["staying 0", "rollout"], ["spare 0", "rollout (elastic)"]]


def test_a_split_placement(drawn: Drawn) -> None:
    """GPU by GPU, whatever the order of the groups and of their GPUs."""
    groups = {
        "generate": {"gpus": [3, 2], "roles": ["rollout"]},
        "train": {"gpus": [0], "roles": ["actor"]},
        "judge": {"gpus": [1], "roles": ["reference", "critic"]},
    }
    assert places(drawn(groups, 4)) == [
        ["this machine", "GPU 0", "train 0", "actor", "70.00"],
        ["", "GPU 1", "judge 0", "critic, reference", "71.00"],
        ["", "GPU 2", "generate 1", "rollout", "72.00"],
        ["", "GPU 3", "generate 0", "rollout", "73.00"],
    ]


def test_machines_of_a_pool_and_hosts_that_join(drawn: Drawn) -> None:
    """Host by host, with groups that share one; of hosts that have not joined it says that nothing is known."""
    groups = {
        "train": {"pool": "h200", "hosts": 2, "gpus": [0], "roles": ["actor"]},
        "critic": {"pool": "h200", "gpus": [1], "roles": ["critic"]},
        "generate": {"hosts": 1, "ranks": 1, "roles": ["rollout"]},
        "judge": {"roles": ["reference"], "gpus": [0]},
    }
    lines = drawn(groups, 1, Elsewhere(pools={"h200": 2}))
    assert places(lines) == [
        ["h200/0", "GPU 0", "train 0", "actor", "?"],
        ["", "GPU 1", "critic 0", "critic", "?"],
        ["h200/1", "GPU 0", "train 1", "actor", "?"],
        ["hosts/0", "CPU", "generate 0", "rollout", "?"],
        ["this machine", "GPU 0", "judge 0", "reference", "70.00"],
    ]
    said = "of a host that has not joined nothing is known yet"
    assert any(said in line[0] for line in lines)
    assert not any(said in line[0] for line in drawn({}, 1))


def test_what_hosts_that_have_joined_have(drawn: Drawn) -> None:
    """Control: the same without them."""
    gpu = GpuFacts("H200", "GPU-1", 100 * GIB, False)
    facts = HostFacts("node-1", "eth0", "10.0.0.1", 8, 64 * GIB, GIB, [gpu], {}, 0.0)
    groups = {"main": {"pool": "h200", "hosts": 2, "gpus": [0], "roles": ["actor", "rollout"]}}
    for hosts, free in (({"h200/0": facts, "h200/1": facts}, "100.00"), ({}, "?")):
        drawing = places(drawn(groups, 0, Elsewhere(hosts=hosts), tree=GRPO))
        assert [(line[0], line[-1]) for line in drawing] == [("h200/0", free), ("h200/1", free)]


def test_what_the_memory_is_for(drawn: Drawn) -> None:
    """The parts of each group's fullest phase, and what its backward pass computes again."""
    groups = {
        "train": {"ranks": 1, "roles": ["actor", "critic"]},
        "generate": {"ranks": 1, "roles": ["rollout", "reference"]},
    }
    told = drawn(groups, 0)
    rows = [line for line in told if len(line) == 4]
    assert [line[0] for line in rows if line[0]] == ["train", "generate"]
    words = " ".join(" ".join(line) for line in rows)
    for text in ("update of the", "1.20 libraries", "actor: nothing", "critic: nothing", "activations"):
        assert text in words, text


def test_which_models_have_several_ranks_for_a_micro_batch() -> None:
    """With the tokens of each. Control: of a recipe that says nothing there is nothing to say."""
    assert describe_together(TrainConfig()) == []
    actor = {"sequence_parallel": 3, "micro_batch_tokens": {0: 1000, 9: 8000}}
    tree = {"algorithm": {"name": "ppo"}, "actor": actor}
    (said,) = describe_together(TrainConfig.model_validate(tree))
    assert said == "actor: 3 ranks compute each micro-batch together, 2,667 of 8,000 tokens each"


def test_what_a_run_would_gain_if_nobody_waited() -> None:
    """By its last five iterations. Controls: too few, figures that do not tell, and a run in which nobody waits."""
    row = {"time/iteration_s": 50.0, "rollout/prompt_s_max": 33.0, "rollout/prompt_s_p80": 8.0}
    row["time/update_actor_s"] = 15.0
    slow = row | {"rollout/prompt_s_p80": 33.0}
    (said,) = describe_waiting([slow] * 9 + [row] * 3 + [slow] * 2)
    assert "rollout.tail={extra: 0.25} would make an iteration 1.67 times as fast" in said
    assert "rollout.carry={extra: 0.25, staleness: 2} 1.79 times" in said
    assert "stream" not in said
    (said,) = describe_waiting([row | {"rollout/prompt_s_max": 1.0, "rollout/prompt_s_p80": 0.9}] * 5)
    assert said.endswith("nothing would be gained by not waiting for the longest responses")
    (said,) = describe_waiting([row] * 5, apart=True)
    assert said.endswith("rollout.stream={} 1.32 times, rollout.stream={staleness: 1} 1.52 times")
    for taken in ("portion_wait_s", "batch_wait_s"):
        assert not describe_waiting([row | {f"rollout/{taken}": 1.0}] * 5, apart=True)
    assert not describe_waiting([row] * 4)
    assert not describe_waiting([{"time/iteration_s": 50.0}] * 5)
    assert not describe_waiting([row | {"rollout/deferred": 3.0}] * 5)


def test_the_actor_is_told_by_what_it_is_served(tmp_path: Path) -> None:
    """Control: of a tiny model that the run makes there is nothing to tell."""
    tree = {"model": {"path": str(write_family("OLMo 2", tmp_path))}}
    model, training, rollout = describe_actor(TrainConfig.model_validate(tree))
    assert model.startswith("model: Olmo2ForCausalLM (olmo2): ") and training.startswith("training: packed rows")
    assert rollout.startswith("rollout: served as vLLM builds it from the Transformers library's class")
    assert describe_actor(TrainConfig.model_validate(GRPO)) == []
