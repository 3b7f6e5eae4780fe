"""The pages of a slot are there before anything is copied to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from penstock.engines.training import slot_writer
from penstock.engines.training.slot_writer import PIECE, SlotWriter
from penstock.engines.training.state_images import StateImage

SIZE = PIECE + 4096 * 3 + 5  # more than one piece, and no whole number of pages


@pytest.fixture
def path() -> Path:
    """A file in memory, as a host's."""
    return Path(f"/proc/self/fd/{os.memfd_create('slot')}")


def test_pages_are_made_before_they_are_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them. Control: without asking the kernel makes none of a file that has grown."""

    def made() -> int:
        return path.stat().st_blocks * 512

    asked = slot_writer._make_pages
    monkeypatch.setattr(slot_writer, "_make_pages", lambda memory: None)
    writer = SlotWriter(torch.device("cpu"))
    memory = writer._memory(str(path), SIZE)
    assert made() == 0
    asked(memory)
    assert made() >= SIZE
    assert not memory.any()


def test_a_slot_holds_what_is_copied_to_it(path: Path) -> None:
    """Also where it was larger before, and is larger after: the pages are made anew."""
    writer = SlotWriter(torch.device("cpu"))
    for count in (1000, 10, 70_000):
        tensor = torch.arange(count, dtype=torch.float32)
        image = StateImage({"one": tensor}, {"of": "iteration", "number": count})
        writer.begin(image, str(path))
        writer.wait()
        plan = image.plan()
        assert path.stat().st_size == plan.size
        place = plan.places["one"]
        assert path.read_bytes()[place.begin : place.end] == tensor.numpy().tobytes()
