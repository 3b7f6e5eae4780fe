"""Check that a model can be talked to: its chat template."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig


def check_chat(config: TrainConfig) -> None:
    """Check that the model can be talked to: a chat template in its tokenizer's settings or in a file of its own.

    Raises:
        UserError: it has none.
    """
    folder = Path(config.model.path) if config.model.path is not None else None
    if folder is not None:
        settings = folder / "tokenizer_config.json"
        inside = settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
        if inside or any(folder.glob("chat_template*")):
            return
    raise UserError(
        f"the prompts are chats (data.chat or messages), and {folder or 'a tiny model'} has no chat template",
        "use an instruction-tuned model, or text prompts with data.chat=false and a data.template",
    )
