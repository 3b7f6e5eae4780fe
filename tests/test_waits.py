"""Every wait ends: with a deadline of its own, or because what it waits for has one. Which, and why, is said here.

Ranks, hosts and calls have deadlines that end in a name (RankLost, HostLost, a failed call). A wait for them needs none
of its own, and has to be in ENDS; any other call that may block for ever is found by its name and its missing timeout.
No deadline is reckoned on the clock on the wall, which people and machines set: CLOCK has all that look at it.
Left out: reads of files and pipes, and what libraries do by themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.sources import ROOT, found_in

# Measurements wait as long as a person does.
JUDGED = [
    f"penstock/{path.parent.name}"
    for path in (ROOT / "penstock").glob("*/__init__.py")
    if path.parent.name != "benchmarks"
]

WAITS = {"acquire", "communicate", "get", "join", "recv", "result", "wait"}  # methods, where they are given nothing
PROGRAMS = {"subprocess.run", "subprocess.check_call", "subprocess.check_output"}
CONNECTIONS = {"urlopen", "create_connection", "httpx.get", "httpx.post", "requests.get", "requests.post"}

GROUP = "an engine group ends it: echoes, and a deadline for each command"
COLLECTIVE = "torch.distributed ends it, and before that the deadline of the command"
TURN = "who has the turn looks at deadlines several times a second"
THREAD = "the thread looks at its end several times a second"
KILLED = "the process was killed, or has closed its end"
USERS = "Pebble ends it: the call has a deadline, after which its process is killed"
COPY = "a copy in memory, within the deadline of the command"
DISK = "the disk ends it: what is awaited writes files"
PERSON = "a command in the foreground, which a person ends with Ctrl-C"
PARENT = "its parent ends it, or what it watches does"

ENDS = {
    "penstock/engines/groups/group.py: self._changes.wait_for": TURN,
    "penstock/engines/groups/hosts.py: self._thread.join": THREAD,
    "penstock/engines/groups/hosts.py: self._waiting.get": "it is not empty",
    "penstock/engines/groups/hosts.py: first.result": "it is done",
    "penstock/engines/groups/rank.py: socket.recv": "its group has the error already, and ends this process",
    "penstock/engines/groups/side_by_side.py: wait": GROUP,
    "penstock/engines/groups/side_by_side.py: call.result": GROUP,
    "penstock/engines/groups/side_by_side.py: failed[0].result": "it is done",
    "penstock/engines/groups/side_by_side.py: min(failed, key=_is_not_a_loss).result": "it is done",
    "penstock/engines/ranks/models.py: self.slots.wait": COPY,
    "penstock/engines/groups/machine.py: self._thread.join": THREAD,
    "penstock/engines/training/slot_writer.py: begun.result": COPY,
    "penstock/engines/training/slot_writer.py: self.wait": COPY,
    "penstock/engines/weights/broadcast.py: self._joint.broadcast(sent).wait": COLLECTIVE,
    "penstock/engines/weights/broadcast.py: self._joint.broadcast(torch.stack(sums)).wait": COLLECTIVE,
    "penstock/engines/weights/broadcast.py: work.wait": COLLECTIVE,
    "penstock/engines/weights/gather.py: self._work.wait": COLLECTIVE,
    "penstock/engines/weights/joint.py: self.backend.allreduce([values]).wait": COLLECTIVE,
    "penstock/flows/parts/passes.py: future.result": GROUP,
    "penstock/flows/parts/state_before.py: training.session().consolidator.wait": DISK,
    "penstock/flows/parts/updates.py: critic.result": GROUP,
    "penstock/chaos/kills.py: training.command.wait": "the training that was started: one that stands still is killed",
    "penstock/chaos/training.py: self.command.wait": KILLED,
    "penstock/cli/prefect/server.py: shell.wait": KILLED,
    "penstock/cli/keeping_alive.py: keeper.wait": "the training ends it",
    "penstock/cli/prefect/deploy.py: subprocess.run": PERSON,
    "penstock/cli/prefect/server.py: _server().wait": "it has ended",
    "penstock/cli/serving/loadtest.py: subprocess.run": PERSON,
    "penstock/cli/serving/serve.py: guard.wait": KILLED,
    "penstock/cli/serving/serve.py: server.wait": PERSON,
    "penstock/doctor/environment.py: subprocess.run": "pip uninstalls, in `make install` alone",
    "penstock/environments/pool.py: future.result": "it is done",
    "penstock/environments/worker.py: asyncio.run_coroutine_threadsafe(coroutine, self._loop).result": USERS,
    "penstock/environments/agent.py: self._running.result": "it is done",
    "penstock/usercode/programs.py: process.wait": "it has been killed",
    "penstock/environments/mcp.py: asyncio.Event().wait": "holds a connection open until its task is cancelled",
    "penstock/environments/verifiers.py: self.process.wait": "it was told to end; its keeper ends it with us",
    "penstock/environments/openenv_servers.py: process.wait": KILLED,
    "penstock/environments/openenv_servers.py: server.process.wait": "holds a server until it or its worker ends",
    "penstock/environments/openenv_servers.py: self._connection.recv": USERS,
    "penstock/environments/worker.py: item.task.result": "it is done",
    "penstock/environments/worker.py: self._has_ended.wait": "within `wait_for`, which has the time to hand back",
    "penstock/evaluators/running.py: called.future.result": USERS,
    "penstock/rewards/ahead.py: item.scores.result": "each request, and each call of a function, has a deadline",
    "penstock/rewards/ahead.py: self._call(samples, tolerated).scores.result": "likewise",
    "penstock/rewards/ahead.py: self._calls.get": "`close` puts the last",
    "penstock/rewards/pool.py: call.future.result": "it is done",
    "penstock/session/consolidation.py: begun.result": DISK,
    "penstock/session/consolidation.py: self.wait": DISK,
    "penstock/session/machines/pools.py: block.get": "no wait: the content of a Secret",
    "penstock/session/rollout/generation.py: generation.replies.result": GROUP,
    "penstock/session/rollout/portions.py: replies.result": "it is done",
    "penstock/tasks/evaluation/harness.py: keeper.wait": "the harness ends it, or who cancels the flow",
    "penstock/tasks/stream/join.py: rollout.generation.replies.result": "all portions have come, so it is about to be",
    "penstock/session/saving/checkpoints.py: begun.result": DISK,
    "penstock/session/saving/checkpoints.py: self.wait": DISK,
    "penstock/session/session.py: wait": GROUP,
    "penstock/session/machines/serving_host.py: keeper.wait": KILLED,
    "penstock/session/flow_runs/failures.py: FlowRunContext.get": "no wait: which flow runs here",
    "penstock/session/flow_runs/page.py: self._work.get": "a daemon thread, for which nobody waits without patience",
    "penstock/trackers/outbox.py: self._changed.wait_for": "a daemon thread, for which nobody waits without patience",
    "penstock/usercode/sandboxed.py: self._process.wait": KILLED,
    "penstock/usercode/sandboxed.py: wire.recv": PARENT,
    "penstock/usercode/workers.py: self._pool.join": KILLED,
    "penstock/usercode/workers.py: self._starting.result": THREAD,
    "penstock/usercode/workers.py: call.future.result": "it is done",
    "penstock/tasks/recover.py: session.consolidator.wait": DISK,
    "penstock/tasks/export.py: training.session().checkpoints.wait": DISK,
    "penstock/tasks/finetuning/checkpoints.py: session.checkpoints.wait": DISK,
    "penstock/tasks/finetuning/checkpoints.py: training.session().checkpoints.wait": DISK,
    "penstock/tasks/iteration/checkpoint.py: session.checkpoints.wait": DISK,
    "penstock/tasks/iteration/faults.py: training.session().consolidator.wait": DISK,
    "penstock/tasks/iteration/checkpoint.py: training.session().consolidator.wait": DISK,
    "penstock/session/machines/elastic.py: thread.join": THREAD,
    "penstock/session/machines/elastic.py: self._model_is_there.wait": "the end of the training sets it",
    "penstock/session/machines/elastic.py: waiting.get": "it is not empty",
    "penstock/session/rollout/generation.py: replies.result": GROUP,
    "penstock/tasks/iteration/rollout.py: generation.replies.result": "its responses have been taken",
}

CLOCK = {
    "penstock/engines/groups/host.py: time.time": "a machine tells its clock, for the comparison of clocks",
    "penstock/environments/gateway/requests.py: time.time": "when it was answered, for clients",
    "penstock/chaos/kills.py: datetime.now": "when something was killed, to find the event that says so",
    "penstock/cli/chaos.py: datetime.now": "when it happened, for people",
    "penstock/cli/serving/loadtest.py: datetime.now": "a name",
    "penstock/state/events.py: datetime.now": "when a flow's process had ended, for people",
    "penstock/session/examination.py: time.time": "the comparison of clocks",
    "penstock/session/events.py: datetime.now": "when something happened, for people",
    "penstock/session/flow_runs/kept_alive.py: datetime.now": "how long ago a flow run crashed",
    "penstock/reports/comparing/recorded.py: time.time": "when a comparison was made, for people",
    "penstock/session/sweeps/running.py: time.time": "when a sweep ended, for people",
    "penstock/session/record.py: time.time": "when a run ended, for people",
    "penstock/tasks/evaluation/results.py: time.time": "when it ended, for the tracker",
    "penstock/state/run_folder.py: datetime.now": "a name; the next free one where there is such a run",
    "penstock/trackers/tensorboard.py: time.time": "when a figure was written, for people",
}


def endless(name: str, source: str) -> Iterator[str]:
    """Return the calls in a module that may wait for ever by themselves, each as `file: call`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _waits(node) and not _limited(node):
            yield f"{name}: {ast.unparse(node.func)}"


