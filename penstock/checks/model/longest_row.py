"""Check of the longest row that trainer and rollout engine compute alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.engines.families.longest_row import longest_row


def check_longest_row(config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Check that no row is longer than the trainer and the rollout engine compute it alike.

    Raises:
        UserError: prompts and responses together may be longer.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = longest_row(settings)
    if longest is not None and prompt + response > longest.tokens:
        raise UserError(
            f"model.path: a prompt of {prompt} tokens and a response of {response} have {prompt + response}, and "
            f"beyond {longest.tokens} {longest.beyond}",
            "reduce data.max_prompt_tokens or rollout.max_response_tokens",
        )
