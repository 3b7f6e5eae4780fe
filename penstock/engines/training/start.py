"""What a rank settles before its models are built, and the random generators that a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's generators, and of the GPU's, as values for JSON."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [str(algorithm), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Set all generators to what `generator_states` returned."""
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    algorithm, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((algorithm, np.asarray(keys, np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))


# What PyTorch computes with MKL's vector functions on a CPU.
VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)


def settle_vector_functions() -> None:
    """Call MKL's vector functions on one element each, before several threads do so at once.

    MKL picks the code of a function at its first call. Where several threads make that call at once, one may be left
    with code that computes four digits (https://github.com/pytorch/pytorch/issues/188792). It was seen for `cos` in one
    process of sixty, and lasted as long as the process.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one)


def prepare_deepspeed_for_cpu() -> None:
    """Keep DeepSpeed from compiling its shared-memory collective when it starts on CPU ranks (44 s and a compiler)."""
    from deepspeed import ops

    for name in ops.__compatible_ops__:
        if "shm" in name:
            ops.__compatible_ops__[name] = False
