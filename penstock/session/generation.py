"""Sends prompts to the rollout ranks and collects their responses; used by rollout and evaluate. Not a task itself.

A generation may be begun ahead of the task that wants it: the engines then work while the flow does something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from penstock.base.ragged import Ragged, offsets_of
from penstock.session.episodes import episode_columns, waiting_figures
from penstock.session.session import Replies, Training


@dataclass(frozen=True)
class Responses:
    """Responses to prompts, `samples` rows per prompt in prompt order."""

    tokens: Ragged
    texts: pa.LargeStringArray
    truncated_B: np.ndarray
    policy_version: int
    metrics: dict[str, float]
    loss_mask: Ragged  # 1 for the policy's own tokens, 0 for observations
    episodes: dict[str, Any]  # columns of episodes; none without an environment
    logprobs: Ragged | None = None  # of the tokens, where they were asked for


def begin_generation(
    training: Training,
    prompts: pd.DataFrame,
    key: str,
    seed: list[int],
    sampling: dict[str, Any],
    on_ended: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Begin what `generate` with the same arguments will wait for, and return at once."""
    session = training.session()
    asked = (training, prompts, key, seed, sampling, "train", on_ended)
    session.generations[key] = session.generating.submit(_ask, *asked)


def generate(
    training: Training,
    prompts: pd.DataFrame,
    key: str,
    seed: list[int],
    sampling: dict[str, Any],
    split: str = "train",
    on_ended: Callable[[dict[str, Any]], None] | None = None,
) -> Responses:
    """Generate responses; the engines share the prompts out among themselves (engines/rollout/prompt_queue.py).

    With an environment a response is an episode: the policy's turns and the observations between them.

    Args:
        prompts: rows of a prompt table.
        key: idempotency key of the command.
        seed: three numbers that make this generation's random draws unique. (NumPy fills shorter seeds up with zeros:
            of another length, they could equal another generation's.)
        sampling: fields of `engines.rollout.decode_loop.Sampling` without the seed.
        split: prompt table that the prompts come from; environments see its columns.
        on_ended: gets responses that have ended before others: an engine's news, or its reply.

    Raises:
        RuntimeError: the engines did not answer each prompt exactly once.
    """
    wanted_at, begun = time.perf_counter(), training.session().generations.pop(key, None)
    replies = begun.result() if begun else _ask(training, prompts, key, seed, sampling, split, on_ended)
    ahead = {"rollout/ahead_s": min(wanted_at, replies.ended) - replies.began} if begun else {}
    answers = [reply for reply in replies.ranks if reply]  # of an engine of several ranks one replies
    rows_B = rows_in_prompt_order([answer["positions"] for answer in answers], len(prompts), sampling["samples"])
    lengths = np.concatenate([np.diff(answer["offsets"]) for answer in answers])

    def in_order(name: str) -> Ragged:
        return Ragged(np.concatenate([answer[name] for answer in answers]), offsets_of(lengths)).take(rows_B)

    tokens = in_order("tokens")
    return Responses(
        tokens=tokens,
        texts=pa.concat_arrays([answer["texts"] for answer in answers]).take(pa.array(rows_B)),
        truncated_B=np.concatenate([answer["truncated"] for answer in answers])[rows_B],
        policy_version=int(answers[0]["policy_version"]),
        metrics=engine_figures(answers, replies.ended - replies.began) | waiting_figures(answers) | ahead,
        loss_mask=_all_counted(tokens) if training.config.environment is None else in_order("loss_mask"),
        episodes=episode_columns(answers, rows_B),
        logprobs=in_order("logprobs") if sampling.get("logprobs") else None,
    )


def _ask(
    training: Training,
    prompts: pd.DataFrame,
    key: str,
    seed: list[int],
    sampling: dict[str, Any],
    split: str,
    on_ended: Callable[[dict[str, Any]], None] | None,
) -> Replies:
    session = training.session()
    asked = Ragged.of(list(prompts["prompt_tokens"]), np.int32)
    episodes = {}
    if training.config.environment is not None:
        table, ids = str(training.run.prompts(split)), [str(name) for name in prompts["prompt_id"]]
        episodes = {"episodes": {"table": table, "prompt_ids": ids}}
    began = time.perf_counter()
    replies = session.call(
        "rollout",
        "generate",
        key,
        prompts=asked.values_T,
        offsets=asked.offsets_B1,
        sampling={**sampling, "seed": seed},
        tokenizer=session.model_folder,
        on_news=on_ended,
        **episodes,
    )
    return Replies(replies, began, time.perf_counter())


def _all_counted(tokens: Ragged) -> Ragged:
    return Ragged(np.ones(len(tokens.values_T), np.uint8), tokens.offsets_B1)


def rows_in_prompt_order(positions: Sequence[np.ndarray], prompts: int, samples: int) -> np.ndarray:
    """Return where each response is, in the order of the prompts, among those of all engines one after the other.

    Args:
        positions: of each engine, the prompts it answered, with `samples` responses side by side for each.

    Raises:
        RuntimeError: a prompt was answered twice or by no engine.
    """
    answered = np.concatenate(positions)
    times = np.bincount(answered, minlength=prompts)
    if (wrong := np.flatnonzero(times != (np.arange(len(times)) < prompts))).size:
        first = f"number {wrong[0]} came {times[wrong[0]]} times"
        raise RuntimeError(f"{wrong.size} of {prompts} prompts were not answered exactly once ({first})")
    return (np.argsort(answered)[:, None] * samples + np.arange(samples)).ravel()


def engine_figures(answers: Sequence[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Return how long requests took and how evenly the engines worked during a generation of `seconds`.

    A request is one response, from its submission to its last token. An engine is idle from its last token to the end
    of the generation, and while it wakes up or its responses are decoded.
    """
    waited_B = np.concatenate([answer["request_seconds"] for answer in answers])
    busy = [answer["engine_seconds"] for answer in answers]
    tokens = [len(answer["tokens"]) for answer in answers]
    prompt_tokens = sum(answer["prompt_tokens"] for answer in answers)
    return {
        "rollout/request_s_mean": float(waited_B.mean()),
        "rollout/request_s_p50": float(np.quantile(waited_B, 0.5)),
        "rollout/request_s_p95": float(np.quantile(waited_B, 0.95)),
        "rollout/request_s_max": float(waited_B.max()),
        "rollout/wake_s": max(answer["wake_seconds"] for answer in answers),
        "rollout/engine_idle_share": 1 - float(np.mean(busy)) / seconds,
        "rollout/engine_balance": min(busy) / max(busy),
        "rollout/engine_tokens_min": float(min(tokens)),
        "rollout/engine_tokens_max": float(max(tokens)),
        "rollout/engine_prefix_hits": sum(answer["cached_tokens"] for answer in answers) / prompt_tokens,
    }
