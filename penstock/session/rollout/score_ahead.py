"""Rewards of responses that have ended, while others are still generated; used by rollout. Not a task itself.

The engines tell of such responses (penstock/engines/rollout/partial_results.py); where several engines work, the reply
of the first is there before the last has ended. The reward task takes the scores (penstock/rewards/ahead.py).

Left out: rewards that the engines compute themselves, those of a reward model and of an environment. The user's
function is left out where the engines are on the CPU: it would take the cores that they generate with (quickstart on
two cores: rollouts took 0.1 s longer, rewards 0.03 s less).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from penstock.engines.commands.rollout import EngineResponses, PartialResults
from penstock.rewards.types import Sample
from penstock.session.rollout.told import News
from penstock.session.session import Training, prompt_columns


def sample_id(iteration: int, prompt_id: str, number: int) -> str:
    """Return the name of a prompt's response."""
    return f"{iteration:06d}/{prompt_id}/{number}"


def scoring_ahead(training: Training, iteration: int, prompts: pd.DataFrame) -> tuple[News, ...]:
    """Return what takes the engines' news of a rollout of `prompts`; nothing where no response is scored by itself."""
    session, config = training.session(), training.config
    scorer, samples = session.scorer, config.rollout.samples
    if scorer is None or config.environment is not None:
        return ()
    if config.reward.function is not None and session.groups["rollout"].spec.devices[0].gpu is None:
        return ()
    asked = prompts[["prompt_id", "prompt_text"]].astype(str).to_records(index=False)
    begun: set[tuple[int, int]] = set()  # a reply repeats the responses that its engine told of before
    uncounted: dict[int, list[ScorableResponse]] = {}  # of prompts that may not make the batch, by position

    def sample(ended: ScorableResponse) -> Sample:
        prompt_id, text = asked[ended.position]
        row = prompt_columns(training, "train")[prompt_id]
        return Sample(sample_id(iteration, prompt_id, ended.number), prompt_id, text, ended.text, row)

    def counted(news: PartialResults | EngineResponses | None) -> list[ScorableResponse]:
        told = ended_responses(news, samples)
        if not isinstance(news, PartialResults) or news.counted is None:
            return told
        for ended in told:
            uncounted.setdefault(ended.position, []).append(ended)
        return [ended for position in news.counted for ended in uncounted.pop(position, ())]

    def begin(news: PartialResults | EngineResponses | None) -> None:
        new = [ended for ended in counted(news) if (ended.position, ended.number) not in begun]
        begun.update((ended.position, ended.number) for ended in new)
        scorer.begin([sample(ended) for ended in new])

    return (begin,)


@dataclass(frozen=True)
class ScorableResponse:
    """Response `number` to the prompt at `position` of the rollout."""

    position: int
    number: int
    text: str


def ended_responses(news: PartialResults | EngineResponses | None, samples: int) -> list[ScorableResponse]:
    """Return the responses that an engine tells of.

    Args:
        news: some responses with their numbers, or a reply, which has `samples` responses to each prompt, in order;
            None from a rank that leaves the reply to the first of its engine.
    """
    if news is None:
        return []
    if isinstance(news, PartialResults):
        positions, numbers = news.ended.positions, news.ended.samples
    else:
        positions = np.repeat(news.positions_P, samples)
        numbers = np.tile(np.arange(samples), len(news.positions_P))
    texts = news.texts.to_pylist()
    return [ScorableResponse(*ended) for ended in zip(positions.tolist(), numbers.tolist(), texts, strict=True)]
