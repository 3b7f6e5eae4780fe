"""Both sides of a comparison: log-probs of the same tokens as vLLM gives them while it samples, and as the actor does.

A reshard proves that the rollout engine holds the actor's weights; this shows that it makes the same of them. Every
engine samples a few tokens, step by step as in a rollout, and so through the cache and the graphs that rollouts use.
No random stream of a training moves by it: requests have streams of their own, and the process's generators are
put back.

The commands are functions of the rank's `Worker`, which finds them by name in `COMMANDS`.
Left out: which prompts, and how large a gap the dtype explains (tasks/iteration/compare_logprobs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engines.batches.packing import Rows
from engines.ranks.start import generator_states, restore_generators
from engines.rollout.decode_loop import Sampling
from penstock.base.ragged import Ragged

if TYPE_CHECKING:
    from engines.ranks.worker import Worker


def sample_to_compare(
    worker: Worker, prompts: np.ndarray, offsets: np.ndarray, tokens: int, seed: list[int]
) -> dict[str, Any]:
    """Sample `tokens` tokens at temperature 1 for this engine's share of the prompts, with vLLM's log-probs.

    Of an engine's ranks the first replies, the others return nothing.

    Raises:
        RuntimeError: the engine has no verified weights.
    """
    generator = worker.rollout_engine()
    sampling = Sampling(
        1, temperature=1.0, top_p=1.0, top_k=0, max_tokens=tokens, ignore_eos=True, seed=seed, logprobs=True
    )
    states = generator_states()
    generated = generator.generate(Ragged(prompts, offsets), sampling, worker.next_generation(), reproducible=True)
    restore_generators(states)
    if generator.place.rank_in_engine:
        return {}
    return {
        "positions": generated.positions_P,
        "tokens": generated.responses.values_T,
        "offsets": generated.responses.offsets_B1,
        "logprobs": generated.logprobs_T,
    }


@torch.no_grad()
def logprobs_to_compare(
    worker: Worker,
    prompts: np.ndarray,
    prompt_offsets: np.ndarray,
    tokens: np.ndarray,
    offsets: np.ndarray,
    budget: int,
) -> dict[str, Any]:
    """Log-probs of the tokens under the actor at temperature 1, for this rank's share of rows.

    Compiled blocks run as they are written: code for a pass without gradients would be compiled for this alone.
    """
    responses = Ragged(tokens, offsets)
    mask = Ragged(np.ones(len(tokens), np.uint8), responses.offsets_B1)
    rows, policy = Rows(Ragged(prompts, prompt_offsets), responses, mask, {}), worker.model("actor")
    with torch.compiler.set_stance("force_eager"):
        reply = worker.per_token(rows, "actor", budget, lambda batch: policy(batch, 1.0)[0])
    return {"rows": reply["rows"], "values": reply["values"]}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "sample_to_compare": sample_to_compare,
    "logprobs_to_compare": logprobs_to_compare,
}
