"""Generations: the rollout ranks answer prompts, and their replies become rows in the order of the prompts.

A generation is begun and taken. In between the engines work, and the flow may do something else: the next rollout runs
beside the record of the iteration before. Not a task; rollout, resample, greedy baseline and evaluation use it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from penstock.base.ragged import Ragged
from penstock.data.prompts import IMAGES_OF_PROMPT
from penstock.engines.commands.rollout import (
    Asked,
    CarriedResponses,
    EndedResponses,
    EngineResponses,
    EpisodeRows,
    Generate,
)
from penstock.engines.groups.group import RankLost
from penstock.session.requests import BegunGeneration, GenerationRequest, Replies
from penstock.session.rollout.carried import left_over
from penstock.session.rollout.ended import EndedFile, other_streams
from penstock.session.rollout.episodes import episode_columns, waiting_figures
from penstock.session.rollout.told import News, Told
from penstock.session.session import Training


@dataclass(frozen=True)
class Responses:
    """Responses to the prompts that were answered, `samples` rows per prompt in prompt order.

    Of a game these are those of the first agent, then those of the second, and so on.
    """

    answered_P: np.ndarray  # positions of those prompts
    tokens: Ragged
    texts: pa.LargeStringArray
    truncated_B: np.ndarray
    policy_version: int
    metrics: dict[str, float]
    loss_mask: Ragged  # 1 for the policy's own tokens, 0 for observations
    episodes: dict[str, Any]  # columns of episodes; none without an environment
    logprobs: Ragged | None = None  # of the tokens, where they were asked for
    unused_tokens: int = 0  # sampled for prompts that were not answered
    policy_versions: Ragged | None = None  # that sampled each token, where responses are carried over,
    left: CarriedResponses | None = None  # and what there is of responses to the prompts that were not answered
    asked: Asked | None = None  # where agents bring the prompts, instead of the data
    routes: Ragged | None = None  # experts of each token, of the prompts too, where they were asked for

    def prompts_of(self, data: pd.DataFrame, samples: int) -> tuple[list[str], Ragged]:
        """Return text and tokens of the prompt of each response.

        Args:
            data: the prompts that were answered; of each `samples` responses.
        """
        if self.asked is not None:
            return self.asked.texts_B, self.asked.prompts
        rows_B = np.repeat(np.arange(len(data)), samples)
        tokens = Ragged.of(list(data["prompt_tokens"]), np.int32)
        return list(data["prompt_text"].to_numpy()[rows_B]), tokens.take(rows_B)


def generate(training: Training, request: GenerationRequest) -> Responses:
    """Begin a generation and wait for it; raises what `take_responses` raises."""
    return take_responses(training, begin_generation(training, request))


def begin_generation(
    training: Training, request: GenerationRequest, hearers: Sequence[News] = (), kept: EndedFile | None = None
) -> BegunGeneration:
    """Let the engines begin; they share out the prompts among themselves (penstock/engines/rollout/prompt_queue.py).

    With an environment a response is an episode: the policy's turns and the observations between them.

    Args:
        hearers: get responses that have ended before others: an engine's news, or its reply.
        kept: gets them, too, and is closed at the end.
    """
    return BegunGeneration(request, training.session().generating.submit(_ask, training, request, hearers, kept))


def await_rollouts(training: Training) -> None:
    """Wait until the engines have ended all that they have begun."""
    for replies in training.session().awaited_replies:
        replies.result()


def take_responses(training: Training, generation: BegunGeneration, wanted_at: float | None = None) -> Responses:
    """Wait for a generation and return its responses.

    `rollout/ahead_s` in their metrics says for how long the engines worked before anybody waited.

    Args:
        wanted_at: since when somebody does, `time.perf_counter`; None: from now on.

    Raises:
        RolloutStalled: the engines have not answered by the deadline of a command.
        RuntimeError: they did not answer each prompt exactly once, or not as many as were wanted.
    """
    wanted_at = time.perf_counter() if wanted_at is None else wanted_at
    replies, request = generation.replies.result(), generation.request
    ahead = {"rollout/ahead_s": max(0.0, min(wanted_at, replies.ended) - replies.began)}
    answers = [reply for reply in replies.ranks if reply is not None]  # of an engine of several ranks one replies
    engines = {} if training.session().elastic is None else {"rollout/engines": float(len(answers))}
    positions = [answer.positions_P for answer in answers]
    rows_of_prompt = request.sampling.samples * training.config.conversations
    rows_B = rows_in_prompt_order(positions, len(request.prompts), rows_of_prompt, request.wanted)
    responses = Ragged.concatenated([answer.responses for answer in answers])

    def in_order(columns: Sequence[np.ndarray | None]) -> Ragged | None:
        """Put a column of all engines' tokens in the order of the prompts; None where there is none."""
        parts = [column for column in columns if column is not None]
        return Ragged(np.concatenate(parts), responses.offsets_B1).take(rows_B) if parts else None

    tokens = responses.take(rows_B)
    routes = [answer.routes for answer in answers if answer.routes is not None]
    asked = [answer.episodes.asked for answer in answers if answer.episodes and answer.episodes.asked]
    counted = in_order([None if answer.episodes is None else answer.episodes.loss_mask_T for answer in answers])
    return Responses(
        answered_P=np.sort(np.concatenate(positions)),
        tokens=tokens,
        texts=pa.concat_arrays([answer.texts for answer in answers]).take(pa.array(rows_B)),
        truncated_B=np.concatenate([answer.truncated_B for answer in answers])[rows_B],
        policy_version=answers[0].policy_version,
        metrics=engine_figures(answers, replies.ended - replies.began) | waiting_figures(answers) | ahead | engines,
        loss_mask=all_counted(tokens) if counted is None else counted,
        episodes=episode_columns([answer.episodes for answer in answers if answer.episodes is not None], rows_B),
        logprobs=in_order([answer.logprobs_T for answer in answers]),
        unused_tokens=sum(answer.unused_tokens for answer in answers),
        policy_versions=in_order([answer.versions_T for answer in answers]),
        left=_left(request, answers, positions),
        asked=asked_in_order(asked, rows_B),
        routes=Ragged.concatenated(routes).take(rows_B) if routes else None,
    )


