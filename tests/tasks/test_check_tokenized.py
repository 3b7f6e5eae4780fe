"""A resumed run keeps its tokenized prompts, and what made them may not have changed since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from configs.errors import UserError
from configs.schema import TrainConfig
from data.tokenizer import make_byte_tokenizer
from tasks.prepare import check_tokenized, load_prompts
from tasks.session import Training

ARITHMETIC = {"digits": 1, "sft": 8, "train": 8, "heldout": 8}


def config(**data: Any) -> TrainConfig:
    return TrainConfig.model_validate({"data": {"arithmetic": ARITHMETIC, **data}, "rollout": {"prompts": 4}})


def test_a_resume_with_other_prompts_is_refused(
    training_with: Callable[[TrainConfig], Training], tmp_path: Path
) -> None:
    """The change would be ignored. Controls: nothing changed, the sampler did, and nothing is tokenized yet."""
    make_byte_tokenizer(tmp_path / "model")
    training = training_with(config())
    check_tokenized(training.run, config(max_prompt_tokens=9))
    with disable_run_logger():
        assert load_prompts.fn(training, str(tmp_path / "model"))["train"] == 8
    check_tokenized(training.run, config())
    check_tokenized(training.run, config(sampler={"name": "sequential"}))
    for changed, said in (
        ({"max_prompt_tokens": 9}, r"data\.max_prompt_tokens in .*config\.yaml is 9, .* were made with 512"),
        ({"template": "{prompt} "}, r"data\.template .* is '\{prompt\} ', .* made with None"),
        ({"arithmetic": ARITHMETIC | {"train": 9}}, r"data\.arithmetic"),
    ):
        with pytest.raises(UserError, match=said):
            check_tokenized(training.run, config(**changed))
