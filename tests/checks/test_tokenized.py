"""A resumed run keeps its tokenized prompts, and what made them may not have changed since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from penstock.base.errors import UserError
from penstock.checks.tokenized import check_tokenized
from penstock.configs.preference import PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.session.session import Training
from penstock.tasks.finetuning.preferences import load_preferences
from penstock.tasks.start import load_pairs, load_prompts

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
        ({"chat_arguments": {"enable_thinking": False}}, r"data\.chat_arguments .*False.* made with \{\}"),
        ({"arithmetic": ARITHMETIC | {"train": 9}}, r"data\.arithmetic"),
        ({"seed": 1}, r"^seed in .*config\.yaml is 1, .* were made with 0"),
    ):
        with pytest.raises(UserError, match=said):
            check_tokenized(training.run, config(**changed))


def test_a_seed_that_made_no_prompts_may_change(
    training_with: Callable[[TrainConfig], Training], tmp_path: Path
) -> None:
    """Prompts from files do not follow from it."""
    make_byte_tokenizer(tmp_path / "model")
    paths = {split: tmp_path / f"{split}.jsonl" for split in ("train", "heldout")}
    for path in paths.values():
        path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4, encoding="utf-8")
    data: dict[str, Any] = {"arithmetic": None, **{split: str(path) for split, path in paths.items()}}
    training = training_with(config(**data))
    with disable_run_logger():
        load_prompts.fn(training, str(tmp_path / "model"))
    check_tokenized(training.run, config(seed=1, **data))
    with pytest.raises(UserError, match=r"data\.template .* is 'a \{prompt\}', .* made with None"):
        check_tokenized(training.run, config(template="a {prompt}", **data))


def test_data_are_known_by_their_content(training_with: Callable[[TrainConfig], Training], tmp_path: Path) -> None:
    """Moved, they are the same rows; others under the same path are not. Control: nothing changed."""
    make_byte_tokenizer(tmp_path / "model")
    paths = {split: tmp_path / f"{split}.jsonl" for split in ("train", "heldout", "sft")}
    for path in paths.values():
        path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4, encoding="utf-8")

    def reading(folder: Path, max_tokens: int = 64) -> TrainConfig:
        data: dict[str, Any] = {split: str(folder / path.name) for split, path in paths.items()}
        data |= {"response": "answer"}
        return TrainConfig.model_validate({"data": data, "sft": {"max_tokens": max_tokens}, "rollout": {"prompts": 4}})

    training = training_with(reading(tmp_path))
    with disable_run_logger():
        load_pairs.fn(training, str(tmp_path / "model"))
        load_prompts.fn(training, str(tmp_path / "model"))
    check_tokenized(training.run, reading(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in paths.values():
        path.rename(elsewhere / path.name)
    check_tokenized(training.run, reading(elsewhere))
    with pytest.raises(UserError, match=r"sft\.max_tokens .* is 32, and the rows of this run were made with 64"):
        check_tokenized(training.run, reading(elsewhere, max_tokens=32))
    for split, path in paths.items():
        rows = (elsewhere / path.name).read_bytes()
        (elsewhere / path.name).write_bytes(rows.replace(b"2", b"3", 1))
        with pytest.raises(UserError, match=rf"content of data\.{split} is not what the rows"):
            check_tokenized(training.run, reading(elsewhere))
        (elsewhere / path.name).write_bytes(rows)


@pytest.mark.parametrize("tree", [PreferenceConfig, RewardModelConfig])
def test_preferences_are_checked_likewise(
    training_with: Callable[[TrainConfig], Training], tmp_path: Path, tree: type[PreferenceConfig | RewardModelConfig]
) -> None:
    """Controls: nothing changed, what decides no token did, and a held-out file is added."""
    make_byte_tokenizer(tmp_path / "model")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 4, encoding="utf-8")
    training = training_with(TrainConfig())

    def preferring(**data: Any) -> PreferenceConfig | RewardModelConfig:
        return tree.model_validate({"seed": len(data), "data": {"train": str(pairs), **data}})

    with disable_run_logger():
        load_preferences.fn(training, preferring(), str(tmp_path / "model"))
    check_tokenized(training.run, preferring())
    check_tokenized(training.run, preferring(shuffle=False))
    check_tokenized(training.run, preferring(heldout=str(pairs)))
    with pytest.raises(UserError, match=r"data\.template .* is 'a \{prompt\}'"):
        check_tokenized(training.run, preferring(template="a {prompt}"))
    pairs.write_text(pairs.read_text(encoding="utf-8") * 2, encoding="utf-8")
    with pytest.raises(UserError, match=r"content of data\.train is not what the rows"):
        check_tokenized(training.run, preferring())
