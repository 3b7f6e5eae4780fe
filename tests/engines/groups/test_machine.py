"""What this machine has, as CUDA_VISIBLE_DEVICES shows it."""

from __future__ import annotations

import pynvml
import pytest

from penstock.base.errors import UserError
from penstock.engines.groups.machine import visible_gpus


@pytest.mark.parametrize(
    ("shown", "indices"),
    [
        ("GPU-b2,GPU-a1-0", [2, 0]),  # the beginning of a UUID is enough where it is one GPU's
        ("1,GPU-a1-1", [1, 1]),
        ("-1", []),
        ("GPU-a1", "2 GPUs here"),
        ("GPU-c", "0 GPUs here"),
        ("MIG-a1", "slice of a GPU"),
    ],
)
def test_gpus_may_be_named_by_uuid(shown: str, indices: list[int] | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA takes them. A name that means no GPU, or several, is refused instead of hiding GPUs."""
    uuids = ["GPU-a1-0", "GPU-a1-1", "GPU-b2-2"]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: uuids[handle])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if isinstance(indices, str):
        with pytest.raises(UserError, match=indices):
            visible_gpus()
    else:
        assert visible_gpus() == indices
