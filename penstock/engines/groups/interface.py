"""The network interface on which every socket of a training listens: one that this machine has, and no other.

torch's store, gloo, NCCL, vLLM and the channel each take an address of their own choice unless told, torch's store all
that the machine has. None of them but the channel asks who is there: whoever reaches a store can read, set and delete
what the ranks tell each other. So a training on one machine keeps to the loopback interface. One on several takes the
interface that a person names, or the one by which its hosts reach the flow (docs/cluster.md says who may reach it).

Left out: IPv6; which machines there are (hosts.py).
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from penstock.base.errors import UserError

LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE = "PENSTOCK_ADDRESS"  # on which a rank's own sockets listen
_GIVEN_TO_ANY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 20_000  # below are those of well-known servers
_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _RETURN = 26, 27, 6  # of Linux's asm-generic/socket.h and bpf_common.h
_DISCARD = 9  # a port that nothing is sent to: a UDP socket that is connected has a route, and sends nothing


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine: its name and its IPv4 address."""

    name: str
    address: str


LOOPBACK_INTERFACE = Interface("lo", LOOPBACK)


def named(name: str) -> Interface:
    """Return the interface of a name.

    Raises:
        UserError: this machine has none with an IPv4 address.
    """
    there = _addresses()
    if name not in there:
        raise UserError(
            f"{socket.gethostname()} has no network interface '{name}' with an IPv4 address",
            f"set hosts.interface to one of {', '.join(sorted(there))}, or remove it",
        )
    return Interface(name, there[name][0])


def towards(address: str) -> Interface:
    """Return the interface by which this machine reaches an address.

    Raises:
        UserError: there is no route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD))
        except OSError as error:
            raise UserError(
                f"{socket.gethostname()} has no route to {address} ({error.strerror})",
                "let hosts.address be an address of the flow's machine that the hosts reach",
            ) from None
        own: str = probe.getsockname()[0]
    name = next((name for name, addresses in _addresses().items() if own in addresses), LOOPBACK_INTERFACE.name)
    return Interface(name, own)


def _addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of every interface."""
    found = {
        name: [item.address for item in items if item.family == socket.AF_INET]
        for name, items in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def variables(interface: Interface = LOOPBACK_INTERFACE, master: str | None = None) -> dict[str, str]:
    """Return what keeps the libraries of a rank on an interface; all of them read their environment.

    Args:
        master: address of the group's first rank; None: it is this machine's.
    """
    return {
        "MASTER_ADDR": master or interface.address,
        "GLOO_SOCKET_IFNAME": interface.name,
        "NCCL_SOCKET_IFNAME": f"={interface.name}",  # without the sign every interface whose name begins so
        "VLLM_HOST_IP": interface.address,
        ADDRESS_VARIABLE: interface.address,
    }


def own_address() -> str:
    """Return the address on which this rank's sockets listen."""
    return os.environ.get(ADDRESS_VARIABLE, LOOPBACK)


def listening_socket(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket that listens on an address of this machine, on any free port unless one is given."""
    listener = socket.socket()
    if port:  # of an earlier run that has just ended
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def free_port(address: str) -> int:
    """Return a port that is free now, for one who binds it seconds later: a collision fails a start, and hangs none.

    It is none of those that the kernel gives to whoever asks for any, thousands of times in those seconds on a machine
    with much to do.
    """
    first, last = (int(bound) for bound in _GIVEN_TO_ANY.read_text(encoding="ascii").split())
    others = [*range(_LOWEST_PORT, first), *range(last + 1, 1 << 16)]
    for port in random.Random().sample(others, len(others)):
        if _is_free(address, port):
            return port
    with socket.socket() as probe:  # the kernel gives all of them
        probe.bind((address, 0))
        any_port: int = probe.getsockname()[1]
        return any_port


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def let_nobody_in(listener: socket.socket) -> None:
    """Let the kernel drop whatever reaches a listening socket; connections that were accepted before go on.

    The port stays taken, and closing the socket is left to whoever accepts on it.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))  # a filter that takes 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(nothing))
    with suppress(OSError):  # sandboxes such as gVisor have no filters: there it is as before
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def let_in_again(listener: socket.socket) -> None:
    """Take back `let_nobody_in`; without it nothing happens."""
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def open_store(timeout: timedelta, port: int = 0) -> tuple[Any, int]:
    """Open a store for torch.distributed on any free port unless one is given; return it and the port."""
    from torch.distributed import TCPStore

    address = own_address()
    listener = listening_socket(address, port)
    opened: int = listener.getsockname()[1]
    descriptor = listener.detach()  # the store's from here on; given a port alone, it would listen everywhere
    store = TCPStore(
        address, opened, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, opened


def connect_store(address: str, port: int, timeout: timedelta) -> Any:
    """Connect to a store that another process has opened, or will within `timeout`."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def init_process_group(backend: str) -> None:
    """Initialise torch.distributed for this rank, of the number and with the store that its environment names."""
    from torch import distributed

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), distributed.default_pg_timeout
    store = connect_store(address, port, timeout) if rank else open_store(timeout, port)[0]
    distributed.init_process_group(
        backend, store=distributed.PrefixStore("default_pg", store), rank=rank, world_size=size
    )
