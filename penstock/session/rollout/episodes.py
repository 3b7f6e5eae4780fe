"""What episodes add to experience, and how an environment's rewards join those of the reward source. Not a task itself.

Left out: playing them (penstock/engines/rollout/episodes.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.rollout import EngineResponses, Episodes, Paths
from penstock.environments.environment import REFUSED, TOOL_CALLS, TOOL_ERRORS
from penstock.rewards.pool import Score, log_first, refuse_too_many
from penstock.state.experience import AGENT, PATH_ENDS, PATH_PROMPT_ENDS, PATH_PROMPTS, PATHS, column_names

TURNS, REWARD, FAILURE = "turns", "environment_reward", "environment_failure"
UNBRIDGED = "unbridged_turns"  # of agents: that did not follow what was learnt from, and are not
PART = "environment/"  # columns of the named parts that an environment gave
CALLS, ERRORS, NOT_ANSWERED = (f"{PART}{name}" for name in (TOOL_CALLS, TOOL_ERRORS, REFUSED))
COUNTS = (CALLS, ERRORS, NOT_ANSWERED)  # which are no parts of its rewards


def episode_columns(played: Sequence[Episodes], rows_B: np.ndarray) -> dict[str, Any]:
    """Return the columns of episodes that all engines have played, rows in the order `rows_B`; none without them."""
    if not played:
        return {}
    parts = [part for episodes in played for part in episodes.parts_B]
    failures = [failure for episodes in played for failure in episodes.failures_B]
    names = sorted({name for part in parts for name in part})
    asked = [episodes.asked for episodes in played if episodes.asked is not None]
    return {
        **({UNBRIDGED: np.concatenate([part.unbridged_B for part in asked])[rows_B]} if asked else {}),
        **path_columns([part.paths for part in asked if part.paths is not None], rows_B),
        TURNS: np.concatenate([episodes.turns_B for episodes in played])[rows_B],
        REWARD: np.concatenate([episodes.rewards_B for episodes in played])[rows_B],
        FAILURE: [failures[row] for row in rows_B],
        **{f"{PART}{name}": np.asarray([parts[row].get(name, np.nan) for row in rows_B]) for name in names},
    }


def path_columns(parts: Sequence[Paths], rows_B: np.ndarray) -> dict[str, Ragged]:
    """Return the columns that say how samples are cut into conversations; none where each is one."""
    if not parts:
        return {}
    found = {
        PATH_ENDS: [part.ends for part in parts],
        PATH_PROMPTS: [part.prompts for part in parts],
        PATH_PROMPT_ENDS: [part.prompt_ends for part in parts],
    }
    return {name: Ragged.concatenated(columns).take(rows_B) for name, columns in found.items()}


def episode_column_names(path: Path) -> list[str]:
    """Return the columns of an experience file that episodes added."""
    own = (TURNS, REWARD, FAILURE, UNBRIDGED, *PATHS)
    return [name for name in column_names(path) if name in own or name.startswith(PART)]


def episode_figures(columns: Mapping[str, Any], conversations: int = 1) -> dict[str, float]:
    """Return figures of experience with the columns of episodes; none without them.

    Args:
        conversations: rows of an episode: a game has one of each agent, and all of them fail together.
    """
    if TURNS not in columns:
        return {}
    asked = UNBRIDGED in columns and conversations == 1  # what an agent of a game is shown always follows
    own = {"rollout/unbridged_turns": float(columns[UNBRIDGED].sum())} if asked else {}
    if PATH_ENDS in columns:
        own |= {"rollout/paths": float(columns[PATH_ENDS].lengths_B.mean())}
    if CALLS in columns:
        calls, errors = float(np.nansum(columns[CALLS])), float(np.nansum(columns[ERRORS]))
        own |= {"rollout/tool_calls_mean": calls / len(columns[TURNS]), "rollout/tool_error_share": errors / calls}
    if NOT_ANSWERED in columns:
        own |= {"rollout/refused_requests": float(np.nansum(columns[NOT_ANSWERED]))}
    return own | {
        "rollout/turns_mean": float(columns[TURNS].mean()),
        "rollout/turns_max": float(columns[TURNS].max()),
        "rollout/observation_share": 1 - float(columns["loss_mask"].values_T.mean()),
        "rollout/environment_failures": sum(reason is not None for reason in columns[FAILURE]) / conversations,
    }


def waiting_figures(answers: Sequence[EngineResponses]) -> dict[str, float]:
    """Return how much of the engines' time environments took from vLLM; nothing without them."""
    played = [answer.episodes for answer in answers if answer.episodes is not None]
    if not played:
        return {}
    waited = sum(episodes.waited_seconds for episodes in played)
    return {"rollout/engine_wait_share": float(waited / sum(answer.engine_seconds for answer in answers))}


