"""Chats as text: what a model's chat template makes of messages.

Left out: rows of data (penstock/data/prompts.py), turns of episodes (penstock/engines/rollout/chat.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SAID = "0a0b0c"  # by made-up messages


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    """Return the text of a chat.

    Args:
        arguments: what the template is given besides the messages.
    """
    return str(tokenizer.apply_chat_template([*messages], tokenize=False, **arguments))


def behind_the_last_message(tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """Return what stands between the content of a user's message, the last one, and the model's answer."""
    whole = rendered(tokenizer, [{"role": "user", "content": SAID}], {**arguments, "add_generation_prompt": True})
    return whole[whole.rindex(SAID) + len(SAID) :]


def reads(tokenizer: Any, name: str) -> bool:
    """Whether the chat template looks at an argument."""
    return re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()) is not None
