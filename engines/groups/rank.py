"""A rank process: `python -m engines.groups.rank`, started by `launch.py` and commanded through `channel.py`.

It guards itself first (ignores Ctrl-C, dumps its stacks on SIGUSR1), says hello, and only then
imports the worker, which brings torch. Then it answers one command after another until "shutdown".

Messages, rank to flow: hello {pid}, news {key, result}, reply {key, result}, error {key, traceback, user}; the outcome
of building the worker is the reply or error to the key "start". Flow to rank: command {command, key, epoch,
arguments}, shutdown {}. A heartbeat {} comes from the flow, on a socket of its own, and goes back as it is.

Left out: what commands mean, which is the worker's; that the rank ends with the flow (penstock/usercode/keeper.py).
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import zmq

from engines.groups import channel
from engines.groups.channel import Tell
from engines.groups.launch import START_KEY, RankStart
from penstock.base.errors import UserError

REPLIES_KEPT = 32

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """What holds the models of a rank. `gpu` is the index for torch.cuda, None on CPU."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None: ...

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Run one command; the result holds only what the channel carries. An exception ends the whole group.

        `tell` sends something ahead of the result, to whoever listens; a repeated command does not tell again.
        """

    def after_reply(self) -> None:
        """Do what only the next command waits for, while the flow works with the reply to the last one."""

    def close(self) -> None:
        """Let go of everything before an orderly exit."""


def main() -> None:
    start = RankStart.take()
    _guard()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _log.info("rank %d of %d, group %s, epoch %d", start.rank, start.world_size, start.group, start.epoch)
    context = zmq.Context()
    threading.Thread(
        target=channel.echo, args=(start.address, f"rank-hb-{start.rank}"), name="heartbeat", daemon=True
    ).start()
    try:
        _serve(start, channel.dial(context, start.address, f"rank-{start.rank}"))
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


def _serve(start: RankStart, socket: zmq.Socket[bytes]) -> None:
    channel.send(socket, channel.pack({"kind": "hello", "pid": os.getpid()}))
    try:
        module, _, name = start.worker.partition(":")
        worker: Worker = getattr(importlib.import_module(module), name)(start.rank, start.world_size, start.gpu)
    except Exception as error:
        channel.send(socket, _error(START_KEY, error))
        socket.recv()  # stay until the group has read this and ends every rank
        return
    channel.send(socket, channel.pack({"kind": "reply", "key": START_KEY, "result": {}}))
    answered: OrderedDict[tuple[str, str], _Reply] = OrderedDict()
    while (message := channel.receive(socket))["kind"] == "command":
        reply = _answer(worker, message, start.epoch, answered, partial(_tell, socket, message["key"]))
        channel.send(socket, reply.body)
        if not reply.is_error:  # the group ends: what fails now would hide why
            worker.after_reply()
    worker.close()


def _tell(socket: zmq.Socket[bytes], key: str, news: dict[str, Any]) -> None:
    channel.send(socket, channel.pack({"kind": "news", "key": key, "result": news}))


class _Reply(NamedTuple):
    body: bytes
    is_error: bool


def _answer(
    worker: Worker, message: dict[str, Any], epoch: int, answered: OrderedDict[tuple[str, str], _Reply], tell: Tell
) -> _Reply:
    command, key = message["command"], message["key"]
    try:
        if message["epoch"] != epoch:
            raise RuntimeError(f"command of epoch {message['epoch']} refused: this rank belongs to epoch {epoch}")
        if (command, key) in answered:
            return answered[command, key]
        began = time.perf_counter()
        result = worker.handle(command, message["arguments"], tell)
        _log.info("%s (%s): %.2f s", command, key, time.perf_counter() - began)
        reply = _Reply(channel.pack({"kind": "reply", "key": key, "result": result}), is_error=False)
    except Exception as error:
        return _Reply(_error(key, error), is_error=True)
    answered[command, key] = reply
    if len(answered) > REPLIES_KEPT:
        answered.popitem(last=False)
    return reply


def _error(key: str, error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error))
    _log.error("%s", text)
    user = [error.problem, error.remedy] if isinstance(error, UserError) else None
    return channel.pack({"kind": "error", "key": key, "traceback": text, "user": user})


if __name__ == "__main__":
    main()