def asked_in_order(asked: Sequence[Asked], rows_B: np.ndarray) -> Asked | None:
    """Return what agents of all engines bring, rows in the order `rows_B`; None without them."""
    if not asked:
        return None
    texts = [text for part in asked for text in part.texts_B]
    prompts = Ragged.concatenated([part.prompts for part in asked]).take(rows_B)
    unbridged_B = np.concatenate([part.unbridged_B for part in asked])[rows_B]
    return Asked(prompts, [texts[row] for row in rows_B.tolist()], unbridged_B)


def _left(
    request: GenerationRequest, answers: Sequence[EngineResponses], answered: Sequence[np.ndarray]
) -> CarriedResponses | None:
    if request.carried is None:
        return None
    unanswered_P = np.setdiff1d(np.arange(len(request.prompts)), np.concatenate(answered)).tolist()
    return left_over(request.carried, answers, unanswered_P, request.sampling.samples)


def _ask(training: Training, request: GenerationRequest, hearers: Sequence[News], kept: EndedFile | None) -> Replies:
    """Have the engines answer; when an elastic group is lost, have the others answer what it has not."""
    session, prompts = training.session(), request.prompts
    asked = Ragged.of(list(prompts["prompt_tokens"]), np.int32)
    episodes = None
    if training.config.environment is not None:
        ids = [str(name) for name in prompts["prompt_id"]]
        episodes = EpisodeRows(str(training.run.prompts(request.split)), ids)
    began = time.perf_counter()
    command = Generate(
        next(session.generations),
        asked,
        request.sampling,
        session.model_folder,
        episodes,
        request.wanted,
        request.required,
        request.carried,
        request.ended,
        request.together,
        request.tell_all,
        images=images_of(prompts),
    )
    told = Told(request, hearers, kept, remembers=session.elastic is not None and episodes is None)
    try:
        replies, complete = session.generate(command, request.key, told.hear)
        while not complete:
            command = _rest(command, told.ended(replies), next(session.generations), session.reproducible)
            replies, complete = session.generate(command, f"{request.key}-{command.number}", told.hear)
    except RankLost as loss:
        if not loss.flow_stacks:
            raise  # it is gone, or silent
        raise told.stalled(loss) from loss
    finally:
        if kept is not None:
            kept.close()
    return Replies(replies, began, time.perf_counter())


