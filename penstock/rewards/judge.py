"""A generative judge: a language model behind a server reads each response, and a number is read out of its text.

All samples of a batch are asked at once, up to `concurrency`, so that the server's continuous batching has something
to batch. The judge's texts are read in worker processes (penstock/rewards/pool.py): a parser is a reward function whose
`response` is the judge's text, and a regular expression may take forever as a function may.

Left out: tournaments and pairwise judgements, which need several responses in one question; streaming.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.base.errors import UserError
from penstock.configs.sections.reward import RewardConfig
from penstock.configs.sections.reward_servers import JudgeConfig
from penstock.rewards.function import ROW_ARGUMENTS, load_reward_function
from penstock.rewards.pool import RewardPool, Score
from penstock.rewards.server import Failed, Post, RequestFailed, ask_all, check_server
from penstock.rewards.types import Sample
from penstock.usercode.imports import nearest

FOUND_NUMBER = "penstock.rewards.judge:found_number"
TEXT_PLACES = ("response", "prompt", "prompt_id")  # a whole `row` in a template would tell the judge too much
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


class Judge:
    """Scores samples by a judge's opinion; a context manager, for the processes that read it.

    Args:
        log: file for what a parser prints; None: standard error.

    Raises:
        UserError: the template names no column of the data, or the parser does not load.
    """

    def __init__(self, config: RewardConfig, columns: Sequence[str], log: Path | None = None) -> None:
        if config.judge is None:
            raise ValueError("a Judge needs reward.judge")
        check_template(config.judge, columns)
        self._config, self._judge = config, config.judge
        self._parsers = RewardPool(reading(config), read_columns(config.judge, columns), log)
        self.calls_ahead = min(1, self._parsers.calls_ahead)  # each has `concurrency` requests under way

    def __enter__(self) -> Self:
        self._parsers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parsers.__exit__(kind, error, trace)

    def score(self, samples: Sequence[Sample], tolerated: float = inf) -> list[Score]:
        """Score every sample, in order; the judge's text goes along. What fails becomes a `Score` with a failure.

        Args:
            tolerated: as in `penstock.rewards.server.ask_all`; what the judge has failed, its parser lacks.
        """
        judge = self._judge

        async def ask(post: Post, chunk: range) -> list[str | Failed]:
            path, body = question(judge, samples[chunk.start])
            return [answer_in(await post(path, body))]

        chunks = [range(row, row + 1) for row in range(len(samples))]
        texts = ask_all(judge, judge.concurrency, ask, chunks, tolerated)
        answered = [
            dataclasses.replace(sample, response=text)
            for sample, text in zip(samples, texts, strict=True)
            if not isinstance(text, Failed)
        ]
        left = tolerated - sum(isinstance(text, Failed) for text in texts)
        found = iter(self._parsers.score(answered, left))
        return [
            Score(self._config.failure_value, {}, f"judge: {text.reason}", "")
            if isinstance(text, Failed)
            else dataclasses.replace(next(found), answer=text)
            for text in texts
        ]


def reading(config: RewardConfig) -> RewardConfig:
    """Return the reward function that reads the judge's texts."""
    judge = config.judge
    assert judge is not None
    if judge.parser is not None:
        return config.model_copy(update={"judge": None, "function": judge.parser, "settings": judge.settings})
    settings = {"pattern": judge.pattern, "bounds": judge.bounds, "scale": judge.scale}
    return config.model_copy(update={"judge": None, "function": FOUND_NUMBER, "settings": settings})


def read_columns(judge: JudgeConfig, columns: Sequence[str]) -> Sequence[str]:
    """Return the columns that a parser may ask for: a pattern reads the judge's text alone."""
    return columns if judge.parser is not None else ()


def found_number(response: str, pattern: str, bounds: tuple[float, float] | None, scale: float) -> float:
    """Return `scale` times the number in the last match of `pattern` (its one group) in a judge's text.

    Raises:
        ValueError: there is no match, it is no number, or it is out of bounds.
    """
    *_, last = [None, *re.finditer(pattern, response)]
    if last is None:
        raise ValueError(f"the judge's text has no match of the pattern: ...{response[-80:]!r}")
    number = float(last.group(1))
    if bounds is not None and not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"the judge's number {number:g} is not within {bounds[0]:g} and {bounds[1]:g}")
    return scale * number


def check_judge(config: RewardConfig, columns: Sequence[str]) -> None:
    """Check the template, the parser and the server of `reward.judge`.

    Raises:
        UserError: one of them cannot be used.
    """
    assert config.judge is not None
    check_template(config.judge, columns)
    function = reading(config)
    own = read_columns(config.judge, columns)
    load_reward_function(str(function.function), function.settings, own, setting="reward.judge.parser")
    check_server("reward.judge", config.judge)


def check_template(judge: JudgeConfig, columns: Sequence[str]) -> None:
    """Check that everything in braces has a source; braces around anything but a name are text.

    Raises:
        UserError: one has none.
    """
    available = list(dict.fromkeys((*TEXT_PLACES, *columns)))
    for name in _PLACE.findall(judge.template):
        if name not in available:
            raise UserError(
                f"reward.judge.template has '{{{name}}}', which is no column of the data{nearest(name, available)}",
                f"available: {', '.join(available)}",
            )


def question(judge: JudgeConfig, sample: Sample) -> tuple[str, dict[str, Any]]:
    """Return path and body of the request for one sample."""
    text = filled(judge.template, sample)
    body = {"model": judge.model, "max_tokens": judge.max_tokens, "temperature": judge.temperature, **judge.extra}
    if judge.chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text}


def filled(template: str, sample: Sample) -> str:
    """Return the template with every place filled, once: braces in a response stay what they are."""

    def value(place: re.Match[str]) -> str:
        name = place[1]
        found = getattr(sample, ROW_ARGUMENTS[name]) if name in TEXT_PLACES else sample.columns.get(name)
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=_listed)

    return _PLACE.sub(value, template)


def answer_in(reply: Any) -> str:
    """Return the text of a chat's or a completion's reply.

    Raises:
        RequestFailed: there is none.
    """
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise RequestFailed(f"the reply has no text: {str(reply)[:200]}")
    return text


def _listed(value: Any) -> Any:
    return value.tolist()  # columns of a Parquet file with lists are arrays of numpy
