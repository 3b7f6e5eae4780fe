"""A rank process, started by its host (processes.py) and commanded through `channel.py`.

It is `python -m penstock.engines.groups.rank`.
It guards itself first (ignores Ctrl-C, dumps its stacks on SIGUSR1), says hello, and only then imports the worker,
which brings torch. Then it carries out commands, in the order in which they come, until "shutdown". One may stay
pending: the worker goes on with it in steps, and before each step says which of the commands that have come since begin
now. The others wait until nothing is pending, and all behind them.

Started with "reserve", beside a rank that lives, it imports ahead what a start needs most of its time for, touches no
GPU, and waits until it is told that the place is free and which rank it is.

Messages, rank to flow: hello {pid}, news {command, key, result}, reply {command, key, result}, error {command, key,
traceback, user, out_of_memory}; the outcome of building the worker is the reply or error to the command "start". Flow
to rank: command {command, key, epoch, arguments}, shutdown {}. A heartbeat {} comes from the flow, on a socket of its
own, and goes back as it is.

Left out: what commands mean, which is the worker's; that the rank ends with the flow (penstock/usercode/keeper.py).
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol

import zmq

from penstock.base.errors import UserError
from penstock.base.importing import importing
from penstock.engines.commands.message import encode
from penstock.engines.groups import channel
from penstock.engines.groups.channel import Tell
from penstock.engines.groups.processes import RESERVE, RankStart
from penstock.engines.groups.said import mistake_of
from penstock.engines.groups.spec import START_KEY

REPLIES_KEPT = 32
OUT_OF_MEMORY = "OutOfMemoryError"  # PyTorch's; this file does not import it
UNUSED = ("mlflow", "sklearn", "scipy")  # which DeepSpeed and transformers import for what no rank does

_log = logging.getLogger(__name__)


class Pending(Protocol):
    """A command that goes on between messages, a step at a time."""

    @property
    def result(self) -> dict[str, Any] | None:
        """What `Worker.handle` would have returned, once the command has ended."""

    def admitted(self, commands: Sequence[str]) -> int:
        """Return how many of the commands that wait, in order, begin before the next step; asked before each."""

    def step(self) -> None:
        """Go on with everything that is pending on this rank. An exception ends the whole group."""


class Worker(Protocol):
    """What holds the models of a rank. `gpu` is the index for torch.cuda, None on CPU."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None: ...

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any] | Pending:
        """Run one command, or begin it; the result holds only what the channel carries. An exception ends the group.

        `tell` sends something ahead of the result, to whoever listens; a repeated command does not tell again.
        """

    def after_reply(self) -> None:
        """Do what only the next command waits for, while the flow works with the reply to the last one."""

    def close(self) -> None:
        """Let go of everything before an orderly exit."""


def main() -> None:
    _guard()
    if sys.argv[1:] == [RESERVE]:
        _imported(sys.stdin.buffer.readline().decode().strip())
    start = RankStart.take()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _log.info("rank %d of %d, group %s, epoch %d", start.rank, start.world_size, start.group, start.epoch)
    context = zmq.Context()
    name = f"rank-{start.rank}"
    threading.Thread(target=channel.echo, args=(start.address, name), name="heartbeat", daemon=True).start()
    try:
        _serve(start, channel.dial(context, start.address, name))
    finally:
        context.destroy()
    _leave()


