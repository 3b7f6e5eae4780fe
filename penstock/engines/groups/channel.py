"""The wire between a flow and its ranks: what a message may contain, and who may speak.

Bodies are msgpack (dict, list, str, bytes, int, float, bool, None) plus numpy arrays of six dtypes and texts as Arrow
keeps them: many texts are one buffer, of which no strings are made on the way from an engine to a file. Everything else
is refused, so nothing that arrives can run code. Ranks and hosts dial a ROUTER of the flow; CURVE encrypts both ways,
and only the client key made for this listener is let in.

Others reach that port, too: users of this machine, and of the network where the flow listens on it. What they cost
before their keys are checked is bounded: ZeroMQ takes frames up to FRAME_BYTES alone, so a longer body travels as
several; who has not shown a key within HANDSHAKE_MS is dropped; there are descriptors for thousands of them. On the
loopback interface nobody else can connect at all once all are there; on a network a peer may have to dial anew.

With keys a peer is heard under the names that the listener was made for, and no other. Bytes that are no message come
as an error in the place of one, so that who reads can tell whose they were.

Left out: commands, deadlines and who asks for an echo (`group.py` and `hosts.py` on the flow's side, `rank.py`
and `host.py` on the other); what messages there are (`said.py`).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import zmq
from zmq.auth.thread import ThreadAuthenticator

from penstock.engines.commands.message import WrongMessage
from penstock.engines.groups import interface

# A dtype's position is its msgpack ext code. Equality includes the byte order: big-endian arrays are refused.
DTYPES = tuple(np.dtype(name) for name in ("int32", "int64", "float32", "float64", "uint8", "bool"))
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_TEXTS = len(DTYPES)  # ext code of a `pa.LargeStringArray`
_ZAP_DOMAIN = "penstock"
MOST_IO_THREADS = 8
Tell = Callable[[dict[str, Any]], None]  # sends something ahead of a command's result
FRAME_BYTES = 128 * 1024  # what a stranger can make the flow hold: ZeroMQ has one limit for all, also after the keys
_ENVELOPE_BYTES = 1024  # above what CURVE puts around a frame
HANDSHAKE_MS = 10_000  # for a rank on a machine that is busy; it takes milliseconds
DESCRIPTORS = 65_536  # for as many connections as may wait for that
FLOW_KEYS, HOST_KEYS = "PENSTOCK_FLOW_KEYS", "PENSTOCK_HOST_KEYS"  # of `penstock host --new-keys`
_ECHO = ":echo"  # what the second one's identity ends with
LINGER_MS = 1000  # a rank that leaves waits this long for its last words to be taken
MOST_AT_ONCE = 1000  # messages that are taken in one look: who floods the flow does not keep it from its deadlines

_log = logging.getLogger(__name__)


class Garbled(WrongMessage):
    """Bytes that are no message."""


def pack(message: Any) -> bytes:
    """Serialise a message. Arrays are copied at once, so the caller may reuse their memory.

    Raises:
        TypeError: the message holds something the channel does not carry.
    """
    packed: bytes = msgpack.packb(message, default=_encode, use_bin_type=True)
    return packed


def unpack(body: bytes | memoryview) -> Any:
    """The message in `body`. Tuples come back as lists; arrays are read-only views of the received bytes.

    Raises:
        Garbled: it holds none.
    """
    try:
        return msgpack.unpackb(body, ext_hook=_decode, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack, struct, NumPy and Arrow each have their own words for it
        raise Garbled(f"{len(body)} bytes that are no message: {type(error).__name__}: {error}") from error


def _encode(value: Any) -> msgpack.ExtType:
    if isinstance(value, pa.LargeStringArray):
        return msgpack.ExtType(_TEXTS, _texts_as_bytes(value))
    return _encode_array(value)


def _decode(code: int, data: bytes) -> Any:
    return _texts_from(data) if code == _TEXTS else _decode_array(code, data)


def _texts_as_bytes(texts: pa.LargeStringArray) -> bytes:
    """Return offsets (rows + 1, int64), behind their number, and the UTF-8 bytes of all rows."""
    if texts.null_count:
        raise TypeError("the channel carries texts, and none that are missing")
    _, offsets, data = texts.buffers()
    begins = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    text = memoryview(data)[begins[0] : begins[-1]] if data is not None else b""
    return b"".join((struct.pack("<q", len(texts)), (begins - begins[0]).tobytes(), text))


def _texts_from(data: bytes) -> pa.LargeStringArray:
    (rows,) = struct.unpack_from("<q", data)
    if not 0 <= rows < len(data) // 8:
        raise ValueError(f"{rows} texts in {len(data)} bytes")
    begins = np.frombuffer(data, np.int64, rows + 1, offset=8)
    text = memoryview(data)[8 * (rows + 2) :]
    # Whether it is UTF-8 is seen when a text is read; outside of the bytes nothing is to be read at all.
    if begins[0] != 0 or begins[-1] != len(text) or (np.diff(begins) < 0).any():
        raise ValueError("texts whose offsets do not fit their bytes")
    return pa.Array.from_buffers(pa.large_string(), rows, [None, pa.py_buffer(begins), pa.py_buffer(text)])


def _encode_array(value: Any) -> msgpack.ExtType:
    # Subclasses are refused too: a masked array would silently lose its mask.
    if type(value) is not np.ndarray:
        raise TypeError(f"the channel carries plain data and numpy arrays, not {type(value).__qualname__}: convert it")
    if value.dtype not in _CODES:
        raise TypeError(f"the channel carries arrays of {', '.join(map(str, DTYPES))}, not {value.dtype}: convert it")
    # int64 fields in front keep the array's bytes aligned to 8.
    header = struct.pack(f"<{1 + value.ndim}q", value.ndim, *value.shape)
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return msgpack.ExtType(_CODES[value.dtype], b"".join((header, raw.data)))


def _decode_array(code: int, data: bytes) -> np.ndarray:
    if not 0 <= code < len(DTYPES):
        raise ValueError(f"unknown msgpack ext code {code}")
    (ndim,) = struct.unpack_from("<q", data)
    shape = struct.unpack_from(f"<{ndim}q", data, 8)
    return np.frombuffer(data, DTYPES[code], offset=8 * (1 + ndim)).reshape(shape)


@dataclass(frozen=True)
class Keys:
    """The CURVE keys of a listener and of all its peers, as ZeroMQ writes them in text."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def new(cls) -> Keys:
        """Make keys that nobody has."""
        return cls(*(key.decode() for _ in range(2) for key in zmq.curve_keypair()))

    def to_text(self) -> str:
        """Return them as `keys_of_environment` reads them."""
        return json.dumps(asdict(self))

    def address(self, endpoint: str) -> Address:
        """Return what a peer is told: where to dial, and all keys but the listener's secret one."""
        return Address(endpoint, self.server_public, self.client_public, self.client_secret)


