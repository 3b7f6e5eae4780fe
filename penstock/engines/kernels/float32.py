"""Products of float32 numbers on GPUs, which kernels in Triton round to ten bits (TF32) unless they are told not to.

vLLM's attention and experts are such kernels: beside a trainer that rounds nothing their log-probs are 0.001 to 0.003
off, and 1e-6 without the rounding (one H200, benchmarks/LOG.md). Left out: PyTorch's own products, which round nothing
by default.
"""

from __future__ import annotations


def multiply_exactly() -> None:
    """Let kernels that this process compiles from now on multiply float32 numbers as they are."""
    from triton import knobs

    knobs.language.fp32_default = "ieee"
