"""What the channel carries, what it refuses, and whom it lets in."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import psutil
import pyarrow as pa
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.engines.groups import channel
from tests.waiting import came_true


@pytest.fixture
def listener() -> Iterator[channel.Listener]:
    listener = channel.Listener()
    yield listener
    listener.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("dtype", channel.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (2, 3, 4)], ids=str)
def test_arrays_cross_bit_equal(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Dtype, shape and every bit survive, also of 0-d, empty and non-contiguous arrays."""
    bits = np.random.default_rng(0).integers(0, 2, (*shape, dtype.itemsize), dtype=np.uint8)
    array = bits.view(dtype).reshape(shape)
    for sent in (array, array.T):
        got = channel.unpack(channel.pack({"a": [sent]}))["a"][0]
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.tobytes() == sent.tobytes()


def test_plain_data_crosses() -> None:
    """Nested plain data is unchanged; schedules keep their integer keys."""
    message = {"s": "é", "b": b"\x00\xff", "n": [1, -(2**63), 0.1, None, True], "schedule": {0: 1, 100: 4}}
    assert channel.unpack(channel.pack(message)) == message


def test_packing_takes_a_snapshot() -> None:
    """What a caller does to an array after packing is not seen on the other side."""
    array = np.zeros(3, np.int64)
    body = channel.pack(array)
    array[:] = 7
    assert channel.unpack(body).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, np.float16),
        np.zeros(2, ">f4"),
        np.zeros(2).view(np.recarray),
        pa.array(["text"]),
        pa.array(["text", None], pa.large_string()),
        np.float32(1),
        {1, 2},
        object(),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_everything_else_is_refused(value: Any) -> None:
    """Nothing is coerced in silence, and nothing is pickled."""
    with pytest.raises(TypeError, match="channel carries"):
        channel.pack({"value": value})


@pytest.mark.parametrize("texts", [[], [""], ["one", "", "zwei é", "\U0001f600"]], ids=len)
def test_texts_cross_as_they_are(texts: list[str]) -> None:
    """Empty ones, several bytes a character, and those that are part of a longer array; text behind them stays away."""
    whole = pa.array(["before", *texts, "behind"], pa.large_string())
    for sent in (pa.array(texts, pa.large_string()), whole[1:-1]):
        assert channel.unpack(channel.pack({"a": sent}))["a"].equals(pa.array(texts, pa.large_string()))
    assert b"behind" not in channel.pack(whole[1:-1])


@pytest.mark.parametrize(
    "offsets", [[0, 9], [1, 3], [0, 2], [0, 3, 1, 3], [0, -1, 3]], ids=["outside", "late", "short", "back", "negative"]
)
def test_texts_that_would_be_read_elsewhere_are_refused(offsets: list[int]) -> None:
    """Offsets from the other side never reach memory that is not the texts' own; the right ones pass."""

    def body(offsets: list[int]) -> bytes:
        data = np.array([len(offsets) - 1, *offsets], np.int64).tobytes() + b"abc"
        packed: bytes = msgpack.packb(msgpack.ExtType(len(channel.DTYPES), data))
        return packed

    assert channel.unpack(body([0, 1, 3])).to_pylist() == ["a", "bc"]
    with pytest.raises(channel.Garbled, match="offsets"):
        channel.unpack(body(offsets))


@pytest.mark.parametrize("code", [len(channel.DTYPES) + 1, 127])
def test_unknown_extension_is_refused(code: int) -> None:
    """A body that names an unknown type does not become data."""
    with pytest.raises(channel.Garbled, match="ext code"):
        channel.unpack(msgpack.packb(msgpack.ExtType(code, b"\x00" * 8)))


def test_secret_key_is_not_printed(listener: channel.Listener) -> None:
    """An address that lands in a log or a traceback does not give the secret away."""
    assert listener.address.client_secret not in repr(listener.address)


def test_known_client_is_heard_and_answered(listener: channel.Listener, context: zmq.Context[Any]) -> None:
    """The keys of the address let a client in, both ways."""
    with channel.dial(context, listener.address, "rank-0") as client:
        client.send(channel.pack({"kind": "hello"}))
        assert listener.receive(5.0) == [("rank-0", {"kind": "hello"})]
        listener.send("rank-0", channel.pack("welcome"))
        assert client.poll(5000)
        assert channel.unpack(client.recv()) == "welcome"


def test_unknown_client_is_shut_out(listener: channel.Listener, context: zmq.Context[Any]) -> None:
    """A client that knows the server's key but is not ours fails its handshake, and nothing it says arrives."""
    public, secret = zmq.curve_keypair()
    stranger = replace(listener.address, client_public=public.decode(), client_secret=secret.decode())
    assert _handshake(context, stranger) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert _handshake(context, listener.address) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert listener.receive(5.0) == [("rank-0", "let me in")], "only the second client may be heard"
    assert listener.receive(0.2) == []


def test_client_without_encryption_is_shut_out(listener: channel.Listener, context: zmq.Context[Any]) -> None:
    """A plain connection cannot reach the listener at all."""
    with context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.identity = b"rank-0"
        plain.connect(listener.address.endpoint)
        plain.send(channel.pack("let me in"))
        assert listener.receive(0.5) == []


