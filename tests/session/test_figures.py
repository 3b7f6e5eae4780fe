"""What the utilisation figures say, from commands' usage and tasks' seconds worked out by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.configs.schema import TrainConfig
from penstock.engines.commands.update import ActorLoss, Split, SumGradient
from penstock.engines.groups.spec import RankDevice
from penstock.engines.sizing.flops import peak_flops
from penstock.session import figures as module
from penstock.session.clock import Lap, Span
from penstock.session.figures import (
    memory,
    parallel_efficiency,
    role_figures,
    shares,
    speed,
    throughput,
    utilisation,
)
from penstock.session.session import Training
from tests.echo import Echo

H200 = ("NVIDIA H200", "bfloat16")
SERIAL = {"rollout": 5.0, "reward": 1.0, "advantage": 0.5, "reshard": 0.1}


def test_the_mfu_is_flops_over_what_all_gpus_could_have_done() -> None:
    """Two GPUs at 10 % of their peak for 4 seconds."""
    work = {"tokens": 8000.0, "flops": 0.1 * 2 * 4 * 989e12}
    assert peak_flops(*H200) == 989e12
    assert speed("actor", work, 4.0, 2, H200) == pytest.approx({"actor/mfu": 0.1, "actor/tokens_per_s_per_gpu": 1000.0})


def test_products_in_fp8_are_measured_by_its_own_peak() -> None:
    """Two thirds in FP8, of twice the peak: a GPU that never waits takes 2/3 of the time. Control: not counted so."""
    work = {"tokens": 1.0, "flops": 3 * 989e12}
    assert speed("actor", {**work, "fp8_flops": 2 * 989e12}, 2.0, 1, H200)["actor/mfu"] == pytest.approx(1.0)
    assert speed("actor", work, 2.0, 1, H200)["actor/mfu"] == pytest.approx(1.5)


def test_what_is_not_known_is_not_recorded() -> None:
    """No GPU, no peak, no count of FLOPs: then no MFU, rather than a wrong one."""
    work = {"tokens": 8000.0, "flops": 1e15}
    assert speed("actor", work, 4.0, 2, None) == {}
    assert "actor/mfu" not in speed("actor", work, 4.0, 2, ("NVIDIA H200", "float32"))
    assert "actor/mfu" not in speed("actor", work, 4.0, 2, ("Tesla V100-SXM2-32GB", "bfloat16"))
    assert "actor/mfu" not in speed("actor", {"tokens": 8000.0}, 4.0, 2, H200)


def lap_of(seconds: float, *side_by_side: dict[str, float]) -> Lap:
    """Return an iteration of tasks with these seconds: first the serial ones, then each group of others at once."""
    spans, now = [], 0.0
    for together in ({name: value} for name, value in SERIAL.items()):
        side_by_side = (*side_by_side, together)
    for together in side_by_side:
        spans += [Span(task, now, now + lasted) for task, lasted in together.items()]
        now += max(together.values())
    return Lap(0.0, seconds, spans)


def total(figures: dict[str, float]) -> float:
    return sum(value for name, value in figures.items() if name.startswith("share/"))


def test_shares_of_serial_tasks_and_the_rest_add_up_to_one() -> None:
    """The rest is what no task took: Prefect, the channel, the records."""
    result = shares(lap_of(10.0, {"update_actor": 3.0}), {}, 1)
    assert result["share/update_actor"] == pytest.approx(0.3)
    assert result["time/other_s"] == pytest.approx(0.4)
    assert result["share/other"] == pytest.approx(0.04)
    assert total(result) == pytest.approx(1.0)


def test_a_task_that_nobody_here_has_heard_of_has_its_share() -> None:
    """A user's own step of the iteration, twice in it. Control: without it its seconds are nobody's."""
    own = lap_of(10.0, {"paraphrase": 1.0}, {"update_actor": 1.0}, {"paraphrase": 1.0})
    result = shares(own, {}, 1)
    assert result["share/paraphrase"] == pytest.approx(0.2)
    assert result["time/other_s"] == pytest.approx(10 - 6.6 - 3)
    assert total(result) == pytest.approx(1.0)
    without = shares(lap_of(10.0, {"update_actor": 1.0}), {}, 1)
    assert without["time/other_s"] == pytest.approx(10 - 6.6 - 1)


def test_a_task_that_waits_for_another_in_its_group_is_not_charged_for_it() -> None:
    """Actor and critic on the same ranks: the actor's 4 seconds are 1 of waiting and 3 of work."""
    usage = {"1/update_critic": [{"seconds": 1.0}], "1/update_actor": [{"seconds": 2.9}, {"seconds": 3.0}]}
    result = shares(lap_of(11.0, {"update_critic": 1.0, "update_actor": 4.0}), usage, 1)
    assert result["share/update_actor"] == pytest.approx(3 / 11)
    assert result["share/update_critic"] == pytest.approx(1 / 11)
    assert result["time/other_s"] == pytest.approx(11 - 6.6 - 4)
    assert total(result) == pytest.approx(1.0)