def keys_of_environment() -> Keys | None:
    """Return the keys that a flow was given for hosts that join by themselves, or None."""
    return Keys(**json.loads(os.environ[FLOW_KEYS])) if FLOW_KEYS in os.environ else None


@dataclass(frozen=True)
class Address:
    """Where a peer dials and the keys that let it in. Travels through pipes, secrets and this channel only."""

    endpoint: str
    server_public: str
    client_public: str
    client_secret: str = field(repr=False)


class Listener:
    """The flow's end: one ROUTER for all peers, ranks of a group or hosts.

    For one thread at a time, but for `wake` and `await_again`.

    Args:
        peers: the names of those that will dial. They reply at the same time, with megabytes each, and a thread
            deciphers one at a time.
        listen: address of this machine, and port; 0: any that is free.
        keys: None: new ones.
    """

    def __init__(
        self,
        peers: Collection[str] = ("rank-0",),
        listen: tuple[str, int] = (interface.LOOPBACK, 0),
        keys: Keys | None = None,
    ) -> None:
        keys = keys or Keys.new()
        self.host, port = listen
        self._context = zmq.Context(io_threads=min(len(peers), MOST_IO_THREADS))
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, _OnlyKey(keys.client_public.encode()))
        self._router = self._context.socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.curve_secretkey = keys.server_secret.encode()
        self._router.zap_domain = _ZAP_DOMAIN.encode()
        self._router.zap_enforce_domain = True  # without it an absent authenticator would mean: let everybody in
        self._router.router_mandatory = True  # a message to a peer that is not there is an error, not a silent loss
        self._router.router_handover = True  # a peer that dials anew takes the place of its own lost connection
        self._router.sndhwm = 0  # sending never blocks
        self._router.maxmsgsize = FRAME_BYTES + _ENVELOPE_BYTES
        self._router.handshake_ivl = HANDSHAKE_MS
        _allow_descriptors()
        self._door = interface.listening_socket(self.host, port)
        self._peers = {name for peer in peers for name in (peer, echo_name(peer))}
        self._awaited, self._told_of_others, self._entering = set(self._peers), False, threading.Lock()
        endpoint = f"tcp://{self.host}:{self._door.getsockname()[1]}"
        self._router.use_fd = self._door.dup().detach()  # the router's from here on
        self._router.bind(endpoint)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)
        self.address = keys.address(endpoint)

    def send(self, identity: str, body: bytes) -> None:
        """Queue `body` for the peer `identity`.

        Raises:
            zmq.ZMQError: no such peer is connected.
        """
        self._router.send_multipart([identity.encode(), *_frames(body)], zmq.NOBLOCK, copy=False)

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        """(identity, message) of everything that is there, waiting up to `timeout_s` for the first, or for `wake`.

        In the place of a message that could not be read stands a `Garbled`.
        """
        messages: list[tuple[str, Any]] = []
        if self._bell in dict(self._poller.poll(int(timeout_s * 1000))):
            os.eventfd_read(self._bell)
        for _ in range(MOST_AT_ONCE):
            if not self._router.poll(0):
                break
            identity, *frames = self._router.recv_multipart(copy=False)
            name = identity.bytes.decode(errors="backslashreplace")
            if name in self._peers:
                messages.append((name, _message_or_error(frames)))
            else:
                self._tell_of_another(name)
        with self._entering:
            if self._awaited:
                self._awaited -= {identity for identity, _ in messages}
                if not self._awaited and interface.is_loopback(self.host):
                    interface.let_nobody_in(self._door)
        return messages

    def await_again(self, peer: str) -> None:
        """Let a peer of that name dial that is another process than before; for any thread."""
        with self._entering:
            self._awaited |= {peer, echo_name(peer)}
            interface.let_in_again(self._door)

    def _tell_of_another(self, name: str) -> None:
        if not self._told_of_others:
            self._told_of_others = True
            _log.warning("somebody with the right keys, whom nobody expects, has dialled: %.100s", name)

    def wake(self) -> None:
        """Let `receive`, in another thread, wait no longer."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Stop listening; what was not sent yet is dropped. A second call does nothing."""
        if self._context.closed:
            return
        self._router.close(linger=0)
        self._door.close()
        os.close(self._bell)
        self._authenticator.stop()
        self._context.destroy(linger=0)