def images_of(prompts: pd.DataFrame) -> Ragged | None:
    """Return the numbers of each prompt's images; None where prompts have none."""
    if IMAGES_OF_PROMPT not in prompts.columns:
        return None
    return Ragged.of(list(prompts[IMAGES_OF_PROMPT]), np.int64)


def _rest(command: Generate, ended: EndedResponses | None, number: int, reproducible: bool) -> Generate:
    """Return the command for what has not ended; without any that has, for all."""
    sampling = command.sampling
    if ended is not None and not reproducible:
        sampling = other_streams(sampling, len(ended.positions))
    return dataclasses.replace(command, number=number, ended=ended, sampling=sampling)


def all_counted(tokens: Ragged) -> Ragged:
    """Return the loss mask of responses whose every token is the policy's."""
    return Ragged(np.ones(len(tokens.values_T), np.uint8), tokens.offsets_B1)


def rows_in_prompt_order(
    positions: Sequence[np.ndarray], prompts: int, samples: int, wanted: int | None = None
) -> np.ndarray:
    """Return for each response, in the order of the prompts, its row among the responses of all engines in turn.

    Args:
        positions: of each engine, the prompts it answered, with `samples` responses side by side for each.
        wanted: how many of the prompts are to be answered; None: all.

    Raises:
        RuntimeError: a prompt was answered twice or by no engine, or another number of them than wanted.
    """
    answered = np.concatenate(positions)
    times = np.bincount(answered, minlength=prompts)
    usual = np.arange(len(times)) < prompts
    if (wrong := np.flatnonzero(times != usual if wanted is None else times > usual)).size:
        first = f"number {wrong[0]} came {times[wrong[0]]} times"
        raise RuntimeError(f"{wrong.size} of {prompts} prompts were not answered exactly once ({first})")
    if wanted is not None and len(answered) != wanted:
        raise RuntimeError(f"{len(answered)} prompts were answered, and {wanted} were wanted")
    return (np.argsort(answered)[:, None] * samples + np.arange(samples)).ravel()


def engine_figures(answers: Sequence[EngineResponses], seconds: float) -> dict[str, float]:
    """Return how long requests took and how evenly the engines worked during a generation of `seconds`.

    A request is one response, from its submission to its last token, and a prompt takes as long as its longest. An
    engine is idle from its last token to the end of the generation, and while it wakes up or its responses are decoded.
    """
    waited_B = np.concatenate([answer.request_seconds_B for answer in answers])
    samples = len(waited_B) // sum(len(answer.positions_P) for answer in answers)
    waited_P = waited_B.reshape(-1, samples).max(axis=1)
    busy = [answer.engine_seconds for answer in answers]
    tokens = [len(answer.responses.values_T) for answer in answers]
    prompt_tokens = max(1, sum(answer.prompt_tokens for answer in answers))  # 0: all had ended before
    return {
        "rollout/request_s_mean": float(waited_B.mean()),
        "rollout/request_s_p50": float(np.quantile(waited_B, 0.5)),
        "rollout/request_s_p95": float(np.quantile(waited_B, 0.95)),
        "rollout/request_s_max": float(waited_B.max()),
        "rollout/prompt_s_p80": float(np.quantile(waited_P, 0.8)),
        "rollout/prompt_s_max": float(waited_P.max()),
        "rollout/wake_s": max(answer.wake_seconds for answer in answers),
        "rollout/engine_idle_share": 1 - float(np.mean(busy)) / seconds,
        "rollout/engine_balance": min(busy) / max(busy),
        "rollout/engine_tokens_min": float(min(tokens)),
        "rollout/engine_tokens_max": float(max(tokens)),
        "rollout/engine_prefix_hits": sum(answer.cached_tokens for answer in answers) / prompt_tokens,
    }
