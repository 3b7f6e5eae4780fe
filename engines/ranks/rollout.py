"""Generates responses, or plays episodes, on a rank's rollout engine."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa

from engines.commands.rollout import EngineResponses, Episodes, Generate
from engines.ranks.handlers import carries_out
from engines.ranks.models import RankModels
from engines.rollout.announcing import Announcer
from engines.rollout.detokenize import decode
from engines.rollout.episodes import Environments, Played


@carries_out(Generate)
def generate(models: RankModels, command: Generate) -> EngineResponses | None:
    """Of an engine's ranks the first replies; it tells of responses that end before others."""
    generator, environments = models.rollout_engine(), _environments(models, command)
    speaks = not generator.place.rank_in_engine
    announcer = Announcer(partial(decode, models.tokenizer(command.tokenizer)), models.tell)
    generation = generator.generation(
        command.prompts, command.sampling, models.next_generation(), environments, announcer if speaks else None
    )
    generator.loop.run(generation)
    if not speaks:
        return None
    generated = generation.generated()
    return EngineResponses(
        positions_P=generated.positions_P,
        responses=generated.responses,
        logprobs_T=generated.logprobs_T,
        truncated_B=generated.truncated_B,
        texts=pa.array(announcer.texts(generated.responses), pa.large_string()),
        policy_version=models.verified_version,
        request_seconds_B=generated.seconds_B,
        engine_seconds=generated.seconds,
        wake_seconds=generator.wake_seconds,
        prompt_tokens=generated.prompt_tokens,
        cached_tokens=generated.cached_tokens,
        episodes=episodes_of(generated) if isinstance(generated, Played) else None,
    )


def _environments(models: RankModels, command: Generate) -> Environments | None:
    """Return what plays with the policy, if the command is about episodes."""
    if command.episodes is None or models.config.environment is None:
        return None
    tokenizer, asked = models.tokenizer(command.tokenizer), command.episodes
    return models.environments.open(models.config.environment, tokenizer, asked.table, asked.prompt_ids)


def episodes_of(played: Played) -> Episodes:
    """Return what episodes have beyond responses."""
    rewards = [np.nan if reply.reward is None else reply.reward for reply in played.replies]
    return Episodes(
        loss_mask_T=played.mask_T,
        turns_B=played.turns_B,
        rewards_B=np.asarray(rewards, np.float64),
        parts_B=[reply.parts for reply in played.replies],
        failures_B=[reply.failure for reply in played.replies],
        waited_seconds=played.waited_seconds,
    )