def test_forward_passes_side_by_side_have_each_its_own_work() -> None:
    """Old log-probs, reference log-probs and values on one group, where the later ones wait for the earlier."""
    passes = {"logprobs_old": 1.0, "logprobs_reference": 2.0, "values": 3.0}
    usage = {f"7/{name}": [{"seconds": 1.0}] for name in passes}
    result = shares(lap_of(12.0, passes), usage, 7)
    assert [result[f"share/{name}"] for name in passes] == [pytest.approx(1 / 12)] * 3
    assert result["time/other_s"] == pytest.approx(12 - 6.6 - 3)


def test_steps_on_groups_of_their_own_overlap() -> None:
    """Actor 3 s and critic 2 s at the same time are 3 s of the iteration: the shares exceed 1 by the other 2."""
    usage = {"1/update_critic": [{"seconds": 2.0}], "1/update_actor": [{"seconds": 3.0}]}
    result = shares(lap_of(10.0, {"update_critic": 2.0, "update_actor": 3.0}), usage, 1)
    assert result["time/other_s"] == pytest.approx(10 - 6.6 - 3)
    assert total(result) == pytest.approx(1.2)


def test_portions_of_a_task_beside_a_long_one_add_up() -> None:
    """A rollout of 6 s, beside it two portions of an update, of 1 and 2 s: the update has 3, and the whole is 6."""
    spans = [Span("update_actor", 1.0, 2.0), Span("update_actor", 3.0, 5.0), Span("rollout", 0.0, 6.0)]
    result = shares(Lap(0.0, 8.0, spans), {}, 1)
    assert result["share/update_actor"] == pytest.approx(3 / 8)
    assert result["share/rollout"] == pytest.approx(6 / 8)
    assert result["time/other_s"] == pytest.approx(2.0)


def test_a_rollout_that_was_ahead_takes_nothing_of_the_iteration_before() -> None:
    """Of 8 s 5 are known: the rollout's last second, and 4 of an update. Control: one that began with the iteration."""
    for began, other in ((-5.0, 3.0), (0.0, 3.0)):
        spans = [Span("rollout", began, 1.0), Span("update_actor", 1.0, 5.0)]
        result = shares(Lap(0.0, 8.0, spans), {}, 1)
        assert result["time/other_s"] == pytest.approx(other)
        assert result["share/rollout"] == pytest.approx((1.0 - began) / 8)


