"""Both sides of a comparison: log-probs of the same tokens as vLLM gives them while it samples, and as the actor does.

A reshard proves that the rollout engine holds the actor's weights; this shows that it computes the same with them.
Every engine samples a few tokens, step by step as in a rollout, and so through the cache and the graphs that rollouts
use.
No random stream of a training moves by it: requests have streams of their own, and the process's generators are
restored, where no other generation is under way.

Left out: which prompts, and how large a gap the dtype explains (penstock/tasks/iteration/compare_logprobs.py).
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches.images import with_images
from penstock.engines.batches.packing import Rows
from penstock.engines.commands.forward import TokenValues
from penstock.engines.commands.logprob_gap import LogprobsToCompare, SampledTokens, SampleToCompare
from penstock.engines.commands.rollout import Generate, Sampling
from penstock.engines.ranks.forward import per_token
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import Later, begins, carries_out, single_turns
from penstock.engines.training.start import generator_states, restore_generators


@begins(SampleToCompare, during_generation=single_turns)
def sample_to_compare(models: RankModels, command: SampleToCompare) -> Later[SampledTokens | None]:
    """Begin to sample at temperature 1; of an engine's ranks the first replies.

    Raises:
        RuntimeError: the engine has no verified weights.
    """
    generator = models.rollout_engine()
    sampling = Sampling(
        1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=command.tokens,
        ignore_eos=True,
        seed=command.seed,
        logprobs=True,
        routes=generator.capture is not None,
    )
    states = None if generator.loop.busy else generator_states()
    asked = Generate(
        command.number,
        command.prompts,
        sampling,
        tokenizer="",  # without text
        sharing=command.sharing,
        images=command.images,
    )
    generation = generator.generation(asked, reproducible=True)
    generator.loop.submit(generation)

    def reply() -> SampledTokens | None:
        if states is not None:
            restore_generators(states)
        if generator.place.rank_in_engine:
            return None
        generated = generation.generated()
        assert generated.logprobs_T is not None
        return SampledTokens(generated.positions_P, generated.responses, generated.logprobs_T, generated.routes)

    return Later(generation, reply)


@carries_out(LogprobsToCompare)
@torch.no_grad()
def logprobs_to_compare(models: RankModels, command: LogprobsToCompare) -> TokenValues:
    """Compute the actor's log-probs with uncompiled blocks: compiled code without gradients would serve this alone."""
    responses = command.responses
    mask = Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1)
    prompts, images = command.prompts, None
    if command.images is not None:
        prompts, images = with_images(prompts, command.images)
    rows = Rows(prompts, responses, mask, {}, routes=command.routes, images=images)
    policy = models.model("actor")
    with torch.compiler.set_stance("force_eager"):
        return per_token(models, rows, "actor", command.budget, lambda batch: policy(batch, 1.0)[0])
