"""A judge's question, what is read out of its text, and that every way to fail costs only its own sample."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.configs.sections.reward_servers import JudgeConfig
from penstock.rewards.judge import Judge, check_template, filled, found_number, question
from penstock.rewards.pool import check_failures
from penstock.rewards.types import Sample
from tests.rewards.scripted_server import Reply, chat_reply, scripted

JUDGE: dict[str, Any] = {"url": "http://127.0.0.1:8000", "model": "m", "template": "{response}?", "pattern": r"(\d+)"}


def sample(response: str, **columns: Any) -> Sample:
    return Sample(f"sample-{response}", "train-000003", "Say it:", response, columns)


def test_every_place_is_filled_once_and_other_braces_are_text() -> None:
    """Text that looks like a place stays text; columns that are no text are written as JSON."""
    template = '{prompt}|{response}|{prompt_id}|{answer}|{notes}|{none}|{"score": 1}|{}|{ answer }'
    found = filled(template, sample("{answer} {prompt}", answer=42, notes=["é", 1], none=None))
    assert found == 'Say it:|{answer} {prompt}|train-000003|42|["é", 1]|null|{"score": 1}|{}|{ answer }'


def test_a_place_without_a_source_is_refused() -> None:
    """With a guess; the columns of the data are known before anything starts."""
    judge = JudgeConfig(**{**JUDGE, "template": "{response} {answr}"})
    with pytest.raises(UserError, match=r"'{answr}', which is no column.*did you mean 'answer'"):
        check_template(judge, ["question", "answer"])
    check_template(judge.model_copy(update={"template": '{response} {answer} {"a": 1}'}), ["answer"])


def test_the_question_is_a_chat_or_a_text_to_continue() -> None:
    """Greedy unless told; `extra` goes along."""
    judge = JudgeConfig(**JUDGE, max_tokens=7, extra={"stop": ["\n"]})
    path, body = question(judge, sample("yes"))
    assert (path, body.pop("messages")) == ("/v1/chat/completions", [{"role": "user", "content": "yes?"}])
    assert body == {"model": "m", "max_tokens": 7, "temperature": 0.0, "stop": ["\n"]}
    path, body = question(judge.model_copy(update={"chat": False}), sample("yes"))
    assert (path, body["prompt"], "messages" in body) == ("/v1/completions", "yes?", False)


def test_the_last_match_counts() -> None:
    """A judge thinks aloud first; numbers out of bounds are no opinion."""
    text = "At first sight Score: 2, but then Score: -7.5"
    assert found_number(text, r"Score: (-?[\d.]+)", None, 0.1) == pytest.approx(-0.75)
    assert found_number("8", r"(\d+)", (0, 8), 1.0) == 8
    for response, pattern, message in [
        ("no idea", r"(\d+)", "no match"),
        ("9", r"(\d+)", "9 is not within 0 and 8"),
        ("1.2.3", r"([\d.]+)", "could not convert"),
    ]:
        with pytest.raises(ValueError, match=message):
            found_number(response, pattern, (0, 8), 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pattern": None}, "give one of 'pattern' and 'parser'"),
        ({"parser": "m:f"}, "give one of 'pattern' and 'parser'"),
        ({"pattern": "[0-9"}, "no regular expression"),
        ({"pattern": "[0-9]+"}, "one group, the number, not 0"),
        ({"pattern": "([0-9]+)(/10)?"}, "one group, the number, not 2"),
        ({"pattern": None, "parser": "m:f", "scale": 0.5}, "no effect with 'parser'"),
        ({"settings": {"a": 1}}, "no effect without 'parser'"),
        ({"bounds": [3, 1]}, "the smaller one first"),
        ({"scale": 0}, "makes every reward 0"),
        ({"template": "Is it good?"}, r"must contain {response}"),
        ({"extra": {"temperature": 1}}, "a key of its own"),
        ({"url": "127.0.0.1:8000"}, "no address of a server"),
        ({"url": "http://me:secret@host/v1"}, "use 'api_key_env'"),
        ({"api_key_env": "sk-secret"}, "name the environment variable that holds the key"),
        ({"concurrency": 0}, "greater than or equal to 1"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    """Before anything is asked, by the name of the setting."""
    with pytest.raises(ValidationError, match=message) as refused:
        JudgeConfig(**{**JUDGE, **values})
    assert "secret" not in str(refused.value.errors(include_input=False))


def test_one_source_of_rewards_and_no_idle_setting() -> None:
    """A judge's answers are read in workers; a service and a reward model have none."""
    service = {"url": "http://h", "model": "m"}
    with pytest.raises(ValidationError, match="'function' and 'judge' exclude each other"):
        RewardConfig(function="m:f", judge=JudgeConfig(**JUDGE))
    with pytest.raises(ValidationError, match="'model' and 'service' exclude each other"):
        RewardConfig.model_validate({"model": "m", "service": service})
    with pytest.raises(ValidationError, match="'workers' has no effect with 'service'"):
        RewardConfig.model_validate({"service": service, "workers": 3})
    with pytest.raises(ValidationError, match="'timeout_s' has no effect with 'model'"):
        RewardConfig.model_validate({"model": "m", "timeout_s": 3})
    RewardConfig.model_validate({"judge": JUDGE, "workers": 3, "max_failure_share": 0.3})


