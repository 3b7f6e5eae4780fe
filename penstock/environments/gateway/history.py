"""What the policy has read and said in an episode, as its agent's requests tell it.

A request brings the whole chat again, and rendering that would bring other tokens than those that were sampled. So it
is compared with what the last one brought and the turn that answered it: what is new is all that becomes tokens. A
request whose beginning differs does not follow; its turn is another story, and not learnt from.

Where several paths are learnt from, every turn is remembered, and a request follows the one that it has most in common
with: the end of a path, or one in its middle, where another path begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.environments.gateway.asks import Ask

KEPT = ("role", "content", "tool_calls", "tool_call_id", "name")
NAMES = ("role", "tool_call_id", "name")
TEXT = "text"


class Refused(Exception):
    """A request that the gateway does not serve; its text says why."""


@dataclass(frozen=True)
class _Chat:
    """A chat up to and with a turn that is learnt from, of that number."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    turn: int

    def goes_on(self, whole: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        """Whether a request of these messages comes after it."""
        known = self.messages
        same = len(whole) > len(known) and all(map(_alike, whole, known))
        return tools == self.tools and same and _may_follow(whole[len(known) :])


class History:
    """The chat or text up to and with the last turn that is learnt from; with `several` paths, up to each of them."""

    def __init__(self, several: bool = False) -> None:
        self.several = several
        self._chats: list[_Chat] = []
        self._texts: list[tuple[str, int]] = []

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> Ask:
        """Return what a chat asks.

        Raises:
            Refused: a content is no text.
        """
        whole, told = [_plain(message) for message in messages], tools or None
        followed = [chat for chat in self._chats if chat.goes_on(whole, told)]
        if not followed:
            return Ask(whole, tools=told, max_tokens=max_tokens)
        longest = max(followed, key=lambda chat: len(chat.messages))
        new = _named(whole, whole[len(longest.messages) :])
        return Ask(new, tools=told, follows=True, whole=whole, max_tokens=max_tokens, after=longest.turn)

    def chat_went_on(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        answer: Mapping[str, Any],
        turn: int = 0,
    ) -> None:
        """Keep a chat, and the message that answered it: the turn of that number."""
        before = self._chats if self.several else []
        chat = _Chat([_plain(message) for message in (*messages, answer)], tools or None, turn)
        self._chats = [*before, chat]

    def text(self, prompt: str, max_tokens: int | None) -> Ask:
        """Return what a text asks."""
        followed = [known for known in self._texts if known[0] and prompt.startswith(known[0]) and prompt != known[0]]
        if not followed:
            return Ask(text=prompt, max_tokens=max_tokens)
        text, turn = max(followed, key=lambda known: len(known[0]))
        return Ask(text=prompt[len(text) :], follows=True, max_tokens=max_tokens, after=turn)

    def text_went_on(self, prompt: str, answer: str, turn: int = 0) -> None:
        """Keep a text, and what answered it: the turn of that number."""
        before = self._texts if self.several else []
        self._texts = [*before, (prompt + answer, turn)]


def _alike(told: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether a message is the one that is known; of the policy's own, clients take spaces off the ends."""
    if told.get("role") != "assistant":
        return told == known
    return {**told, "content": told["content"].strip()} == {**known, "content": known["content"].strip()}


def _may_follow(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages may come between two turns: none is the policy's own, nor of the system."""
    return bool(messages) and all(message.get("role") in ("user", "tool") for message in messages)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the chat template gets it, the same for the same: no empty keys, contents as text."""
    for name in NAMES:
        if not isinstance(message.get(name), str | None):
            raise Refused(f"a message's '{name}' is not text")
    kept = {name: message[name] for name in KEPT if message.get(name)}
    kept["content"] = _text_of(message.get("content"))
    if "tool_calls" in kept:
        _check_calls(kept["tool_calls"])
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return kept


def _text_of(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == TEXT for part in content):
        return "".join(str(part.get(TEXT, "")) for part in content)
    raise Refused("a message's content is not text, and the policy reads nothing else")


def _check_calls(calls: object) -> None:
    """Raises `Refused` for what cannot be read as calls."""
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise Refused("a message's tool calls are not as OpenAI has them")


def _is_call(call: object) -> bool:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return False
    return isinstance(call.get("id"), str | None) and isinstance(call["function"].get("name"), str | None)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates want them."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    own = {"name": function.get("name"), "arguments": _read(arguments) if isinstance(arguments, str) else arguments}
    return {"id": call.get("id"), "type": "function", "function": own}


def _read(arguments: str) -> Any:
    """Return what arguments say, or these as they are where that is no JSON, or no text could be made of it again."""
    try:
        read = json.loads(arguments)
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return read


def _named(whole: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the tools' names, which results tell by the id of their call."""
    calls = [call for message in whole for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    return [
        {**message, "name": message.get("name") or names.get(message.get("tool_call_id"), "")}
        if message["role"] == "tool"
        else dict(message)
        for message in new
    ]
