"""What a chat template puts around turns, as tokens; and the tool calls in a turn.

An episode with tools is a chat, but its turns stay the tokens that were sampled: rendering the whole chat again would
bring other tokens for the same text, and some templates leave parts of earlier turns out. So what stands between two
turns is taken from a chat of made-up messages: what the template writes behind the token that ends a turn of the
model's. A turn that ended otherwise has no such place, and its episode ends there, as failed.

The prompt's last message stays open, because an environment may add to it; `opening` closes it.

Left out: playing (penstock/engines/rollout/episodes.py), the prompts and what they tell of tools
(penstock/data/prompts.py).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import UserError
from penstock.data.chat import SAID, behind_the_last_message, rendered
from penstock.environments.environment import ToolCall

DEFAULT_PARSER = "hermes"
MADE_UP = {"role": "user", "content": SAID}


class ChatMarkup:
    """The markup of one model's chats.

    Args:
        tokenizer: the model's, with a chat template.
        arguments: what the template is given besides messages.
        parser: vLLM's name of the parser of tool calls; None: `hermes`.

    Attributes:
        end_of_turn: the token with which the model ends a turn.

    Raises:
        UserError: vLLM has no such parser or it does not go with the tokenizer, or the template does not end a turn
            with one token.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], parser: str | None) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        self._parser = _parser_of(parser or DEFAULT_PARSER, tokenizer)
        self._request = _request()
        self._markers = _markers(tokenizer)
        self._opening = behind_the_last_message(tokenizer, arguments)
        self.end_of_turn, self._end = self._end_of_turn()
        self._before: dict[str | None, str] = {}  # made-up chats up to what follows, by the name of the tool

    def opening(self, text: str | None) -> list[int]:
        """Return the tokens that close the prompt's last message, behind a text that is added to it."""
        return self._encoded(self._harmless(text or "") + self._opening)

    def bridge(self, turn: Sequence[int], messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Return the tokens between a turn and the next; None where the turn did not end as the template ends one.

        Args:
            turn: its tokens.
            messages: what its tools returned, or the user said. Texts that would become control tokens are taken out of
                their contents.
        """
        if not turn or turn[-1] != self.end_of_turn:
            return None
        name = messages[0]["name"] if messages[0]["role"] == "tool" else None
        if name not in self._before:
            before = self._rendered(_made_up(name), more=False)
            self._before[name] = before[: before.rindex(self._end) + len(self._end)]
        told = [{**message, "content": self._harmless(message["content"])} for message in messages]
        whole = self._rendered([*_made_up(name), *told], more=True)
        if not whole.startswith(self._before[name]):
            return None
        return self._encoded(whole[len(self._before[name]) :])

    def tool_calls(self, turn: Sequence[int]) -> list[ToolCall]:
        """Return the calls in a turn, in their order; none where the parser finds none."""
        _, calls = self.parsed(turn)
        return [ToolCall(name, _object(arguments)) for name, arguments in calls]

    def parsed(self, turn: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
        """Return a turn's text without its calls, and of each call the name and what stands for its arguments."""
        text = self._tokenizer.decode(turn, skip_special_tokens=False).removesuffix(self._end)
        found = self._parser.extract_tool_calls(text, self._request)
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    def _end_of_turn(self) -> tuple[int, str]:
        whole = self._rendered([MADE_UP, {"role": "assistant", "content": SAID}], more=False)
        behind = self._encoded(whole[whole.rindex(SAID) + len(SAID) :])
        if not behind or behind[0] not in self._tokenizer.added_tokens_decoder:
            raise UserError(
                "the model's chat template ends a turn with no control token, so tools cannot be played exactly",
                "use a model whose template ends turns with one, such as <|im_end|>",
            )
        return behind[0], self._tokenizer.convert_ids_to_tokens(behind[0])

    def _rendered(self, messages: Sequence[Mapping[str, Any]], more: bool) -> str:
        return rendered(self._tokenizer, messages, {**self._arguments, "add_generation_prompt": more})

    def _encoded(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _harmless(self, text: str) -> str:
        return self._markers.sub("", text) if self._markers else text


def _made_up(name: str | None) -> list[dict[str, Any]]:
    """Return a made-up chat that ends by calling a tool, which some templates name with its results; None: in words."""
    if name is None:
        return [MADE_UP, {"role": "assistant", "content": SAID}]
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return [MADE_UP, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _markers(tokenizer: Any) -> re.Pattern[str] | None:
    """Return what matches the texts that become one token wherever they stand: control tokens and their like."""
    texts = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _parser_of(name: str, tokenizer: Any) -> Any:
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # a traceback for each call that is no JSON
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        parser.extract_tool_calls("", _request())
    except NotImplementedError:  # its server has another way for them
        raise UserError(
            f"'environment.tool_parser' is '{name}', of which vLLM has the name alone: it finds no calls in a text",
            "name another parser, or use a model whose calls one finds",
        ) from None
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise UserError(f"'environment.tool_parser' is '{name}', which vLLM does not have", f"it has {known}") from None
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"'environment.tool_parser' is '{name}', which does not go with the model's tokenizer: {error}",
            "name the parser of the model's family",
        ) from error
    return parser


def _request() -> Any:
    """Return what parsers are given beside the text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[], model="")


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, or endlessly nested
        return None
    return value if isinstance(value, dict) else None