def _allow_descriptors() -> None:
    """Let this process have up to DESCRIPTORS open, if the machine allows it; many start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _OnlyKey:
    """Admits the one client key of this listener."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._client_public


def echo_name(identity: str) -> str:
    """Return the identity under which a peer echoes."""
    return identity + _ECHO


def name_of(identity: str) -> str:
    """Return the peer that an identity belongs to, of its messages or its echoes."""
    return identity.removesuffix(_ECHO)


def send(socket: zmq.Socket[bytes], body: bytes) -> None:
    """Send a packed message from a peer to its flow."""
    socket.send_multipart(_frames(body), copy=False)


def receive(socket: zmq.Socket[bytes]) -> Any:
    """Wait for the flow's next message to this peer and return it; raises `Garbled` where it is none."""
    return _message(socket.recv_multipart(copy=False))


def has_come(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message for this peer waits; asking takes microseconds."""
    return bool(socket.poll(0))


def _frames(body: bytes) -> list[bytes | memoryview]:
    if len(body) <= FRAME_BYTES:
        return [body]
    whole = memoryview(body)
    return [whole[begin : begin + FRAME_BYTES] for begin in range(0, len(body), FRAME_BYTES)]


def _message(frames: Sequence[zmq.Frame]) -> Any:
    return unpack(frames[0].buffer if len(frames) == 1 else b"".join(frame.buffer for frame in frames))


def _message_or_error(frames: Sequence[zmq.Frame]) -> Any:
    try:
        return _message(frames)
    except Garbled as error:
        return error


def echo(address: Address, identity: str) -> None:
    """Send back what comes for the echo of `identity`, until this process ends; for a thread of its own.

    It waits in C and leaves the interpreter lock to the others, so it answers however long a library holds that: only
    a process that is stopped or gone does not.
    """
    with dial(zmq.Context(), address, echo_name(identity)) as socket:
        socket.send(pack({"kind": "heartbeat"}))  # by which the listener knows where to ask
        zmq.proxy(socket, socket)


def dial(context: zmq.Context[zmq.Socket[bytes]], address: Address, identity: str) -> zmq.Socket[bytes]:
    """A DEALER connected to `address` under the name `identity`. One socket belongs to one thread."""
    socket = context.socket(zmq.DEALER)
    socket.linger = LINGER_MS
    socket.identity = identity.encode()
    socket.maxmsgsize = FRAME_BYTES + _ENVELOPE_BYTES
    socket.handshake_ivl = HANDSHAKE_MS
    socket.curve_serverkey = address.server_public.encode()
    socket.curve_publickey = address.client_public.encode()
    socket.curve_secretkey = address.client_secret.encode()
    socket.connect(address.endpoint)
    return socket
