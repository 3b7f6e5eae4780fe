"""Samples tokens with `engines.kernels.sample_token` and writes them; on a CPU by Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.engines.sampled_tokens OUT.npz

A process of its own, because the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton
from triton import language as tl

from engines.kernels import sample_token

sample_token.BLOCK = 64  # so that a small vocabulary has several
ROWS, VOCABULARY = 60, 3 * 64 + 9


@triton.jit
def _uniforms(seeds, positions, out):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out + row, sample_token._uniform(tl.load(seeds + row), tl.load(positions + row)))


def main(out: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=generator)
    logits[:, 64:128] = torch.where(torch.arange(ROWS)[:, None] % 3 == 0, float("-inf"), logits[:, 64:128])
    logits[:, -4:] = float("-inf")
    logits[5] = torch.full((VOCABULARY,), float("-inf"))
    logits[5, 70] = -2.0  # one token is left
    wide = torch.full((ROWS, VOCABULARY + 7), 50.0)  # what lies between the rows is not theirs
    wide[:, :VOCABULARY] = logits
    logits = wide.to(device, torch.bfloat16)[:, :VOCABULARY]
    order = torch.randperm(ROWS, generator=generator)  # requests in other places than their rows
    temperatures = torch.where(torch.arange(ROWS) % 4 == 1, 0.0, 0.7).to(device)
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator).to(device)
    positions = torch.randint(0, 2**31, (ROWS,), generator=generator).to(device)
    requests = order.to(device, torch.int32)
    requests[17] = -1  # a row that belongs to no request

    tokens = sample_token.sample(logits, requests, temperatures, seeds, positions)
    some = torch.tensor([44, 3, 20], device=device)
    alone = sample_token.sample(logits[some], requests[some], temperatures, seeds, positions[some])
    later = sample_token.sample(logits, requests, temperatures, seeds, positions + 1)
    uniforms = torch.empty(ROWS, dtype=torch.float64, device=device)
    _uniforms[(ROWS,)](seeds[order.to(device)], positions, uniforms)
    found = {"tokens": tokens, "alone": alone, "later": later, "uniforms": uniforms, "some": some}
    found |= {"logits": logits.double(), "temperatures": temperatures[order.to(device)]}
    found["nobody"] = requests < 0
    np.savez(out, **{name: tensor.cpu().numpy() for name, tensor in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