def test_calls_of_one_name_are_one_in_the_figures(
    training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds and work of the portions add up rank by rank, and the fuller one's memory counts."""
    session = training_with(TrainConfig()).session()
    group, told = Echo(ranks=2), [{"seconds": 1.0, "tokens": 8.0, "allocated_gib": 4.0, "reserved_gib": 5.0}] * 2
    used = iter([told, [{"seconds": 2.0, "tokens": 4.0, "allocated_gib": 3.0, "reserved_gib": 9.0}] * 2, told, told])

    def side_by_side(name: str, key: str, arguments: Any, outlived: Any) -> Any:
        return {group: [{"reply": None, "usage": usage} for usage in next(used)]}

    monkeypatch.setattr("penstock.session.session.side_by_side", side_by_side)
    session.groups["actor"] = group  # type: ignore[assignment]
    loss = ActorLoss("ppo_clip", {}, 1.0, 0.0, None, 0.0)
    command = SumGradient("", 0, Split(1, 1, 2, 1, 32, 8, "token-mean", 0), loss, first=True, last=False)
    for key in ("1/update_actor/0", "1/update_actor/1", "1/values"):
        session.call("actor", command, key)
    assert (
        session.usage["1/update_actor"]
        == [{"seconds": 3.0, "tokens": 12.0, "allocated_gib": 4.0, "reserved_gib": 5.0}] * 2
    )
    assert session.usage["1/values"] == told
    session.call("actor", command, "1/values")
    assert session.usage["1/values"] == told, "asked again it is the same call"


def test_what_ranks_did_not_work_is_other() -> None:
    """Of 5 seconds that both updates took, the ranks worked 4: one went into sending, reading and writing."""
    usage = {"1/update_critic": [{"seconds": 1.0}], "1/update_actor": [{"seconds": 3.0}]}
    result = shares(lap_of(12.0, {"update_critic": 1.0, "update_actor": 5.0}), usage, 1)
    assert result["time/other_s"] == pytest.approx(12 - 6.6 - 4)
    assert total(result) == pytest.approx(1.0)


def test_memory_is_the_worst_ranks_and_the_fullest_moment() -> None:
    """Peaks by command; how much of the reserved memory was of use in the fullest one.

    Control: a rollout finds reserved what the update before it needed, and fragments nothing.
    """
    usage = {
        "3/rollout": [{"seconds": 1.0, "allocated_gib": 12.0, "reserved_gib": 52.0}],
        "3/update_actor": [
            {"seconds": 1.0, "allocated_gib": 20.0, "reserved_gib": 40.0},
            {"seconds": 1.0, "allocated_gib": 24.0, "reserved_gib": 32.0},
        ],
    }
    assert memory(usage) == {
        "memory/rollout_gib": 12.0,
        "memory/update_actor_gib": 24.0,
        "memory/gpu_gib": 24.0,
        "memory/reserved_gib": 32.0,
        "memory/allocated_share": 0.75,
    }
    assert memory({"3/rollout": [{"seconds": 1.0}]}) == {}


def test_parallel_efficiency_is_work_over_the_ranks_time() -> None:
    """Two ranks: one waits 2 of 8 seconds of a rollout; of an update's 4 one is in collectives for 1, one for 0.5.

    Load balance 14/16 and communication efficiency 6.5/8, weighted by their time: 20.5 of 24 seconds.
    """
    rollout = {"1/rollout": [{"seconds": 8.0}, {"seconds": 6.0}]}
    update = {"1/update_actor": [{"seconds": 4.0, "communication_s": part} for part in (1.0, 0.5)]}
    name = "ranks/parallel_efficiency"
    assert parallel_efficiency(rollout) == {name: pytest.approx(14 / 16)}
    assert parallel_efficiency(update) == {name: pytest.approx(6.5 / 8)}
    assert parallel_efficiency(rollout | update) == {name: pytest.approx(20.5 / 24)}
    reshard = {"1/reshard": [{"seconds": 1.0}, {"seconds": 1.0}]}
    assert parallel_efficiency(rollout | update | reshard) == {name: pytest.approx(20.5 / 26)}


def test_ranks_that_never_wait_are_fully_used_and_one_alone_has_no_such_figure() -> None:
    """Controls: even ranks without collectives lose nothing, however long; nobody waits for a rank alone."""
    even = {"1/rollout": [{"seconds": 8.0}] * 2, "1/update_actor": [{"seconds": 4.0, "communication_s": 0.0}] * 2}
    assert parallel_efficiency(even) == {"ranks/parallel_efficiency": 1.0}
    alone = {"1/rollout": [{"seconds": 8.0}], "1/reshard": [{"seconds": 1.0}] * 2}
    assert parallel_efficiency(alone) == parallel_efficiency({}) == {}


@pytest.fixture
def training(training_with: Callable[[TrainConfig], Training], monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training on two H200, whose actor's update is done."""
    training = training_with(TrainConfig())
    group = SimpleNamespace(spec=SimpleNamespace(devices=[RankDevice(0)] * 2))
    training.session().groups["actor"] = group  # type: ignore[assignment]
    monkeypatch.setattr(module, "_name", lambda visible: H200[0])
    rank = {"seconds": 4.0, "tokens": 8000.0, "flops": 0.1 * 2 * 4 * 989e12, "communication_s": 1.0}
    peaks = {"allocated_gib": 10.0, "reserved_gib": 20.0}
    training.session().usage = {
        "1/update_actor": [rank | peaks, rank | peaks | {"communication_s": 0.6}],
        "0/evaluate": [{"seconds": 1.0, "allocated_gib": 99.0, "reserved_gib": 99.0}],
    }
    return training


def test_a_roles_figures_come_from_its_command(training: Training) -> None:
    """The communication is the ranks' mean over the slowest rank's seconds; other iterations' peaks are not its own."""
    assert role_figures(training, "actor", "1/update_actor") == pytest.approx(
        {
            "actor/mfu": 0.1,
            "actor/tokens_per_s_per_gpu": 1000.0,
            "actor/communication_share": 0.2,
            "memory/update_actor_gib": 10.0,
            "memory/gpu_gib": 10.0,
            "memory/reserved_gib": 20.0,
            "memory/allocated_share": 0.5,
        }
    )
    assert role_figures(training, "actor", "2/update_actor") == {}


def test_fragmented_memory_is_reported_once_with_a_remedy(
    training: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of 20 GiB held nothing. Not every iteration says so, and not what is small."""
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    usage = training.session().usage
    small = {"1/update_actor": [{"seconds": 4.0, "allocated_gib": 1.0, "reserved_gib": 2.0}]}
    for held, warnings in ((small, 0), (usage, 1), (usage, 1)):
        training.session().usage = dict(held)
        assert utilisation(training, 1)["memory/allocated_share"] == 0.5
        assert sum("expandable_segments" in record.message for record in caplog.records) == warnings
        assert training.session().usage == {}


def test_figures_can_be_read_while_another_command_adds_its_usage(training: Training) -> None:
    """Actor and critic in groups of their own are updated side by side: one may end while the keys are looked at."""

    class Key(str):
        """A key during whose reading another arrives."""

        def partition(self, separator: str, /) -> tuple[str, str, str]:
            usage["1/update_critic"] = [{"seconds": 1.0}]
            return super().partition(separator)

    update = training.session().usage["1/update_actor"]
    usage = training.session().usage = {Key("1/update_actor"): update}
    assert role_figures(training, "actor", "1/update_actor")["memory/update_actor_gib"] == 10.0
    assert "1/update_critic" in usage


def test_throughput_is_of_the_whole_iteration() -> None:
    """96 responses in 8 s; of three mini-batches twice one step was not taken. Control: without an update no steps."""
    config = TrainConfig.model_validate({"algorithm": {"mini_batches": 3, "epochs": 2}, "rollout": {"prompts": 12}})
    figures = {"time/iteration_s": 8.0, "time/update_actor_s": 2.0}
    assert throughput(config, 96, figures) == {"throughput/samples_per_s": 12.0}
    figures["actor/skipped_steps"] = 1.0
    assert throughput(config, 96, figures) == {"throughput/samples_per_s": 12.0, "throughput/steps_per_s": 5 / 8}
