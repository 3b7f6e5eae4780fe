"""A reward model behind vLLM's server, which several trainings may ask at the same time.

The server tokenizes and scores prompt and response as one text without special tokens, and gives the classifier's
output as it is: the same score, up to rounding, as `reward.model` inside a training. Several texts go in one request,
and the server's scheduler batches whatever requests of all trainings are there.

Left out: other servers' ways to score a text; starting the server (`penstock serve`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.configs.sections.reward_servers import ServiceConfig
from penstock.rewards.pool import Score
from penstock.rewards.server import Failed, Post, RequestFailed, ask_all, check_server, patient_once
from penstock.rewards.types import Sample
from penstock.usercode.guard import out_of_bounds

CLASSIFY = "/classify"
PROBE = "1+1=2"  # the text that is scored before a start
REFUSED = (400, 413, 422)  # something in the request, such as a text longer than the model takes


@dataclass(frozen=True)
class RewardService:
    """Scores samples by a server's reward model."""

    config: RewardConfig
    calls_ahead: int = 1  # each has `concurrency` requests under way

    def score(self, samples: Sequence[Sample], tolerated: float = math.inf) -> list[Score]:
        """Score every sample, in order. What fails becomes a `Score` with a failure; nothing is raised for it.

        Args:
            tolerated: as in `penstock.rewards.server.ask_all`.
        """
        service = self.config.service
        assert service is not None
        values = scores_of(service, [sample.prompt + sample.response for sample in samples], tolerated)
        return [
            Score(self.config.failure_value, {}, f"reward service: {value.reason}")
            if isinstance(value, Failed)
            else Score(value, {}, None)
            for value in values
        ]


def check_service(config: RewardConfig) -> None:
    """Check that the server of `reward.service` offers the model, and that it gives one score for a text.

    Raises:
        UserError: it does not.
    """
    assert config.service is not None
    service = patient_once(config.service)
    check_server("reward.service", service)
    (score,) = scores_of(service, [PROBE], tolerated=0)
    if isinstance(score, Failed):
        raise UserError(
            f"reward.service: {service.url} does not score a text with '{service.model}': {score.reason}",
            "serve a sequence classifier with one label: penstock serve FOLDER",
        )


def scores_of(service: ServiceConfig, texts: Sequence[str], tolerated: float) -> list[float | Failed]:
    """Return the score of every text; `tolerated` as in `penstock.rewards.server.ask_all`."""

    async def ask(post: Post, chunk: range) -> list[float | Failed]:
        try:
            return list(scores_in(await post(CLASSIFY, request(service, texts[chunk.start : chunk.stop])), len(chunk)))
        except RequestFailed as error:
            if error.status not in REFUSED or len(chunk) == 1:
                raise
        return [await alone(post, texts[row]) for row in chunk]  # only the culprits fail

    async def alone(post: Post, text: str) -> float | Failed:
        try:
            return scores_in(await post(CLASSIFY, request(service, [text])), 1)[0]
        except RequestFailed as error:
            return Failed(str(error))

    starts = range(0, len(texts), service.batch)
    chunks = [range(start, min(start + service.batch, len(texts))) for start in starts]
    return ask_all(service, service.concurrency, ask, chunks, tolerated)


def request(service: ServiceConfig, texts: Sequence[str]) -> dict[str, Any]:
    """Return the body of a request for the scores of texts."""
    return {"model": service.model, "input": list(texts), "use_activation": False, "add_special_tokens": False}


def scores_in(reply: Any, count: int) -> list[float]:
    """Return the scores of a reply, in the order of the texts.

    Raises:
        RequestFailed: there is not one number for each of `count` texts that can be a reward; the model may have
            several labels.
    """
    try:
        rows = sorted(reply["data"], key=lambda row: int(row["index"]))
        found = [row["probs"] for row in rows]
    except (LookupError, TypeError, ValueError):
        raise RequestFailed(f"the reply has no scores: {str(reply)[:200]}") from None
    if len(found) != count:
        raise RequestFailed(f"{len(found)} scores came back for {count} texts")
    if labels := [len(values) for values in found if len(values) != 1]:
        raise RequestFailed(f"the model has {labels[0]} labels: a reward model has one")
    scores = [float(values[0]) for values in found]
    if problem := next(filter(None, map(out_of_bounds, scores)), ""):
        raise RequestFailed(f"a score is {problem}")
    return scores
