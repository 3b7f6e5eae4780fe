"""Work goes on after a loss with the next epoch of every group; quick, with ranks that hold no model.

Whole trainings are in test_losses.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from prefect.logging import disable_run_logger

from penstock.configs.schema import TrainConfig
from penstock.engines.groups.group import EngineError, LostTooOften
from penstock.engines.groups.hosts import Hosts
from penstock.flows.parts import recovery
from penstock.flows.parts.recovery import despite_losses
from penstock.session import events
from penstock.session.machines.hosts import Machines
from penstock.session.session import Session as LivingSession
from penstock.session.session import Training, registered
from penstock.state.events import read_events
from penstock.state.run_folder import RunFolder
from penstock.tasks.recover import recover
from tests.engines.groups.small_ranks import pids_of, spec
from tests.processes import alive


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A training with two groups on this machine, which recovers once."""
    monkeypatch.setattr(recovery, "recover", recover.fn)
    monkeypatch.setattr(events, "emit_event", lambda *_, **__: None)
    config, run = TrainConfig.model_validate({"engine": {"restarts": 1}}), RunFolder(tmp_path)
    with disable_run_logger(), Hosts(run.logs) as hosts:
        session = LivingSession(config, run, machines=Machines(hosts))
        with registered(session) as training, session.stack:
            session.stack.callback(session.end_groups)
            actor, rollout = spec(run.logs, name="actor"), spec(run.logs, name="rollout", roles=("rollout",))
            session.start_groups([replace(actor, heartbeat_timeout_s=1.5), rollout])
            yield training


def struck_while_working(training: Training, to: str, number: signal.Signals, times: int) -> list[list[int]]:
    """Let ranks work, and hit one, or its host, the first `times` times; return the ranks of every time."""
    groups, seen = training.session().groups, list[list[int]]()

    def work(_: Training) -> list[list[int]]:
        seen.append([pid for group in training.session().distinct_groups for pid in pids_of(group)])
        if len(seen) <= times:
            rank = psutil.Process(seen[-1][0])
            hit = rank.parents()[1] if to == "host" else rank
            threading.Timer(0.2, os.kill, (hit.pid, number)).start()
            groups["actor"].call("ponder_for_ever", key="p")
        return seen

    return despite_losses(training, work)


@pytest.mark.parametrize(
    ("to", "number"), [("rank", signal.SIGKILL), ("rank", signal.SIGSTOP), ("host", signal.SIGKILL)]
)
def test_work_goes_on_with_new_ranks(training: Training, to: str, number: signal.Signals) -> None:
    """Of every group, on a host that may be new; none of the old ones is left."""
    before, after = struck_while_working(training, to, number, times=1)
    assert [group.epoch for group in training.session().distinct_groups] == [1, 1]
    assert not set(before) & set(after)
    assert not any(map(alive, before))
    (lost,) = read_events(training.run)
    assert (lost["event"], lost["group"]) == ("HostLost" if to == "host" else "RankLost", "actor")


def test_a_loss_too_many_ends_the_work(training: Training) -> None:
    """Its name says so, and no rank is started any more. Control: the first loss was recovered from."""
    with pytest.raises(LostTooOften, match="engine.restarts allows 1"):
        struck_while_working(training, "rank", signal.SIGKILL, times=2)
    assert [group.epoch for group in training.session().distinct_groups] == [1, 1]
    assert [event["event"] for event in read_events(training.run)] == ["RankLost", "RankLost", "given up"]


def test_what_a_rank_raises_ends_the_work(training: Training) -> None:
    """It would come again: nothing is started anew."""
    with pytest.raises(EngineError, match="ArithmeticError"):
        despite_losses(training, lambda _: training.session().groups["actor"].call("fail", key="f", rank=0))
    assert training.session().groups["actor"].epoch == 0
    assert read_events(training.run) == []
