"""Generates responses, or plays episodes, on a rank's rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from penstock.engines.commands.rollout import EngineResponses, Episodes, Generate
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import Later, begins, single_turns
from penstock.engines.rollout.detokenize import decode
from penstock.engines.rollout.environments.host import Environments
from penstock.engines.rollout.episodes import EpisodeLoop, Played
from penstock.engines.rollout.games.loop import GameLoop
from penstock.engines.rollout.partial_results import PartialResultSender
from penstock.engines.rollout.responses import SingleResponses


@begins(Generate, during_generation=single_turns)
def generate(models: RankModels, command: Generate) -> Later[EngineResponses | None]:
    """Begin a generation. The first rank of an engine replies, and tells of responses that end before others."""
    generator, environments = models.rollout_engine(), _environments(models, command)
    of_text = partial(decode, models.tokenizer(command.tokenizer))
    engine = generator.place_among(command.sharing).engine
    sender = PartialResultSender(of_text, models.newest.tell, engine, command.tell_all)
    speaks = not generator.place.rank_in_engine
    generation = generator.generation(command, environments, sender if speaks else None)
    generator.loop.submit(generation)
    if not speaks:
        return Later(generation, lambda: None)
    weights = Weights(models.verified_version, generator.wake_seconds)
    return Later(generation, lambda: _responses(generation, sender, weights))


@dataclass(frozen=True)
class Weights:
    """The weights with which a generation began, and what it waited for them."""

    version: int
    wake_seconds: float


def _responses(
    generation: SingleResponses | EpisodeLoop | GameLoop, sender: PartialResultSender, began_with: Weights
) -> EngineResponses:
    generated = generation.generated()
    return EngineResponses(
        positions_P=generated.positions_P,
        responses=generated.responses,
        logprobs_T=generated.logprobs_T,
        truncated_B=generated.truncated_B,
        texts=pa.array(sender.texts(generated.rows_B, generated.responses), pa.large_string()),
        policy_version=began_with.version,
        first_version_B=generated.first_version_B,
        last_version_B=generated.last_version_B,
        request_seconds_B=generated.seconds_B,
        engine_seconds=generated.seconds,
        wake_seconds=began_with.wake_seconds,
        prompt_tokens=generated.prompt_tokens,
        cached_tokens=generated.cached_tokens,
        unused_tokens=generated.unused_tokens,
        episodes=episodes_of(generated) if isinstance(generated, Played) else None,
        versions_T=generated.versions_T,
        left_P=None if generated.left is None else generated.left.positions_P,
        left=None if generated.left is None else generated.left.responses,
        routes=generated.routes,
    )


def _environments(models: RankModels, command: Generate) -> Environments | None:
    """Return what plays with the policy, if the command is about episodes."""
    if command.episodes is None or models.config.environment is None:
        return None
    tokenizer, asked = models.tokenizer(command.tokenizer), command.episodes
    config = models.config.environment
    return models.environments.open(config, tokenizer, asked.table, asked.prompt_ids, models.config.data)


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
        asked=played.asked,
    )
