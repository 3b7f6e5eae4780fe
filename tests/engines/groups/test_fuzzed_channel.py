"""Whatever comes over the wire, with keys or without: nobody crashes or hangs, memory is bounded, the sender is named.

The seeds are fixed. The slow tests send 100,000 messages, the others a part of them.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pyarrow as pa
import pytest
import zmq

from penstock.engines.commands.hosts import TellFacts
from penstock.engines.commands.message import WrongMessage
from penstock.engines.groups import channel, interface
from penstock.engines.groups.group import EngineGroup, RankLost
from penstock.engines.groups.host import HostStart
from penstock.engines.groups.hosts import HostFailed, Hosts, start_host
from penstock.engines.groups.said import BY_HOSTS, BY_RANKS, TO_HOSTS, checked
from penstock.engines.groups.spec import LOCAL
from tests.engines.groups.small_ranks import pids_of, spec
from tests.waiting import came_true

MOST = 100_000
COUNTS = [5_000, pytest.param(MOST, marks=pytest.mark.slow)]
REPLY_S = 60.0
MORE_BYTES = 128 << 20  # that a process may use more than before; the messages of 100,000 are as many

VALID: list[dict[str, Any]] = [
    {"kind": "heartbeat"},
    {"kind": "alive"},
    {"kind": "hello", "pid": 7},
    {"kind": "hello", "machine": "node", "pid": 7},
    {"kind": "exit", "group": "main", "epoch": 0, "rank": 1, "reason": "exit code 1"},
    {"kind": "reply", "number": 3, "result": {"rows": [1, 2], "gap": 0.5}},
    {"kind": "mistake", "number": 3, "user": {"problem": "no", "remedy": "yes", "kind": "UserError"}},
    {"kind": "reply", "command": "update_actor", "key": "1", "result": {"loss": np.arange(5, dtype=np.float32)}},
    {"kind": "news", "command": "generate", "key": "1", "result": {"texts": pa.array(["a", "bc"], pa.large_string())}},
    {"kind": "error", "command": "values", "key": "1", "traceback": "Trace", "user": None, "out_of_memory": True},
    {"kind": "command", "number": 1, "command": "tell_facts", "fields": {}},
    {"kind": "command", "number": 2, "command": "tell_log", "fields": {"group": "main", "epoch": 0, "rank": 1}},
]
ODD: list[Any] = [
    *(None, True, -1, 2**63, 1.5, float("nan"), "", "main", "x" * 500, b"\xff", [], {}, [[[[]]]], {"a": {"b": 1}}),
    *(10**9, "shut", "rank-99", {"problem": "only"}, np.zeros(3), pa.array(["x"], pa.large_string())),
]
HEADERS = (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)  # of msgpack: bytes, extension, text, list and dict, of a length in 32 bits


def fuzzed(seed: int) -> Iterator[bytes]:
    """Bodies without end: random, damaged, cut, of wrong fields and types and kinds, of claimed lengths, and deep."""
    random = np.random.default_rng(seed)
    while True:
        packed = bytearray(channel.pack(VALID[random.integers(len(VALID))]))
        match random.integers(8):
            case 0:
                yield random.bytes(int(random.integers(200)))
            case 1:
                for at in random.integers(len(packed), size=random.integers(1, 4)):
                    packed[at] = random.integers(256)
                yield bytes(packed)
            case 2:
                yield bytes(packed[: random.integers(len(packed))])
            case 3:
                at = int(random.integers(len(packed)))
                yield bytes(packed[:at] + random.bytes(int(random.integers(1, 9))) + packed[at:])
            case 4 | 5:
                yield channel.pack(_another(random))
            case 6:
                claimed = struct.pack(">BI", HEADERS[random.integers(len(HEADERS))], int(random.integers(1 << 32)))
                yield claimed + random.bytes(int(random.integers(100)))
            case _:
                yield b"\x91" * int(random.integers(1, 3000)) + b"\xc0"


def _another(random: np.random.Generator) -> Any:
    """Return a message with a field that is missing, too many, or of another type; or of another kind; or none."""
    message = dict(VALID[random.integers(len(VALID))])
    name, odd = [*message][random.integers(len(message))], ODD[random.integers(len(ODD))]
    match random.integers(4):
        case 0:
            del message[name]
        case 1:
            message[name] = odd
        case 2:
            message[str(random.integers(9))] = odd
        case _:
            return odd
    return message


def extensions(seed: int) -> Iterator[bytes]:
    """Arrays and texts of which some bytes were changed, cut or made up."""
    random = np.random.default_rng(seed)
    real = [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.zeros(0, np.float32),
        pa.array(["a", "bc"], pa.large_string()),
    ]
    while True:
        code, data = msgpack.unpackb(channel.pack(real[random.integers(len(real))]))
        changed = bytearray(data if random.integers(4) else random.bytes(int(random.integers(64))))
        numbers = (-(2**63), -2, -1, 0, 1, 2, 3, 2**31, 2**62, 2**63 - 1)
        if len(changed) >= 8 and random.integers(2):
            at = 8 * int(random.integers(len(changed) // 8))
            changed[at : at + 8] = struct.pack("<q", numbers[random.integers(len(numbers))])
        code = code if random.integers(4) else int(random.integers(128))
        yield msgpack.packb(msgpack.ExtType(code, bytes(changed[: random.integers(len(changed) + 1)] or changed)))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class _Grown:
    """Bytes that this process, and another, use more than at the beginning."""

    def __init__(self, pid: int | None = None) -> None:
        self._process = psutil.Process(pid)
        self._before = self._process.memory_info().rss

    @property
    def bytes(self) -> int:
        return int(self._process.memory_info().rss - self._before)


@pytest.mark.parametrize("count", COUNTS)
def test_bytes_become_a_message_or_one_error(count: int) -> None:
    """And nothing else, whoever is to have said them; some are good, so the error is not the answer to everything."""
    grown, good = _Grown(), 0
    for bodies in (fuzzed(1), extensions(2)):
        for _, body in zip(range(count), bodies, strict=False):
            message: Any
            try:
                message = channel.unpack(body)
            except channel.Garbled as error:
                message = error
            else:
                _read(message)
            for shapes in (BY_RANKS, BY_HOSTS, TO_HOSTS):
                with suppress(WrongMessage):
                    good += checked(message, shapes)["kind"] in shapes
    assert good > count // 100
    assert grown.bytes < MORE_BYTES


def _read(value: Any) -> None:
    """Read all that an array or text claims to hold: none of it may lie elsewhere."""
    if isinstance(value, np.ndarray):
        value.sum()
    elif isinstance(value, pa.LargeStringArray):
        with suppress(UnicodeDecodeError):
            value.to_pylist()


def test_what_was_said_right_is_right() -> None:
    """The control: every message that is damaged above is one before."""
    for message in VALID:
        came = channel.unpack(channel.pack(message))
        assert any(_passes(came, shapes) for shapes in (BY_RANKS, BY_HOSTS, TO_HOSTS)), message


def _passes(message: Any, shapes: Any) -> bool:
    with suppress(WrongMessage):
        return bool(checked(message, shapes))
    return False


@pytest.mark.parametrize("count", COUNTS)
def test_hosts_and_ranks_outlive_peers_that_say_anything(count: int, tmp_path: Path, context: zmq.Context[Any]) -> None:
    """Peers with keys, one that is expected and one that is not: the first counts as lost, for what it said.

    A training's own host and ranks are reached by the same thread all the while. Strangers without keys try as well.
    """
    with Hosts(tmp_path, expected=["pool/0"]) as hosts, EngineGroup(spec(tmp_path), hosts) as group:
        pids, grown = pids_of(group), _Grown()
        waiting = hosts.begin("pool/0", TellFacts())
        strangers = threading.Thread(target=_strange, args=(hosts.address, count // 50))
        strangers.start()
        peers = [channel.dial(context, hosts.address, name) for name in ("pool/0", "pool/7")]
        channel.send(peers[0], channel.pack({"kind": "hello", "machine": "node", "pid": 1}))
        for at, body in zip(range(count), fuzzed(3), strict=False):
            channel.send(peers[at % 2], body)
            if at % 1000 == 0:
                assert group.call("echo", key=f"echo {at}")[0]["pid"] == pids[0]
        with pytest.raises(HostFailed, match="said what is no message of a host"):
            waiting.result(REPLY_S)
        strangers.join()
        assert hosts.begin(LOCAL, TellFacts()).result(REPLY_S).cores > 0
        assert pids_of(group) == pids
        assert set(hosts.joined()) == {LOCAL, "pool/0"}
        assert grown.bytes < MORE_BYTES


@pytest.mark.parametrize("count", COUNTS)
def test_a_host_outlives_a_flow_that_says_anything(count: int, tmp_path: Path) -> None:
    """It notes that down, and the next command that is one has its reply."""
    listener = channel.Listener(["pool/0"])
    with closing(listener), (tmp_path / "host.log").open("ab") as log:
        keeper = start_host(HostStart("pool/0", listener.address, silence_s=60.0), log)
        heard: list[Any] = []
        assert came_true(lambda: heard.extend(listener.receive(0.1)) or "pool/0" in dict(heard), REPLY_S, every_s=0)
        (host,) = psutil.Process(keeper.pid).children()
        grown, bodies = _Grown(host.pid), (body for body in fuzzed(4) if b"shutdown" not in body)
        for _, body in zip(range(count), bodies, strict=False):
            listener.send("pool/0", body)
            listener.receive(0)
        listener.send("pool/0", channel.pack({"kind": "command", "number": -1, "command": "tell_log", "fields": {}}))
        last = channel.pack({"kind": "command", "number": -2, "command": "tell_facts", "fields": {}})
        listener.send("pool/0", last)
        replies: dict[int, Any] = {}

        def answered() -> bool:
            said = [message for _, message in listener.receive(0.1)]
            replies.update({message["number"]: message for message in said if message.get("number") in (-1, -2)})
            return -2 in replies

        assert came_true(answered, REPLY_S, every_s=0)
        assert "TellLog lacks epoch, group, rank" in replies[-1]["traceback"]
        assert replies[-2]["result"]["cores"] > 0
        assert grown.bytes < MORE_BYTES
        assert "the flow said what is no message" in (tmp_path / "host.log").read_text()
        keeper.terminate()
        keeper.wait()


ERROR = {"kind": "error", "command": "a", "key": "b", "traceback": "", "user": None, "out_of_memory": False}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xc1", "1 bytes that are no message"),
        (channel.pack({"kind": "reply", "command": "start", "key": "start"}), "with the fields"),
        (channel.pack(ERROR | {"user": ["p"]}), "is to be the"),
        (channel.pack(ERROR | {"out_of_memory": 1}), "is to be"),
        (channel.pack({"kind": "exit", "group": "main"}), "of no kind that is known"),
        (channel.pack([1, 2]), "of no kind that is known"),
    ],
)
def test_a_rank_that_says_what_is_none_is_named_and_its_group_ends(
    body: bytes, why: str, tmp_path: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys and the name of a rank. Control: somebody of another name, who says the same, changes nothing."""
    monkeypatch.setattr(interface, "let_nobody_in", lambda door: None)  # as on a network
    with EngineGroup(spec(tmp_path)) as group:
        pids = pids_of(group)
        for name in ("rank-99", "main"):
            channel.send(channel.dial(context, group._listener.address, name), body)
        for at in range(20):
            assert group.call("echo", key=f"{at}")[0]["pid"] == pids[0]
        channel.send(channel.dial(context, group._listener.address, "rank-1"), body)
        with pytest.raises(RankLost, match="rank 1: said what is no message of a rank: .*" + why):
            group.call("sleep", key="until it has come", seconds=REPLY_S)


def _strange(address: channel.Address, connections: int) -> None:
    """Connect without keys: random bytes, and ZMTP's greeting with commands of any length behind it."""
    random = np.random.default_rng(5)
    port = int(address.endpoint.rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    for _ in range(connections):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            if random.integers(2):
                stranger.sendall(greeting)
            for _ in range(10):
                body = random.bytes(int(random.integers(300)))
                head = struct.pack(">BQ", 6, int(random.integers(1 << 40))) if random.integers(2) else b"\x04\x20"
                stranger.sendall(head + b"\x05HELLO" + body)
