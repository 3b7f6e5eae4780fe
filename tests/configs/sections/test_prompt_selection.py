"""The sampler's section: what has no effect is refused, and what it names is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.base.errors import UserError
from penstock.checks.data import check_prompt_selection
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.prompt_selection import SamplerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "random"}, "sampler 'random' is not there: name one of shuffled, sequential, curriculum, adaptive"),
        ({"name": "curriculum"}, "needs 'column'"),
        ({"column": "level"}, "'column' has no effect with sampler 'shuffled'"),
        ({"name": "adaptive", "column": "level"}, "'column' has no effect with sampler 'adaptive'"),
        ({"name": "sequential", "half_life": 3}, "'half_life' has no effect with sampler 'sequential'"),
        ({"name": "curriculum", "column": "x", "settings": {}}, "'settings' has no effect with sampler 'curriculum'"),
        ({"name": "my:own", "descending": True}, "'descending' has no effect with sampler 'my:own'"),
        ({"name": "adaptive", "reward_range": [1, 1]}, "the second larger than the first"),
    ],
)
def test_settings_of_another_sampler_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplerConfig.model_validate(values)


@pytest.mark.parametrize(
    ("values", "filled"),
    [
        ({}, {}),
        ({"name": "curriculum", "column": "level"}, {"descending": False}),
        ({"name": "adaptive"}, {"half_life": 50.0, "reward_range": (0.0, 1.0)}),
        ({"name": "my:own"}, {"settings": {}}),
    ],
)
def test_settings_are_filled_where_they_apply(values: dict[str, Any], filled: dict[str, Any]) -> None:
    """And nowhere else; resolving again changes nothing."""
    config = SamplerConfig.model_validate(values)
    assert {name: value for name, value in config if value is not None} == {"name": "shuffled"} | values | filled
    assert SamplerConfig.model_validate(config.model_dump()) == config


def test_the_column_is_looked_for_before_anything_starts(tmp_path: Path) -> None:
    """In a file, and in addition problems, whose carries are one."""
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a", "level": 2}\n{"prompt": "b", "level": null}\n', encoding="utf-8")
    for data, problem in (
        ({"train": str(file), "sampler": {"name": "curriculum", "column": "level"}}, "line 2: 'level' is null"),
        ({"train": str(file), "sampler": {"name": "curriculum", "column": "hard"}}, "has no column 'hard'"),
        ({"arithmetic": {}, "sampler": {"name": "curriculum", "column": "answer"}}, "holds no numbers"),
        ({"arithmetic": {}, "sampler": {"name": "tests.nowhere:f"}}, "does not import"),
    ):
        with pytest.raises(UserError, match=problem):
            check_prompt_selection(TrainConfig.model_validate({"data": data}))
    carries = {"arithmetic": {}, "sampler": {"name": "curriculum", "column": "carries"}}
    check_prompt_selection(TrainConfig.model_validate({"data": carries}))
    function = {"dynamic_sampling": {"function": "tests.session.rollout.filter_examples:nowhere"}}
    with pytest.raises(UserError, match="has no 'nowhere'"):
        check_prompt_selection(TrainConfig.model_validate({"algorithm": function}))
