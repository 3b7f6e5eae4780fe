"""What the channel carries, what it refuses, and whom it lets in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from engines import channel


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
    with pytest.raises(ValueError, match="offsets"):
        channel.unpack(body(offsets))


@pytest.mark.parametrize("code", [len(channel.DTYPES) + 1, 127])
def test_unknown_extension_is_refused(code: int) -> None:
    """A body that names an unknown type does not become data."""
    with pytest.raises(ValueError, match="ext code"):
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