def with_environment(
    config: TrainConfig, columns: Mapping[str, Any], scores: list[Score] | None, judged: bool = True
) -> list[Score]:
    """Return the rewards of episodes: the environment's, and those of the reward source where there is one.

    Args:
        columns: those of episodes, and `sample_id`; of games `agent`, too.
        scores: of the reward source.
        judged: whether it is looked at how many failed.

    Raises:
        UserError: more episodes failed than `reward.max_failure_share` allows, or nothing gave any reward.
    """
    names = [name for name in columns if name.startswith(PART) and name not in COUNTS]
    parts = [
        {name.removeprefix(PART): float(columns[name][row]) for name in names if not np.isnan(columns[name][row])}
        for row in range(len(columns[REWARD]))
    ]
    if judged:
        check_episodes(config, columns)
    if scores is None and np.isnan(columns[REWARD]).all() and not all(columns[FAILURE]):
        if config.players:
            remedy = f"let its step return Step(..., rewards={{'{config.players[0]}': ...}})"
        else:
            remedy = "let its step return Step(..., reward=...), or add reward.function"
        raise UserError(
            f"{_name(config)} gave no reward in any of {len(parts) // config.conversations} episodes, and there is no "
            "other reward",
            remedy,
        )
    others: Sequence[Score | None] = [None] * len(parts) if scores is None else scores
    return [
        Score(config.reward.failure_value, {}, f"environment: {failure}") if failure else _sum(score, reward, part)
        for failure, score, reward, part in zip(columns[FAILURE], others, columns[REWARD], parts, strict=True)
    ]


def _sum(score: Score | None, reward: float, parts: dict[str, float]) -> Score:
    """Add up both rewards. An environment that gave none counts 0; of two sources each is at least one part."""
    given = 0.0 if np.isnan(reward) else float(reward)
    if score is None:
        return Score(given, parts, None)
    if score.failure is not None:
        return score
    own = {name: value for name, value in parts.items() if name != "reward"} or {"environment": given}
    others = {name: value for name, value in score.parts.items() if name != "reward"} or {"response": score.reward}
    return dataclasses.replace(score, reward=score.reward + given, parts={**others, **own})


def check_episodes(config: TrainConfig, columns: Mapping[str, Any]) -> None:
    """Stop when too many episodes failed. A game has failed once, which the row of its first agent stands for.

    Raises:
        UserError: more than `reward.max_failure_share` allows.
    """
    agents = columns[AGENT] if config.players else np.zeros(len(columns[FAILURE]), np.int64)
    failed = [
        f"sample {name}: {reason}"
        for name, reason, agent in zip(columns["sample_id"], columns[FAILURE], agents, strict=True)
        if reason is not None and agent == 0
    ]
    refuse_too_many(
        failed,
        len(columns[FAILURE]) // config.conversations,
        config.reward.max_failure_share,
        f"{_name(config)} failed in",
        "episodes",
        "Put the environment or the data right, or raise environment.timeout_s or reward.max_failure_share.",
    )
    log_first("environment failed", failed, FAILURE)
    counts = zip(columns["sample_id"], columns.get(UNBRIDGED, ()), strict=False)
    apart = [f"sample {name}: {count}" for name, count in counts if count]
    log_first("turns that did not follow those before, and are not learnt from", apart, UNBRIDGED)


def _name(config: TrainConfig) -> str:
    assert config.environment is not None
    return f"environment.type '{config.environment.type}'"