def _leave() -> NoReturn:
    """End this process without taking torch and vLLM apart, for which Python needs seconds: all is closed by now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _guard() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def _worker_of(path: str) -> Callable[[int, int, int | None], Worker]:
    module, _, name = path.partition(":")
    worker: Callable[[int, int, int | None], Worker] = getattr(_imported(module), name)
    return worker


def _imported(name: str) -> ModuleType:
    """Import a module, whose million objects stay: no collection looks at them."""
    with importing(without=UNUSED):
        module = importlib.import_module(name)
        gc.freeze()
    return module


def _serve(start: RankStart, socket: zmq.Socket[bytes]) -> None:
    channel.send(socket, channel.pack({"kind": "hello", "pid": os.getpid()}))
    began = time.perf_counter()
    try:
        worker = _worker_of(start.worker)(start.rank, start.world_size, start.gpu)
        _log.info("importing libraries: %.1f s", time.perf_counter() - began)
    except Exception as error:
        channel.send(socket, _error((START_KEY, START_KEY), error))
        socket.recv()  # stay until the group has read this and ends every rank
        return
    channel.send(socket, channel.pack({"kind": "reply", "command": START_KEY, "key": START_KEY, "result": {}}))
    _Commands(socket, worker, start.epoch).serve()
    worker.close()


class _Begun(NamedTuple):
    """A command that is pending, and when it began."""

    message: dict[str, Any]
    pending: Pending
    at: float


class _Commands:
    """The commands of a rank: those that wait, those that are pending, and the last replies."""

    def __init__(self, socket: zmq.Socket[bytes], worker: Worker, epoch: int) -> None:
        self._socket, self._worker, self._epoch = socket, worker, epoch
        self._waiting: deque[dict[str, Any]] = deque()
        self._pending: list[_Begun] = []
        self._answered: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # by command and key

    def serve(self) -> None:
        """Carry out what comes, until "shutdown": what is pending then is given up."""
        while self._receive():
            for _ in range(self._admitted()):
                self._begin(self._waiting.popleft())
            self._go_on()

    def _receive(self) -> bool:
        """Take in what has come, and wait for it only where there is nothing else to do; False at the end."""
        while not (self._waiting or self._pending) or channel.has_come(self._socket):
            message = channel.receive(self._socket)
            if message["kind"] != "command":
                return False
            self._waiting.append(message)
        return True

    def _admitted(self) -> int:
        """Return how many of the commands that wait begin now."""
        if not self._pending:
            return min(1, len(self._waiting))
        return self._pending[0].pending.admitted([message["command"] for message in self._waiting])

    def _begin(self, message: dict[str, Any]) -> None:
        if (stored := self._answered.get(_name(message))) is not None and message["epoch"] == self._epoch:
            channel.send(self._socket, stored)
            return
        began = time.perf_counter()
        try:
            if message["epoch"] != self._epoch:
                raise RuntimeError(
                    f"command of epoch {message['epoch']} refused: this rank belongs to epoch {self._epoch}"
                )
            result = self._worker.handle(message["command"], message["arguments"], partial(self._tell, message))
        except Exception as error:
            self._fail(message, error)
            return
        if isinstance(result, dict):
            self._finish(message, result, began)
        else:
            self._pending.append(_Begun(message, result, began))

    def _go_on(self) -> None:
        """Take a step with what is pending, and answer what has ended."""
        if not self._pending:
            return
        try:
            self._pending[0].pending.step()
        except Exception as error:
            while self._pending:
                self._fail(self._pending.pop(0).message, error)
            return
        begun, self._pending = self._pending, []
        for item in begun:
            if item.pending.result is None:
                self._pending.append(item)
            else:
                self._finish(item.message, item.pending.result, item.at)

    def _tell(self, message: dict[str, Any], news: dict[str, Any]) -> None:
        command, key = _name(message)
        channel.send(self._socket, channel.pack({"kind": "news", "command": command, "key": key, "result": news}))

    def _finish(self, message: dict[str, Any], result: dict[str, Any], began: float) -> None:
        """Reply, and let the worker do what only the next command waits for."""
        command, key = name = _name(message)
        try:
            body = channel.pack({"kind": "reply", "command": command, "key": key, "result": result})
        except TypeError as error:
            self._fail(message, error)
            return
        _log.info("%s (%s): %.2f s", command, key, time.perf_counter() - began)
        self._answered[name] = body
        if len(self._answered) > REPLIES_KEPT:
            self._answered.popitem(last=False)
        channel.send(self._socket, body)
        self._worker.after_reply()

    def _fail(self, message: dict[str, Any], error: Exception) -> None:
        """Say what failed; the group ends then, so nothing is tidied up: what fails there would hide why."""
        channel.send(self._socket, _error(_name(message), error))


def _name(message: dict[str, Any]) -> tuple[str, str]:
    return message["command"], message["key"]


def _error(name: tuple[str, str], error: Exception) -> bytes:
    command, key = name
    text = "".join(traceback.format_exception(error))
    _log.error("%s", text)
    user = encode(mistake_of(error)) if isinstance(error, UserError) else None
    short = type(error).__name__ == OUT_OF_MEMORY
    said = {"command": command, "key": key, "traceback": text, "user": user, "out_of_memory": short}
    return channel.pack({"kind": "error"} | said)


if __name__ == "__main__":
    main()