def test_absent_peer_is_an_error(listener: channel.Listener) -> None:
    """A message to nobody is not lost in silence."""
    with pytest.raises(zmq.ZMQError):
        listener.send("rank-9", channel.pack("anyone?"))


def test_a_body_of_many_frames_arrives_whole_both_ways(listener: channel.Listener, context: zmq.Context[Any]) -> None:
    """One below, at and above the limit of a frame, and one of many; none of them may be cut or joined with another."""
    sizes = [0, channel.FRAME_BYTES - 5, channel.FRAME_BYTES - 4, channel.FRAME_BYTES, 5 * channel.FRAME_BYTES + 7]
    bodies = [np.random.default_rng(size).bytes(size) for size in sizes]
    with channel.dial(context, listener.address, "rank-0") as client:
        for body in bodies:
            channel.send(client, channel.pack(body))
        heard: list[tuple[str, Any]] = []
        while len(heard) < len(bodies):
            assert (more := listener.receive(20.0))
            heard += more
        assert heard == [("rank-0", body) for body in bodies]
        for body in bodies:
            listener.send("rank-0", channel.pack(body))
            assert channel.receive(client) == body


# ---- strangers: they know the port and have no key ------------------------------------------------------------------

# Sends ZMTP's greeting and the head of a message of 4 GiB, and then as much of it as is taken.
ANNOUNCING = r"""
import socket, struct, sys
stranger = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
stranger.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
stranger.sendall(b"\x06" + struct.pack(">Q", int(sys.argv[2])))
taken = 0
try:
    while taken < 256 << 20:
        taken += stranger.send(bytes(1 << 20))
except OSError:
    pass
print(taken)
"""
SILENT = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
strangers = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("connected", flush=True)
for stranger in strangers:
    while stranger.recv(1 << 16):
        pass
print("all dropped", flush=True)
"""


def _stranger(code: str, address: channel.Address, *arguments: int) -> subprocess.Popen[str]:
    port = address.endpoint.rpartition(":")[2]
    command = [sys.executable, "-c", code, port, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("bounded", [True, False])
def test_a_stranger_cannot_make_the_flow_hold_a_message(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 MiB sent of a message of 4 GiB nothing is kept. Control: without the limit, all of it is."""
    if not bounded:
        monkeypatch.setattr(channel, "FRAME_BYTES", 1 << 40)
    listener, process = channel.Listener(), psutil.Process()
    before = most = process.memory_info().rss
    with _stranger(ANNOUNCING, listener.address, 4 << 30) as stranger:
        while stranger.poll() is None:
            most = max(most, process.memory_info().rss)
            time.sleep(0.005)
    listener.close()
    assert (most - before < 16 << 20) == bounded


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """As many as a process is usually allowed at its start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_silent_strangers_keep_no_rank_out_and_are_dropped(
    few_descriptors: None, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,500 of them, more than the flow had descriptors: a rank joins, is heard and answered, and then they are gone.

    Once the rank's two connections are there nobody else gets in. Control: a stranger did before.
    """
    monkeypatch.setattr(channel, "HANDSHAKE_MS", 3000)
    listener, process = channel.Listener(), psutil.Process()
    with _stranger(SILENT, listener.address, 1500) as strangers:
        assert strangers.stdout is not None
        assert strangers.stdout.readline() == "connected\n"
        with channel.dial(context, listener.address, "rank-0") as rank:
            channel.send(rank, channel.pack("hello"))
            assert listener.receive(20.0) == [("rank-0", "hello")]
            listener.send("rank-0", channel.pack("welcome"))
            assert channel.receive(rank) == "welcome"
            assert strangers.stdout.readline() == "all dropped\n"
            assert came_true(lambda: process.num_fds() < 200, 10)
            with channel.dial(context, listener.address, channel.echo_name("rank-0")) as second:
                channel.send(second, channel.pack("echo"))
                assert listener.receive(20.0) == [(channel.echo_name("rank-0"), "echo")]
            late = socket.socket()
            late.settimeout(1.0)
            with late, pytest.raises(TimeoutError):
                late.connect(("127.0.0.1", int(listener.address.endpoint.rpartition(":")[2])))
            channel.send(rank, channel.pack("still here"))
            assert listener.receive(20.0) == [("rank-0", "still here")]
    listener.close()


def _handshake(context: zmq.Context[Any], address: channel.Address) -> int:
    """How the handshake of a client that dials `address` and speaks at once ends."""
    ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    client = context.socket(zmq.DEALER)
    client.linger = 1000
    client.identity = b"rank-0"
    client.curve_serverkey = address.server_public.encode()
    client.curve_publickey = address.client_public.encode()
    client.curve_secretkey = address.client_secret.encode()
    monitor = client.get_monitor_socket(ends)
    client.connect(address.endpoint)
    client.send(channel.pack("let me in"))
    assert monitor.poll(5000), "the handshake never ended"
    return int(recv_monitor_message(monitor)["event"])
