"""Copies a rank's trained state to memory of its host, behind the training's back.

A thread copies while the ranks generate the next responses; what would change the state waits for it. From a GPU each
piece comes over a stream of its own into one of two page-locked buffers, and from there into the slot while the next
one comes. The slots themselves are not locked: the driver would need 14 s for 18 GB, in which no kernel can start.

The kernel makes the pages of a slot as they are first touched, and zeroes them: by one thread 18 GB of them take 10 s
longer than a rollout. So several threads ask for all of them before the first copy.

Left out: whose memory it is (penstock/engines/groups/slots.py), what is copied
(penstock/engines/training/state_images.py).
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from penstock.engines.training.state_images import StateImage
from penstock.state.state_image import LENGTH, Place

PIECE = 1 << 26  # bytes that come from a device at once
PAGE_MAKERS = 4  # threads; a machine with a GPU has the cores
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; an older kernel refuses, and makes pages as they are touched
_libc = ctypes.CDLL(None)  # its calls, unlike those of `mmap`, let other threads run


class SlotWriter:
    """A rank's thread for snapshots, of which one at a time is taken.

    Args:
        device: of the trained state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memories: dict[str, torch.Tensor] = {}  # by path, mapped
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._begun: Future[None] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[torch.Tensor] = []  # page-locked, of a piece each; none for a CPU

    def begin(self, image: StateImage, path: str) -> None:
        """Begin to copy an image to the slot at `path`; what the device has still to compute of it comes first."""
        self.wait()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._begun = self._thread.submit(self._copy, image, path)

    def wait(self) -> None:
        """Wait until what was begun is whole.

        Raises:
            Exception: whatever ended it.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def _copy(self, image: StateImage, path: str) -> None:
        plan = image.plan()
        memory = self._memory(path, plan.size)
        memory[:LENGTH] = 0
        with torch.cuda.stream(self._stream):
            for name, tensor in image.tensors.items():
                self._copy_tensor(tensor, memory, plan.places[name])
        header = torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)
        memory[LENGTH : len(header)] = header[LENGTH:]
        memory[:LENGTH] = header[:LENGTH]

    def _copy_tensor(self, tensor: torch.Tensor, memory: torch.Tensor, place: Place) -> None:
        source, target = tensor.detach().reshape(-1).view(torch.uint8), memory[place.begin : place.end]
        if source.device.type == "cpu":
            _put(source, target)
        else:
            self._copy_from_device(source, target)

    def _copy_from_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy piece by piece: while one is put into the slot the next one is on its way."""
        if not self._buffers:
            self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        coming: tuple[torch.cuda.Event, torch.Tensor, torch.Tensor] | None = None
        for number, (piece, place) in enumerate(zip(source.split(PIECE), target.split(PIECE), strict=True)):
            buffer, there = self._buffers[number % 2][: piece.numel()], torch.cuda.Event()
            buffer.copy_(piece, non_blocking=True)
            there.record(self._stream)
            if coming is not None:
                _put_when_there(*coming)
            coming = there, buffer, place
        if coming is not None:
            _put_when_there(*coming)

    def _memory(self, path: str, size: int) -> torch.Tensor:
        """Return the memory of a slot, as large as it is to be now."""
        if (memory := self._memories.get(path)) is not None and memory.numel() == size:
            return memory
        os.truncate(path, 0)  # what it held is not whole while its size changes
        os.truncate(path, size)
        self._memories[path] = memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        _make_pages(memory)
        return memory


def _make_pages(memory: torch.Tensor) -> None:
    """Let the kernel make all pages of a mapped file, pieces of it side by side."""
    with ThreadPoolExecutor(PAGE_MAKERS, "pages") as threads:
        for piece in memory.split(PIECE):
            threads.submit(
                _libc.madvise, ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(len(piece)), POPULATE_WRITE
            )


def _put_when_there(there: torch.cuda.Event, buffer: torch.Tensor, place: torch.Tensor) -> None:
    there.synchronize()
    _put(buffer, place)


def _put(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy in this thread alone: torch would start others, for which the ranks' cores have no time."""
    np.copyto(target.numpy(), source.numpy())