def judged(responses: list[str], reply: Any, columns: tuple[str, ...] = (), **settings: Any) -> Any:
    """Score responses with a judge behind `reply`; the scores, and the configuration."""
    with scripted(reply) as seen:
        judge = JudgeConfig(**{**JUDGE, "url": seen.url, "retries": 0, "timeout_s": 1.0, **settings})
        config = RewardConfig(judge=judge, failure_value=-9.0, max_failure_share=0.9, timeout_s=1.0)
        with Judge(config, columns) as scorer:
            return scorer.score([sample(response, answer="4") for response in responses]), config


def test_a_column_with_the_name_of_what_a_pattern_needs_is_the_datas_own() -> None:
    """A pattern reads the judge's text alone. Control: a parser's setting of such a name is refused."""
    columns = ("pattern", "scale", "answer")
    scores, _ = judged(["yes"], lambda body: chat_reply("7"), columns)
    assert [score.reward for score in scores] == [7.0]
    parser = {"pattern": None, "parser": "reward_examples:judge_parser", "settings": {"answer": 1.0}}
    with pytest.raises(UserError, match="'answer' of .* is a setting .* and also"):
        judged(["yes"], lambda body: chat_reply("7"), columns, **parser)


def test_only_the_culprits_fail_and_the_judges_words_are_kept() -> None:
    """Errors, silence, garbage and numbers out of bounds cost their own samples; the others have their rewards."""

    def reply(body: dict[str, Any]) -> Reply | None:
        asked = body["messages"][0]["content"].removesuffix("?")
        if asked == "slow":
            time.sleep(1.5)
        broken = {"error": (500, "{}"), "closed": None, "no text": (200, {"choices": []}), "null": chat_reply(None)}
        return broken[asked] if asked in broken else chat_reply(asked)

    responses = ["Score: 3", "error", "closed", "Score: 11", "no text", "null", "hm", "slow", "I say 1. Score: 4"]
    scores, config = judged(responses, reply, bounds=(0, 10), scale=0.5)
    assert [score.reward for score in scores] == [1.5, -9, -9, -9, -9, -9, -9, -9, 2.0]
    assert [score.answer for score in scores] == ["Score: 3", "", "", "Score: 11", "", "", "hm", "", responses[-1]]
    reasons = [score.failure or "" for score in scores]
    for reason, part in zip(reasons, ["", "500", "Connection", "11 is not within", "no text", "no text"], strict=False):
        assert part in reason
    assert [bool(reason) for reason in reasons] == [False] + [True] * 7 + [False]
    strict = config.model_copy(update={"max_failure_share": 0.5})
    with pytest.raises(UserError, match=r"reward.judge 'm' failed for 7 of 9 samples(.|\n)*sample-error: judge: .*500"):
        check_failures(scores, [sample(response) for response in responses], strict)


def test_a_parser_is_a_reward_function_of_the_judges_text() -> None:
    """With columns and settings, and parts; one that never returns costs its sample alone."""
    scores, _ = judged(
        ["4", "5", "loop"],
        lambda body: chat_reply(body["messages"][0]["content"].removesuffix("?")),
        columns=("answer",),
        pattern=None,
        parser="reward_examples:judge_parser",
        settings={"bonus": 0.25},
    )
    assert [score.parts for score in scores] == [{"same": 1.0, "bonus": 0.25}, {"same": 0.0, "bonus": 0.25}, {}]
    assert [score.reward for score in scores] == [1.25, 0.25, -9.0]
    assert "timed out" in scores[2].failure
