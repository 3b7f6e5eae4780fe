"""One call of the user's reward function before anything starts, for `--dry-run`: what it makes of a made-up response.

In a worker process, under its deadline, as in a training. A function may rightly fail on such a response, so nothing
follows from it. A training itself makes no such call: workers take seconds to start, and an honest function none.
"""

from __future__ import annotations

from penstock.checks.prompts import first_row
from penstock.configs.schema import TrainConfig
from penstock.rewards.pool import RewardPool
from penstock.rewards.types import Sample

RESPONSE = "I do not know, perhaps 42."


def trial_call(config: TrainConfig) -> list[str]:
    """Return in words what came of it; nothing where rewards come from elsewhere.

    Raises:
        UserError: the function does not load in a worker process.
    """
    if config.reward.function is None:
        return []
    prompt, row = first_row(config)
    sample = Sample("trial", "train-000000", prompt, RESPONSE, row)
    with RewardPool(config.reward.model_copy(update={"workers": 1}), ["prompt_id", *row]) as pool:
        (score,) = pool.score([sample])
    called = f"{config.reward.source} on the first row, with the made-up response '{RESPONSE}':"
    if score.failure is not None:
        return [f"{called} it failed, {score.failure}"]
    parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
    return [f"{called} {score.reward:g}{parts}"]
