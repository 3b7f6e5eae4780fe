"""Samples tokens with `penstock.engines.kernels.sample_token` and writes them; on a CPU by Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.engines.sampled_tokens OUT.npz

A process of its own, because the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton
from triton import language as tl

from penstock.engines.kernels import sample_token
from penstock.engines.rollout.vllm import OnePass

sample_token.BLOCK = 64  # so that a small vocabulary has several
ROWS, VOCABULARY = 60, 3 * 64 + 9


@triton.jit
def _uniforms(seeds, positions, out):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out + row, sample_token._uniform(tl.load(seeds + row), tl.load(positions + row)))


def _scores(*sampled: torch.Tensor) -> dict[str, torch.Tensor]:
    """What vLLM's sampler is given for a step, and whether its own function was asked for it and for three others."""
    logits = sampled[0]
    asked: list[int] = []
    one_pass = OnePass(lambda *_, **__: asked.append(1))
    tokens = one_pass.sample(*sampled)
    scores = one_pass.scores(logits, 0, tokens, None, max_per_req_token_ids=0, logits_mode=False)
    left = [bool(asked)]
    for others in ((logits, 0, tokens.clone()), (logits.clone(), 0, tokens), (logits, 2, tokens)):
        asked.clear()
        one_pass.scores(*others, None)
        left.append(bool(asked))
    given = {"scores": scores.logprobs[:, 0], "scored_tokens": scores.logprob_token_ids[:, 0]}
    return given | {"left_to_vllm": torch.tensor(left)}


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

    tokens, logprobs = sample_token.sample(logits, requests, temperatures, seeds, positions)
    some = torch.tensor([44, 3, 20], device=device)
    alone, _ = sample_token.sample(logits[some], requests[some], temperatures, seeds, positions[some])
    later, _ = sample_token.sample(logits, requests, temperatures, seeds, positions + 1)
    uniforms = torch.empty(ROWS, dtype=torch.float64, device=device)
    _uniforms[(ROWS,)](seeds[order.to(device)], positions, uniforms)
    found = {"tokens": tokens, "alone": alone, "later": later, "uniforms": uniforms, "some": some}
    found |= {"logprobs": logprobs, "logits": logits.double(), "temperatures": temperatures[order.to(device)]}
    found |= _scores(logits, requests, temperatures, seeds, positions)
    found["nobody"] = requests < 0
    np.savez(out, **{name: tensor.cpu().numpy() for name, tensor in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
