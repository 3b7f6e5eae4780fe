"""The states of a process's random generators, as plain values and tensors that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's generators, and of the GPU's."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            str(algorithm),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Set all generators to what `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    algorithm, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
