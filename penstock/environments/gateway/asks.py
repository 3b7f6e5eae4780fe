"""What an agent asks of the policy and what it gets, between a worker process and the rollout engine of its rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CUT = "the episode is cut: it has had all its turns, or its maximum context length"  # harnesses look for the last words


@dataclass(frozen=True)
class Ask:
    """What an agent asks: the policy's next turn. One of `messages`, `text` and `tokens` says after what.

    Attributes:
        messages: of a chat.
        tools: what the chat template is told of, with messages.
        text: for a text that goes on.
        tokens: all of them, from the first one on.
        follows: whether messages or text are only what comes after the turn before; of tokens the engine sees it.
        whole: the whole chat, where `messages` are only that; it is asked where nothing can follow the turn before.
        max_tokens: of the turn; None: as many as there is room for.
        choices: how many turns are drawn beside each other; the first may go on with the episode.
        after: where several paths are learnt from, the number of the turn that messages or text come after.
        calls: whether calls of tools in the turn are told apart from its text.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    follows: bool = False
    whole: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    choices: int = 1
    after: int = 0
    calls: bool = True


@dataclass(frozen=True)
class SaidCall:
    """A tool call in a turn; `arguments` is what the policy wrote, JSON or not."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """What an agent gets.

    Attributes:
        text: the turn, special tokens left out; of a chat with tools without its calls.
        tool_calls: those.
        prompt: the tokens that the turn follows.
        tokens: of the turn.
        logprobs: of these, under the distribution that they were sampled from; empty: the recipe keeps none.
        truncated: whether a limit cut it.
        versions: the policies that sampled it: from which token on, which one.
        learnt: whether it follows what was learnt from before, and is learnt from itself.
        number: of a turn that is learnt from, where several paths are: what `Ask.after` names.
        refused: why there is no turn; all else is empty then.
    """

    text: str = ""
    tool_calls: list[SaidCall] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    truncated: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    learnt: bool = True
    number: int = 0
    refused: str | None = None

    @property
    def policy_version(self) -> int:
        """The policy that sampled its last token; -1: none did."""
        return self.versions[-1][1] if self.versions else -1
