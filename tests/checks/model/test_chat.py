"""A training on chat prompts is refused before it starts if the model's tokenizer has no chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.checks.model.chat import check_chat
from penstock.checks.training import check_supervised
from penstock.configs.schema import TrainConfig


def config(folder: Path | None) -> TrainConfig:
    """Return a configuration that wraps its prompts as messages for the model in `folder`, or for a tiny one."""
    model = {"tiny": {}} if folder is None else {"path": str(folder)}
    return TrainConfig.model_validate({"model": model, "data": {"chat": True}})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        ("chat_template.jinja", "{{ messages }}"),
    ],
)
def test_a_template_is_found_where_tokenizers_keep_it(tmp_path: Path, name: str, content: str) -> None:
    """In the tokenizer's settings, or in a file of its own."""
    (tmp_path / name).write_text(content)
    check_chat(config(tmp_path))


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    """The control: settings without a template, no settings at all, and a tiny model."""
    for folder in (tmp_path, None):
        with pytest.raises(UserError, match="no chat template"):
            check_chat(config(folder))
    with pytest.raises(UserError, match="no chat template"):  # also by supervised training alone
        check_supervised(TrainConfig.model_validate({"model": {"tiny": {}}, "data": {"chat": True}, "sft": {}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    with pytest.raises(UserError, match="no chat template"):
        check_chat(config(tmp_path))
