"""The client of a reward service: batches, what fails alone, and what is no score. Real servers: tests/cli/serving."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.configs.sections.reward_servers import JudgeConfig, ServiceConfig
from penstock.rewards.judge import check_judge
from penstock.rewards.server import Failed
from penstock.rewards.service import RewardService, check_service, scores_of
from penstock.rewards.types import Sample
from tests.rewards.scripted_server import Reply, Scripted, scripted


def service_at(seen: Scripted, **settings: Any) -> ServiceConfig:
    return ServiceConfig(**{"url": seen.url, "model": "m", "timeout_s": 5.0, "retries": 0, **settings})


def lengths(body: dict[str, Any]) -> Reply:
    """Score a text by its length; a text of 9 or more is too long. Rows come back in any order."""
    if any(len(text) >= 9 for text in body["input"]):
        return 400, {"error": "too long"}
    return 200, {"data": [{"index": k, "probs": [len(text) / 2]} for k, text in enumerate(body["input"])][::-1]}


def test_texts_go_in_batches_and_scores_keep_their_rows() -> None:
    """Prompt and response are one text, without special tokens, and the score is the model's raw output."""
    samples = [Sample(str(k), "p", "ab", "c" * (k % 5), {}) for k in range(11)]
    with scripted(lengths) as seen:
        scores = RewardService(RewardConfig(service=service_at(seen, batch=4))).score(samples)
    assert [score.reward for score in scores] == [(2 + k % 5) / 2 for k in range(11)]
    assert all(score.failure is None and score.answer is None for score in scores)
    assert sorted(len(body.pop("input")) for body in seen.bodies) == [3, 4, 4]
    assert seen.bodies[0] == {"model": "m", "use_activation": False, "add_special_tokens": False}


def test_only_the_text_that_the_server_refuses_fails() -> None:
    """Its neighbours in the request are asked for alone."""
    texts = ["a", "b" * 9, "ccc", "dd"]
    with scripted(lengths) as seen:
        scores = scores_of(service_at(seen, batch=3), texts, tolerated=4)
        assert [len(body["input"]) for body in seen.bodies].count(3) == 1
    assert [score for score in scores if not isinstance(score, Failed)] == [0.5, 1.5, 1.0]
    assert isinstance(scores[1], Failed)
    assert "too long" in scores[1].reason


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"data": [{"index": 0, "probs": [0.1, 0.9]}]}, "2 labels: a reward model has one"),
        ({"data": []}, "0 scores came back for 1 texts"),
        ({"data": [{"index": 0, "probs": [math.nan]}]}, "a score is nan"),
        ({"data": [{"index": 0, "probs": [-1e300]}]}, "a score is -1e+300, beyond +-1e+12"),
        ({"object": "list"}, "no scores"),
        ("[]", "no scores"),
    ],
)
def test_what_is_no_score_is_a_failure(reply: Any, reason: str) -> None:
    """Also a classifier with several labels, whose first one would be no reward."""
    with scripted(lambda body: (200, reply)) as seen:
        (found,) = scores_of(service_at(seen), ["a"], tolerated=1)
    assert isinstance(found, Failed)
    assert reason in found.reason


def test_a_training_starts_only_with_the_right_server() -> None:
    """Nobody there, another model, no classifier: each is one message with what to do, before any engine starts."""
    with scripted(lengths, models=("reward-1", "reward-2")) as seen:
        check_service(RewardConfig(service=service_at(seen, model="reward-2")))
        with pytest.raises(UserError, match="does not offer 'm'; it offers 'reward-1', 'reward-2'(.|\n)*--name m"):
            check_service(RewardConfig(service=service_at(seen)))
    with pytest.raises(UserError, match="does not answer as a server(.|\n)*penstock serve"):
        check_service(RewardConfig(service=service_at(seen)))
    with (
        scripted(lambda body: (404, "{}")) as seen,
        pytest.raises(UserError, match="does not score a text with 'm': HTTP 404(.|\n)*one label"),
    ):
        check_service(RewardConfig(service=service_at(seen)))


def test_a_judge_is_checked_with_its_template_and_parser() -> None:
    """In this order, so that a typing error is found without a server."""

    def config(**settings: Any) -> RewardConfig:
        judge = {"url": seen.url, "model": "m", "template": "{response}", "pattern": "(.)", "retries": 0, **settings}
        return RewardConfig(judge=JudgeConfig(**judge))

    with scripted(lengths) as seen:
        check_judge(config(), ["answer"])
        with pytest.raises(UserError, match="'{answr}'"):
            check_judge(config(template="{response}{answr}"), ["answer"])
        with pytest.raises(UserError, match=r"reward\.judge\.parser 'reward_examples:nothing'"):
            check_judge(config(pattern=None, parser="reward_examples:nothing"), ["answer"])
        with pytest.raises(UserError, match=r"reward\.judge\.parser .*asks for 'answer'(.|\n)*reward\.judge\.settings"):
            check_judge(config(pattern=None, parser="reward_examples:judge_parser", settings={"bonus": 1.0}), [])
        assert not seen.bodies  # the judge itself was not asked
    with pytest.raises(UserError, match=r"reward\.judge\.url: .* does not answer"):
        check_judge(config(), ["answer"])
