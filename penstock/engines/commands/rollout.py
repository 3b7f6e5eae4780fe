"""Commands to the rollout engine, and what it tells of a generation and replies to it.

Suffixes: `_P` prompts that an engine took, `_B` responses, `_T` tokens of all responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from penstock.base.ragged import Ragged
from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    `seed` is three numbers, from which no other generation's random streams start. (NumPy fills shorter seeds up with
    zeros, so a seed of another length could equal another generation's.)
    """

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    ignore_eos: bool
    seed: list[int]
    logprobs: bool = False  # whether each token's log-prob is asked for, under the distribution it is sampled from
    routes: bool = False  # whether the experts are that each token takes


@dataclass(frozen=True)
class Sharing:
    """Which ranks share the prompts of a generation: those of all groups that generate, one group after the other."""

    ranks: int
    before: int  # of them, those of the groups before this one


@dataclass(frozen=True)
class EpisodeRows:
    """The data rows that environments see: prompts of a table, by id, in the order of the prompts."""

    table: str
    prompt_ids: list[str]


@dataclass(frozen=True)
class Paths:
    """How the responses of episodes are cut into conversations, one after the other; all int32.

    The first one's prompt is the episode's.
    """

    ends: Ragged  # where each of them ends in the response
    prompts: Ragged  # those of the others, one after the other
    prompt_ends: Ragged  # where each of these ends among them


@dataclass(frozen=True)
class Asked:
    """What agents bring themselves, for each episode."""

    prompts: Ragged  # int32
    texts_B: list[str]  # of these, control tokens included
    unbridged_B: np.ndarray  # int64: turns that are not learnt from, since they did not follow those before
    paths: Paths | None = None  # where several are learnt from


@dataclass(frozen=True)
class Episodes:
    """What episodes have beyond responses, for each episode or token of an engine's responses."""

    loss_mask_T: np.ndarray  # uint8: 1 for tokens that the policy sampled, 0 for observations
    turns_B: np.ndarray  # int64
    rewards_B: np.ndarray  # float64; NaN where the environment gave none
    parts_B: list[dict[str, float]]  # of the reward, by name
    failures_B: list[str | None]
    waited_seconds: float  # in which vLLM stood still because environments had not answered
    asked: Asked | None = None  # where agents ask the policy


NO_SEED = -1  # of an episode that has not begun
NO_ENGINE = -1  # has anything that lives of a response


@dataclass(frozen=True)
class CarriedEpisodes:
    """What play with an environment adds to carried responses."""

    seeds_B: np.ndarray  # int64: of the environment's `reset`, by which its episode is known, or NO_SEED
    loss_mask_T: np.ndarray  # uint8: as in `Episodes`
    turn_ends: Ragged  # int32: how many tokens an episode had at the end of each turn, its paths one after the other
    owed_B: np.ndarray  # bool: the environment has not answered the last turn, or `reset`
    rewards_B: np.ndarray  # float64; these three are those of the turns so far
    parts_B: list[dict[str, float]]
    failures_B: list[str | None]
    asked: Asked | None = None  # of agents' episodes
    known_B: list[str] | None = None  # of agents' that go on: a digest of all that their engine knows of each


@dataclass(frozen=True)
class CarriedResponses:
    """What was sampled of responses that a generation left, for another to go on with; of a prompt side by side."""

    tokens: Ragged
    logprobs_T: np.ndarray  # float32, under the distributions that the tokens were sampled from; empty: not asked for
    versions_T: np.ndarray  # int32: the policy version that sampled each token, or that read it, of an observation
    ended_B: np.ndarray  # bool: no token is missing
    truncated_B: np.ndarray  # bool: cut at max_tokens
    episodes: CarriedEpisodes | None = None  # with an environment
    engines_B: np.ndarray | None = None  # int32: that has its episode or keys, or NO_ENGINE; None: of none is it known


@dataclass(frozen=True)
class EndedResponses:
    """Responses that have ended, to whichever prompts of a generation; entry by entry the prompt's position, sample."""

    positions: np.ndarray  # int64
    samples: np.ndarray  # int64
    responses: CarriedResponses


@dataclass(frozen=True)
class PartialResults:
    """News: responses that have ended, in that order, and the text of each."""

    engine: int  # that generated them
    ended: EndedResponses
    texts: pa.LargeStringArray
    counted: list[int] | None = None  # with a quota: positions of prompts that make the batch, as of now; None: all do


@dataclass(frozen=True)
class EngineResponses:
    """What one engine answered: `samples` responses side by side for each of its prompts."""

    positions_P: np.ndarray  # the prompts, in the order in which the engine took them
    responses: Ragged
    logprobs_T: np.ndarray | None  # of the responses' tokens, where they were asked for
    truncated_B: np.ndarray  # bool: cut at max_tokens
    texts: pa.LargeStringArray
    policy_version: int  # with which the generation began
    first_version_B: np.ndarray  # int64: the policy version that sampled a response's first token
    last_version_B: np.ndarray  # int64: and its last
    request_seconds_B: np.ndarray  # from submission to the last token
    engine_seconds: float  # from the first request to the last token
    wake_seconds: float
    prompt_tokens: int  # of all requests, a prompt counting once per sample
    cached_tokens: int  # of those, found in the prefix cache
    unused_tokens: int = 0  # sampled for prompts that are not among these, since enough others were answered
    episodes: Episodes | None = None  # of play with an environment
    versions_T: np.ndarray | None = None  # int32: the policy version that sampled each token, where responses go on
    left_P: np.ndarray | None = None  # where they go on: the prompts that this engine has begun and not answered,
    left: CarriedResponses | None = None  # and what there is of the responses to them
    routes: Ragged | None = None  # experts of each token, of the prompts too, layer after layer, where they were asked


@dataclass(frozen=True)
class Generate(Command[EngineResponses | None]):
    """Generate responses to those of the prompts that fall to this rank's engine.

    Of an engine's ranks the first replies, and tells of responses that end before others (`PartialResults`).
    """

    news: ClassVar[type] = PartialResults
    number: int  # that no other generation of these engines has
    prompts: Ragged
    sampling: Sampling
    tokenizer: str  # its folder
    episodes: EpisodeRows | None = None  # for play with an environment
    wanted: int | None = None  # prompts that all engines have to answer together; None: all
    required: int = 0  # of those, how many are the first ones, with whose responses the engines go on
    carried: CarriedResponses | None = None  # of responses to the first prompts; None: what is not answered is dropped
    ended: EndedResponses | None = None  # that are there already, of a generation that was cut off
    together: int | None = None  # prompts under way at a time on all engines; None: as many as there is room for
    tell_all: bool = False  # also of responses that end last, which the reply brings all the same
    sharing: Sharing | None = None  # None: this group's ranks alone
    images: Ragged | None = None  # int64: of each prompt those of its images (penstock/engines/batches/images.py)
