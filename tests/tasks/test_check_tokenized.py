"""A resumed run keeps its tokenized prompts, and what made them may not have changed since."""

from __future__ import annotations

import json
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


def config(seed: int = 0, **data: Any) -> TrainConfig:
    data = {"arithmetic": ARITHMETIC, **data}
    return TrainConfig.model_validate({"seed": seed, "data": data, "rollout": {"prompts": 4}})


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
        ({"seed": 1}, r"^seed in .*config\.yaml is 1, .* were made with 0"),
    ):
        with pytest.raises(UserError, match=said):
            check_tokenized(training.run, config(**changed))


@pytest.mark.parametrize("source", ["files", "an earlier version"])
def test_a_seed_that_made_no_prompts_may_change(
    training_with: Callable[[TrainConfig], Training], tmp_path: Path, source: str
) -> None:
    """Prompts from files do not follow from it; a run of an earlier version did not note which seed made them."""
    make_byte_tokenizer(tmp_path / "model")
    data: dict[str, Any] = {}
    if source == "files":
        paths = {split: tmp_path / f"{split}.jsonl" for split in ("train", "heldout")}
        for path in paths.values():
            path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4, encoding="utf-8")
        data = {"arithmetic": None, **{split: str(path) for split, path in paths.items()}}
    training = training_with(config(**data))
    with disable_run_logger():
        load_prompts.fn(training, str(tmp_path / "model"))
    noted = training.run.prompts("train").with_name("prompts.json")
    if source != "files":
        kept = {name: value for name, value in json.loads(noted.read_text()).items() if name != "seed"}
        noted.write_text(json.dumps(kept), encoding="utf-8")
    check_tokenized(training.run, config(seed=1, **data))
