"""Carried responses: what a rollout leaves unfinished waits in the run folder for the next, which goes on with it.

A file `experience/000012.carried.parquet` beside the experience of the rollout that left it, a row per response, those
to a prompt side by side, in the order in which the prompts wait. It is written before the experience, whose origin has
its digest: so whoever takes over one has the other. Where it is missing or damaged the prompts wait all the same, and
their responses begin anew.

Suffixes: `_P` prompts, `_B` responses, `_T` tokens of all responses.
Left out: which prompts wait (rounds.py), what engines make of it (penstock/engines/rollout/carried.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import (
    NO_ENGINE,
    NO_SEED,
    Asked,
    CarriedEpisodes,
    CarriedResponses,
    EngineResponses,
)
from penstock.session.session import Training
from penstock.state.deferred import Deferred
from penstock.state.experience import column_names, read_columns, write_columns
from penstock.state.run_folder import RunFolder

ROW = "row"  # column: of the response's prompt, in the table of prompts
CARRIED = "carried"  # in the origin of experience: digest of what its rollout has left
POLICY_VERSIONS = "policy_versions"  # column of experience: the policy version that sampled each token
NOT_BEGUN = CarriedResponses(
    tokens=Ragged.of([[]], np.int32),
    logprobs_T=np.empty(0, np.float32),
    versions_T=np.empty(0, np.int32),
    ended_B=np.zeros(1, bool),
    truncated_B=np.zeros(1, bool),
)
NO_EPISODE = CarriedEpisodes(
    seeds_B=np.full(1, NO_SEED, np.int64),
    loss_mask_T=np.empty(0, np.uint8),
    turn_ends=Ragged.of([[]], np.int32),
    owed_B=np.zeros(1, bool),
    rewards_B=np.full(1, np.nan),
    parts_B=[{}],
    failures_B=[None],
)


def begun_before(training: Training, iteration: int, waiting: Sequence[Deferred]) -> CarriedResponses:
    """Return what the rollouts of `iteration` have left of responses to prompts that wait.

    It is empty where that is not known any more.
    """
    path, samples = training.run.carried(iteration), training.config.rollout.samples
    nothing = not_begun(len(waiting) * samples, training.config.environment is not None)
    if not waiting:
        return nothing
    rows = np.repeat([prompt.row for prompt in waiting], samples)
    if not path.exists() or not np.array_equal(read_columns(path, [ROW])[ROW], rows):
        said = "%s does not hold what there was of responses to the prompts that wait: they begin anew"
        get_run_logger().warning(said, path)
        return nothing
    return _read(path)


def is_kept(run: RunFolder, iteration: int, digest: str) -> bool:
    """Whether the file of what the rollout of `iteration` has left is the one with this digest."""
    path = run.carried(iteration)
    return path.exists() and digest_of(_read(path)) == digest


def _read(path: Path) -> CarriedResponses:
    columns = read_columns(path, [name for name in column_names(path) if name != ROW])
    return CarriedResponses(
        tokens=columns["tokens"],
        logprobs_T=columns["logprobs"].values_T,
        versions_T=columns[POLICY_VERSIONS].values_T,
        ended_B=columns["ended"].astype(bool),
        truncated_B=columns["truncated"].astype(bool),
        episodes=_episodes_in(columns) if "seed" in columns else None,
        engines_B=columns.get("engine"),
    )


def _episodes_in(columns: Mapping[str, Any]) -> CarriedEpisodes:
    asked = None
    if "unbridged" in columns:
        asked = Asked(columns["prompt_tokens"], list(columns["prompt"]), columns["unbridged"])
    return CarriedEpisodes(
        seeds_B=columns["seed"],
        loss_mask_T=columns["loss_mask"].values_T,
        turn_ends=columns["turn_ends"],
        owed_B=columns["owed"].astype(bool),
        rewards_B=columns["reward"],
        parts_B=[json.loads(parts) for parts in columns["reward_parts"]],
        failures_B=list(columns["failure"]),
        asked=asked,
        known_B=list(columns["known"]) if "known" in columns else None,
    )


def keep_carried(run: RunFolder, iteration: int, left: CarriedResponses, waiting: Sequence[Deferred]) -> str:
    """Write what the rollout of `iteration` has left of responses to the prompts that wait; return its digest."""
    samples = len(left.tokens) // max(1, len(waiting))
    rows_B = np.repeat(np.asarray([prompt.row for prompt in waiting], np.int64), samples)
    write_columns(run.carried(iteration), {ROW: rows_B, **_columns(left)})
    return digest_of(left)


def _columns(left: CarriedResponses) -> dict[str, Any]:
    offsets_B1 = left.tokens.offsets_B1
    columns = {
        "tokens": left.tokens,
        "logprobs": logprobs_of(left),
        POLICY_VERSIONS: Ragged(left.versions_T, offsets_B1),
        "ended": left.ended_B.astype(np.uint8),
        "truncated": left.truncated_B.astype(np.uint8),
        **({} if left.engines_B is None else {"engine": left.engines_B}),
    }
    if left.episodes is None:
        return columns
    return columns | {
        "seed": left.episodes.seeds_B,
        "loss_mask": Ragged(left.episodes.loss_mask_T, offsets_B1),
        "turn_ends": left.episodes.turn_ends,
        "owed": left.episodes.owed_B.astype(np.uint8),
        "reward": left.episodes.rewards_B,
        "reward_parts": [json.dumps(parts) for parts in left.episodes.parts_B],
        "failure": left.episodes.failures_B,
        **_asked_columns(left.episodes),
    }


def _asked_columns(episodes: CarriedEpisodes) -> dict[str, Any]:
    """Return the columns that agents' episodes have besides."""
    if episodes.asked is None:
        return {}
    asked, known = episodes.asked, {} if episodes.known_B is None else {"known": episodes.known_B}
    return {"prompt_tokens": asked.prompts, "prompt": asked.texts_B, "unbridged": asked.unbridged_B, **known}


