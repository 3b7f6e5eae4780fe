"""vLLM's routes, recorded while it samples, are those that the library's routers choose for the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import write_family
from tests.engines.shared_ranks import Ranks
from tests.engines.unpacked import load_unpacked

CHOSEN, EXPERTS, BLOCK = 2, 4, 128  # of the tiny mixtures; tokens of a block of vLLM's cache on CPUs
SAMPLING: dict[str, Any] = {
    **{"samples": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 12, "ignore_eos": False},
    "routes": True,
}
LONG: dict[str, Any] = {
    "data": {"max_prompt_tokens": 2 * BLOCK + 10},
    "actor": {"routing": "replay"},
    "rollout": {"prompts": 4, "samples": 3, "max_response_tokens": 12, "max_sequences": 5},
}


def routes_of_the_library(lm: Any, tokens: list[int]) -> np.ndarray:
    """Which experts each token takes, in whichever order, of every layer: [T, L, K] sorted."""
    with torch.no_grad():
        logits = lm(torch.tensor(tokens)[None], output_router_logits=True).router_logits
    return torch.stack([layer.topk(CHOSEN, -1).indices.sort(-1).values for layer in logits], 1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["Mixtral", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("OLMoE", "Qwen 2 MoE", "Qwen 3 MoE"))],
)
def test_they_are_the_librarys(one_rank: Ranks, family: str, tmp_path: Path) -> None:
    """Short prompts and one of more than two blocks, which the prefix cache has for its second and third sample.

    More sequences wait than are decoded at a time, and slots are used again. Only a last token is unknown. Control: of
    another row's tokens they are not.
    """
    folder = write_family(family, tmp_path / "model")
    one_rank.build(folder, ("actor", "rollout"), **LONG)
    random = np.random.default_rng(3)
    prompts = Ragged.of([random.integers(3, 64, length) for length in (2 * BLOCK + 7, 5, 9, 130)], np.int32)
    reply = one_rank.ask("generate", prompts=prompts, tokenizer=str(folder), sampling={**SAMPLING, "seed": [0, 1, 0]})[
        0
    ]
    assert reply.cached_tokens >= 2 * 2 * BLOCK
    whole = [
        [*prompts.row(reply.positions_P[row // 3]), *reply.responses.row(row)] for row in range(len(reply.responses))
    ]
    lm, differing, tokens = load_unpacked(folder), 0, 0
    for row, text in enumerate(whole):
        routes_TLK = np.sort(reply.routes.row(row).reshape(len(text), -1, CHOSEN), -1)
        assert (routes_TLK[-1] == 255).all()
        differing += int((routes_TLK[:-1] != routes_of_the_library(lm, text)[:-1]).any(-1).sum())
        tokens += routes_TLK[:-1, :, 0].size
    assert differing <= tokens / 500  # two experts may be alike up to rounding
    other = np.sort(reply.routes.row(0).reshape(len(whole[0]), -1, CHOSEN), -1)[: len(whole[-1]) - 1]
    assert (other != routes_of_the_library(lm, whole[-1])[: len(other)]).any(-1).mean() > 0.2
