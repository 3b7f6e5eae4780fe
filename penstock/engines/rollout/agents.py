"""What an agent asks, as tokens; and its turns, as it is told of them.

The first request of an episode is rendered and becomes the prompt. What follows a turn is put behind the tokens that
were sampled, as for an environment (penstock/engines/rollout/chat.py). A request that does not follow, since its agent
has rewritten what was said or begun something beside it, is rendered by itself and answered, and neither learnt from
nor part of the episode: that is counted. No text that the policy said becomes tokens a second time in what is learnt
from.

Left out: who asks (penstock/environments/agent.py), playing (penstock/engines/rollout/episodes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from penstock.base.errors import UserError
from penstock.data.chat import rendered
from penstock.engines.rollout.chat import ChatMarkup
from penstock.environments.gateway.asks import Ask, SaidCall, Turn

NO_TEMPLATE = "the model's tokenizer has no chat template: ask /v1/completions, or use an instruction-tuned model"


class NotServed(Exception):
    """A request that cannot be answered; its text says why."""


@dataclass(frozen=True)
class Agents:
    """How a model's agents are served.

    Attributes:
        arguments: what the chat template is given besides messages.
        max_prompt_tokens: of the first request of an episode.
    """

    tokenizer: Any
    arguments: Mapping[str, Any]
    parser: str | None
    max_prompt_tokens: int

    @cached_property
    def chat(self) -> ChatMarkup | None:
        """The markup of chats; None: the model knows none.

        Raises:
            UserError: as `ChatMarkup`.
        """
        if self.tokenizer.chat_template is None:
            return None
        return ChatMarkup(self.tokenizer, self.arguments, self.parser)

    def whole(self, ask: Ask) -> list[int]:
        """Return the tokens of a request that follows nothing.

        Raises:
            NotServed: there is no chat template, or it refuses the messages; there are no tokens.
        """
        if ask.tokens is not None:
            return self._known(ask.tokens)
        if ask.messages is None:
            tokens: list[int] = self.tokenizer(ask.text)["input_ids"]
        else:
            text = self._rendered(ask.messages, ask.tools)
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not tokens:
            raise NotServed("the request has no tokens")
        return tokens

    def following(self, ask: Ask, before: Sequence[int], turn: Sequence[int]) -> list[int] | None:
        """Return the tokens between a turn and the next; None: the request does not follow it.

        Args:
            before: all tokens of the episode, the turn's the last.
            turn: its tokens.

        Raises:
            NotServed: tokens that the model does not have.
        """
        if ask.tokens is not None:
            follows = ask.tokens[: len(before)] == before
            return self._known(ask.tokens)[len(before) :] if follows else None
        if not ask.follows:
            return None
        if ask.messages is not None:
            return None if self.chat is None else self.chat.bridge(turn, ask.messages)
        tokens: list[int] = self.tokenizer(ask.text, add_special_tokens=False)["input_ids"]
        return tokens

    def turn(self, ask: Ask, prompt: list[int], tokens: list[int], text: str) -> Turn:
        """Return what an agent is told of a turn.

        Args:
            text: of its tokens, special tokens left out.
        """
        if ask.tools is None or self.chat is None:
            return Turn(text, prompt=prompt, tokens=tokens)
        content, calls = self.chat.parsed(tokens)
        return Turn(content if calls else text, [SaidCall(*call) for call in calls], prompt, tokens)

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        if self.tokenizer.chat_template is None:
            raise NotServed(NO_TEMPLATE)
        told = {} if tools is None else {"tools": tools}
        try:
            return rendered(self.tokenizer, messages, {**self.arguments, **told, "add_generation_prompt": True})
        except (TemplateError, TypeError, ValueError) as error:  # templates refuse roles, orders, kinds of values
            raise NotServed(f"the model's chat template refuses the messages: {error}") from error

    def _known(self, tokens: list[int]) -> list[int]:
        count = len(self.tokenizer)  # asked once: a tokenizer counts its tokens each time
        if any(not 0 <= token < count for token in tokens):
            raise NotServed(f"a token is none of the model's {count}")
        return tokens


def agents_of(tokenizer: Any, arguments: Mapping[str, Any], parser: str | None, max_prompt_tokens: int) -> Agents:
    """Return how agents are served.

    Raises:
        UserError: there is a parser of tool calls and no chat template.
    """
    agents = Agents(tokenizer, arguments, parser, max_prompt_tokens)
    if parser is not None and agents.chat is None:
        raise UserError("'environment.tool_parser' has no effect: the model has no chat template", "remove it")
    return agents