def logprobs_of(responses: CarriedResponses) -> Ragged:
    """Return the tokens' log-probs row by row; empty rows where nobody asked for them."""
    offsets_B1 = responses.tokens.offsets_B1
    return Ragged(responses.logprobs_T, offsets_B1 if len(responses.logprobs_T) else np.zeros_like(offsets_B1))


def digest_of(left: CarriedResponses) -> str:
    """Return a digest of all that is left."""
    digest = hashlib.sha256()
    for name, column in sorted(_columns(left).items()):
        digest.update(name.encode() + _bytes_of(column))
    return digest.hexdigest()


def _bytes_of(column: Any) -> bytes:
    if isinstance(column, Ragged):
        return column.offsets_B1.tobytes() + column.values_T.tobytes()
    return column.tobytes() if isinstance(column, np.ndarray) else json.dumps(column).encode()


def left_over(
    before: CarriedResponses, answers: Sequence[EngineResponses], unanswered_P: Sequence[int], samples: int
) -> CarriedResponses:
    """Return what there is of responses to prompts that a rollout has not answered.

    What engines tell of them replaces what was there before: prompts that no engine has got to are as they were.

    Args:
        before: of responses to the first prompts.
        unanswered_P: positions of the prompts, ascending.
    """
    parts = [not_begun(1, before.episodes is not None), before]
    first_rows = {at: 1 + at * samples for at in range(len(before.tokens) // samples)}
    rows = 1 + len(before.tokens)
    for answer in answers:
        if answer.left is not None and answer.left_P is not None:
            first_rows |= {at: rows + number * samples for number, at in enumerate(answer.left_P.tolist())}
            rows += len(answer.left.tokens)
            parts.append(answer.left)
    wanted = [first_rows[at] + sample if at in first_rows else 0 for at in unanswered_P for sample in range(samples)]
    return taken(parts, np.asarray(wanted, np.int64))


def of_prompts(left: CarriedResponses, positions: Sequence[int], prompts: int) -> CarriedResponses:
    """Return what there is of responses to those at these positions, ascending, of so many prompts."""
    if len(positions) == prompts:
        return left
    samples = len(left.tokens) // prompts
    rows_B = np.asarray(positions, np.int64).repeat(samples) * samples + np.tile(np.arange(samples), len(positions))
    return taken([left], rows_B)


def not_begun(responses: int, environment: bool) -> CarriedResponses:
    """Return what there is of responses that have not begun.

    Args:
        environment: whether they will be episodes.
    """
    one = replace(NOT_BEGUN, episodes=NO_EPISODE) if environment else NOT_BEGUN
    return taken([one], np.zeros(responses, np.int64))


def taken(parts: Sequence[CarriedResponses], rows_B: np.ndarray) -> CarriedResponses:
    """Return the responses at some rows of all parts together."""
    tokens = Ragged.concatenated([part.tokens for part in parts])

    def of_tokens(values: Sequence[np.ndarray]) -> np.ndarray:
        of_all_T = np.concatenate(values)
        return Ragged(of_all_T, tokens.offsets_B1).take(rows_B).values_T if len(of_all_T) else of_all_T

    played = [part.episodes for part in parts if part.episodes is not None]
    return CarriedResponses(
        tokens=tokens.take(rows_B),
        logprobs_T=of_tokens([part.logprobs_T for part in parts]),
        versions_T=of_tokens([part.versions_T for part in parts]),
        ended_B=np.concatenate([part.ended_B for part in parts])[rows_B],
        truncated_B=np.concatenate([part.truncated_B for part in parts])[rows_B],
        episodes=_taken_episodes(played, of_tokens([part.loss_mask_T for part in played]), rows_B) if played else None,
        engines_B=np.concatenate([_engines_of(part) for part in parts])[rows_B],
    )


def _taken_episodes(parts: Sequence[CarriedEpisodes], loss_mask_T: np.ndarray, rows_B: np.ndarray) -> CarriedEpisodes:
    known = [known for part in parts for known in part.known_B or [""] * len(part.seeds_B)]
    earned = [pair for part in parts for pair in zip(part.parts_B, part.failures_B, strict=True)]
    return CarriedEpisodes(
        seeds_B=np.concatenate([part.seeds_B for part in parts])[rows_B],
        loss_mask_T=loss_mask_T,
        turn_ends=Ragged.concatenated([part.turn_ends for part in parts]).take(rows_B),
        owed_B=np.concatenate([part.owed_B for part in parts])[rows_B],
        rewards_B=np.concatenate([part.rewards_B for part in parts])[rows_B],
        parts_B=[earned[row][0] for row in rows_B],
        failures_B=[earned[row][1] for row in rows_B],
        asked=_taken_asked(parts, rows_B),
        known_B=[known[row] for row in rows_B] if any(known) else None,
    )


def _engines_of(part: CarriedResponses) -> np.ndarray:
    return np.full(len(part.ended_B), NO_ENGINE, np.int32) if part.engines_B is None else part.engines_B


def _taken_asked(parts: Sequence[CarriedEpisodes], rows_B: np.ndarray) -> Asked | None:
    """Return what agents bring at some rows of all parts; nothing of episodes that have not begun."""
    if all(part.asked is None for part in parts):
        return None
    asked = [part.asked or _nothing_asked(len(part.seeds_B)) for part in parts]
    texts = [text for part in asked for text in part.texts_B]
    return Asked(
        Ragged.concatenated([part.prompts for part in asked]).take(rows_B),
        [texts[row] for row in rows_B.tolist()],
        np.concatenate([part.unbridged_B for part in asked])[rows_B],
    )


def _nothing_asked(episodes: int) -> Asked:
    return Asked(Ragged.of([[]] * episodes, np.int32), [""] * episodes, np.zeros(episodes, np.int64))


def staleness_figures(policy_version: int, versions: Ragged | None, loss_mask: Ragged) -> dict[str, float]:
    """Return by how many updates the tokens' policies are older than the present one; nothing without carrying.

    Args:
        loss_mask: 1 for the policy's own tokens, which alone count.
    """
    if versions is None or not len(versions.values_T):
        return {}
    behind_T = policy_version - versions.values_T[loss_mask.values_T > 0]
    return {
        "rollout/staleness_mean": float(behind_T.mean()),
        "rollout/staleness_max": float(behind_T.max()),
        "rollout/off_policy_share": float((behind_T > 0).mean()),
    }