def clocks(name: str, source: str) -> Iterator[str]:
    """Return the calls in a module that read a clock that somebody may set, likewise."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.time", "datetime.now", "datetime.utcnow"):
            yield f"{name}: {ast.unparse(node.func)}"


def _waits(call: ast.Call) -> bool:
    spelled = ast.unparse(call.func)
    last = spelled.rpartition(".")[2]
    if spelled in PROGRAMS | CONNECTIONS or last in CONNECTIONS:
        return True
    if spelled == "wait":  # of concurrent.futures, but for a callback of that name
        return bool(call.args) and len(call.args) < 2
    if last == "wait_for":
        return "." in spelled and len(call.args) == 1
    return "." in spelled and last in WAITS and not call.args


def _limited(call: ast.Call) -> bool:
    return any(keyword.arg in ("timeout", "timeout_s", "timeout_seconds") for keyword in call.keywords)


def test_no_wait_is_without_an_end() -> None:
    """What ends it is said for each."""
    found = found_in(JUDGED, endless)
    assert not found - ENDS.keys()
    assert len(found) > 30, "the control: waits are found"


def test_a_clock_that_jumps_moves_no_deadline() -> None:
    """Durations come from clocks that nobody sets."""
    found = found_in(JUDGED, clocks)
    assert not found - CLOCK.keys()
    assert found, "the control: clocks are found"


@pytest.mark.parametrize(
    ("line", "limited"),
    [
        ("future.result()", "future.result(30.0)"),
        ("process.wait()", "process.wait(timeout=5)"),
        ("condition.wait_for(done)", "condition.wait_for(done, 5.0)"),
        ("thread.join()", "', '.join(names)"),
        ("waiting.get()", "settings.get('name')"),
        ("subprocess.run(command)", "subprocess.run(command, timeout=5)"),
        ("urllib.request.urlopen(url)", "urllib.request.urlopen(url, timeout=5)"),
        ("wait(calls)", "wait(calls, 1.0)"),
    ],
)
def test_a_wait_would_be_found(line: str, limited: str) -> None:
    """The control, with the same under a deadline, or what only looks like it."""
    assert [*endless("file", line)]
    assert not [*endless("file", limited)]
