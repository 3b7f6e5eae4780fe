"""The network interface on which every socket of a training listens: the loopback one, and no other.

torch's store, gloo, NCCL, vLLM and the channel each take an address of their own choice unless told, torch's store all
that the machine has. None of them but the channel asks who is there: whoever reaches a store can read, set and delete
what the ranks tell each other.

Left out: groups on several machines, for which this would be an interface that a person chooses.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import Any

INTERFACE, HOST = "lo", "127.0.0.1"
_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_SO_ATTACH_FILTER, _RETURN = 26, 6  # of Linux's asm-generic/socket.h and bpf_common.h; Python names neither


def variables() -> dict[str, str]:
    """Return what keeps the libraries of a rank on the interface; all of them read their environment."""
    return {
        "MASTER_ADDR": HOST,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": f"={INTERFACE}",  # without the sign every interface whose name begins so
        "VLLM_HOST_IP": HOST,
    }


def listening_socket(port: int = 0) -> socket.socket:
    """Return a socket that listens on the interface, on any free port unless one is given."""
    listener = socket.socket()
    listener.bind((HOST, port))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def let_nobody_in(listener: socket.socket) -> None:
    """Let the kernel drop whatever reaches a listening socket; connections that were accepted before go on.

    The port stays taken, and closing the socket is left to whoever accepts on it.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))  # a filter that takes 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(nothing))
    with suppress(OSError):  # sandboxes such as gVisor have no filters: there it is as before
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def open_store(timeout: timedelta, port: int = 0) -> tuple[Any, int]:
    """Open a store for torch.distributed on any free port unless one is given; return it and the port."""
    from torch.distributed import TCPStore

    listener = listening_socket(port)
    opened: int = listener.getsockname()[1]
    descriptor = listener.detach()  # the store's from here on; given a port alone, it would listen everywhere
    store = TCPStore(HOST, opened, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor)
    return store, opened


def connect_store(port: int, timeout: timedelta) -> Any:
    """Connect to a store that another process has opened, or will within `timeout`."""
    from torch.distributed import TCPStore

    return TCPStore(HOST, port, is_master=False, timeout=timeout, wait_for_workers=False)


def init_process_group(backend: str) -> None:
    """Initialise torch.distributed for this rank, of the number and with the port that its environment names."""
    from torch import distributed

    port, timeout = int(os.environ["MASTER_PORT"]), distributed.default_pg_timeout
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = connect_store(port, timeout) if rank else open_store(timeout, port)[0]
    distributed.init_process_group(
        backend, store=distributed.PrefixStore("default_pg", store), rank=rank, world_size=size
    )
