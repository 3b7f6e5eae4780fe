"""What an agent asks, as tokens; and its turns, as it is told of them.

The first request of an episode is rendered and becomes the prompt. What follows a turn is put behind the tokens that
were sampled, as for an environment (penstock/engines/rollout/chat.py). A request that does not follow, since its agent
has rewritten what was said or begun something beside it, is rendered by itself and answered, and neither learnt from
nor part of the episode: that is counted. Where several paths are learnt from it begins one, at the turn after which it
comes, or by itself (penstock/engines/rollout/paths/places.py). No text that the policy said becomes tokens a second
time in what is learnt from.

What an agent asks at once is drawn at once: one of it goes on with the episode, the others are beside it, or paths of
their own.

Left out: who asks (penstock/environments/agent.py), playing (penstock/engines/rollout/episodes.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from penstock.base.errors import UserError
from penstock.configs.sections.data import DataConfig
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.data.chat import rendered
from penstock.engines.rollout.carried import spans_of
from penstock.engines.rollout.chat import ChatMarkup
from penstock.engines.rollout.episode import Episode, Placed
from penstock.engines.rollout.paths.places import begun_path, turn_before
from penstock.environments.gateway.asks import CUT, Ask, SaidCall, Turn

NO_TEMPLATE = "the model's tokenizer has no chat template: ask /v1/completions, or use an instruction-tuned model"


class NotServed(Exception):
    """A request that cannot be answered; its text says why."""


@dataclass(frozen=True)
class Agents:
    """How a model's agents are served.

    Attributes:
        arguments: what the chat template is given besides messages.
        max_prompt_tokens: of the first request of an episode.
        max_turns: of an episode, those beside its conversation included.
        max_paths: of an episode, that are learnt from.
    """

    tokenizer: Any
    arguments: Mapping[str, Any]
    parser: str | None
    max_prompt_tokens: int
    max_turns: int
    max_paths: int = 1

    @cached_property
    def chat(self) -> ChatMarkup | None:
        """The markup of chats; None: the model knows none.

        Raises:
            UserError: as `ChatMarkup`.
        """
        if self.tokenizer.chat_template is None:
            return None
        return ChatMarkup(self.tokenizer, self.arguments, self.parser)

    def placed(self, episode: Episode, asks: Sequence[Ask], limit: int, version: int) -> list[Placed]:
        """Return where the turns of requests belong that came at once; the first that follows goes on with the episode.

        What is new in that one is put behind the episode's tokens.

        Args:
            limit: of tokens behind the prompt.
            version: the policy's.
        """
        found: list[Placed] = []
        for ask in asks:
            turns = episode.drawn + sum(placed.choices for placed in found)
            is_free = all(placed.aside is not None or placed.refused is not None for placed in found)
            try:
                self._check_turns(episode, ask, turns)
                self._check_size(episode, ask, self.max_prompt_tokens + limit, is_free)
                if self.max_paths > 1:
                    drawn = [path for placed in found for path in placed.paths.values()]
                    found.append(self._on_a_path(episode, ask, drawn, limit, version))
                elif is_free and self._follows(episode, ask, limit, version):
                    found.append(Placed(ask, paths={0: episode}))
                else:
                    found.append(Placed(ask, self._aside(self.whole(ask), limit)))
            except NotServed as error:
                found.append(Placed(ask, refused=str(error)))
        return found

    def _check_turns(self, episode: Episode, ask: Ask, turns: int) -> None:
        if ask.choices > self.max_turns:
            raise NotServed(
                f"'n' is {ask.choices}, more than an episode's turns: environment.max_turns={self.max_turns}"
            )
        if turns + ask.choices > self.max_turns:
            episode.truncated = True
            raise NotServed(CUT)

    def _check_size(self, episode: Episode, ask: Ask, room: int, is_free: bool) -> None:
        """Refuse what cannot have room before it becomes tokens, which takes this engine's time.

        No text has fewer tokens than its characters by those of the longest token. What would have been the episode's
        next turn, if `is_free`, cuts it.
        """
        texts = (ask.text, ask.whole or ask.messages, ask.tools)
        size = len(ask.tokens or ()) or sum(len(str(part)) for part in texts if part)
        most = room if ask.tokens else room * self._longest
        if size > most:
            episode.truncated |= is_free and (ask.follows or _go_on_with(episode, ask.tokens))
            kind = "tokens" if ask.tokens else "characters"
            raise NotServed(f"the request has {size} {kind}, beyond the maximum context length of {room} tokens")

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def _follows(self, episode: Episode, ask: Ask, limit: int, version: int) -> bool:
        """Put what an agent asks behind the tokens of its episode; return whether it follows these.

        Raises:
            NotServed: it has no room, or there are no tokens.
        """
        if not episode.turn_ends:
            self._begin(episode, ask)
            return True
        observed = self.following(ask, episode.prompt + episode.tokens, episode.turn(len(episode.turn_ends)))
        if observed is None:
            return False
        self._observe(episode, episode, observed, limit, version)
        return True

    def _begin(self, episode: Episode, ask: Ask) -> None:
        prompt = self.whole(ask)
        if len(prompt) > self.max_prompt_tokens:
            said = f"the first request of the episode has {len(prompt)} tokens, more than data.max_prompt_tokens"
            raise NotServed(f"{said} ({self.max_prompt_tokens})")
        episode.prompt = prompt

    def _observe(
        self, episode: Episode, path: Episode, observed: list[int], limit: int, version: int, drawn: int = 0
    ) -> None:
        """Put what is new behind a path of an episode, if that leaves a token for each turn, `drawn` and this one."""
        if limit - episode.size - len(observed) <= drawn:
            episode.truncated = True
            raise NotServed(f"the maximum context length is reached: rollout.max_response_tokens is {limit}")
        path.observed(observed, version)

    def _on_a_path(self, episode: Episode, ask: Ask, drawn: Sequence[Episode], limit: int, version: int) -> Placed:
        """Return which paths the turns of a request go on with or begin, where several are learnt from.

        Args:
            drawn: the paths that turns of requests before it go on with.

        Raises:
            NotServed: it has no room, or there are no tokens.
        """
        if not (episode.turn_ends or drawn):
            self._begin(episode, ask)
            return self._with_choices(episode, Placed(ask, paths={0: episode}), drawn, limit)
        before = turn_before(episode, ask)
        observed = None if before is None else self.following(ask, before.tokens, before.turn)
        if before is None or observed is None:
            prompt = self.whole(ask)
        elif before.is_free(drawn):
            self._observe(episode, before.path, observed, limit, version, len(drawn))
            return self._with_choices(episode, Placed(ask, paths={0: before.path}), drawn, limit)
        else:
            prompt = before.tokens + observed
        return self._with_choices(episode, Placed(ask, self._aside(prompt, limit)), drawn, limit)

    def _with_choices(self, episode: Episode, placed: Placed, drawn: Sequence[Episode], limit: int) -> Placed:
        """Give every choice that has no path one of its own, as far as there may be others and they have room."""
        prompt = placed.prompt
        for choice in range(len(placed.paths), placed.choices):
            begun = len(drawn) + len(placed.paths)
            is_one = 1 + len(episode.branches) < self.max_paths
            if not is_one or (path := begun_path(episode, prompt, begun, limit)) is None:
                break
            placed.paths[choice] = path
        placed.aside = None if placed.paths else prompt
        known = len(episode.numbered) + len(drawn)
        placed.names = {choice: known + choice + 1 for choice in placed.paths}
        return placed

    def _aside(self, tokens: list[int], limit: int) -> list[int]:
        if len(tokens) >= self.max_prompt_tokens + limit:
            raise NotServed(f"the request has {len(tokens)} tokens and leaves no room for a turn")
        return tokens

    def room(self, episode: Episode, placed: Placed, limit: int) -> int:
        """Return how many tokens a turn may have; those that are drawn at once and learnt from share what there is."""
        if placed.aside is not None:
            return self.max_prompt_tokens + limit - len(placed.aside)
        return (limit - episode.size) // sum(len(other.paths) for other in episode.round)

    def told(self, episode: Episode, texts: Mapping[int, str]) -> list[list[Turn]]:
        """Return what an agent is told of its round: of each request the choices.

        Args:
            texts: of the turns, special tokens left out, by the number of their request to the decode loop.
        """
        return [self._told(placed, texts) for placed in episode.round]

    def _told(self, placed: Placed, texts: Mapping[int, str]) -> list[Turn]:
        if placed.refused is not None:
            return [Turn(refused=placed.refused)]
        assert placed.ask is not None
        prompt, turns = placed.prompt, []
        for choice, request in sorted(placed.drawn.items()):
            turn = self.turn(placed.ask, prompt, request.tokens.tolist(), texts[request.row])
            turn = replace(turn, logprobs=request.logprobs, versions=request.versions)
            learnt, number = choice in placed.paths, placed.names.get(choice, 0)
            turns.append(replace(turn, truncated=request.truncated, learnt=learnt, number=number))
        return turns

    # ---- an episode that is played again ---------------------------------------------------------------------------

    def comes_again(self, episode: Episode, number: int, asks: Sequence[Ask]) -> bool:
        """Whether an agent asks after turn `number` for what it has asked then, alone; 0: in the beginning."""
        if len(asks) != 1 or asks[0].choices != 1:
            return False
        try:
            if not number:
                return self.whole(asks[0]) == episode.prompt
            before = episode.until(episode.turn_ends[number - 1])
            return self.following(asks[0], before, episode.turn(number)) == episode.observation(number)
        except NotServed:
            return False

    def told_again(self, episode: Episode, number: int, ask: Ask, text: str, ends: Collection[int]) -> Turn:
        """Return a turn of an episode as its agent was told of it.

        Args:
            text: of its tokens, special tokens left out.
            ends: tokens that end a turn; one that ends otherwise was cut.
        """
        tokens, end = episode.turn(number), episode.turn_ends[number - 1]
        begin = end - len(tokens)
        logprobs = episode.logprobs[begin:end] if len(episode.logprobs) == len(episode.tokens) else []
        turn = self.turn(ask, episode.until(begin), tokens, text)
        versions = spans_of(episode.versions[begin:end])
        return replace(turn, logprobs=logprobs, versions=versions, truncated=tokens[-1] not in ends)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def whole(self, ask: Ask) -> list[int]:
        """Return the tokens of a request by itself, whatever it might follow.

        Raises:
            NotServed: there is no chat template, or it refuses the messages; there are no tokens.
        """
        if ask.tokens is not None:
            return self._known(ask.tokens)
        if ask.messages is None:
            tokens: list[int] = self.tokenizer(ask.text)["input_ids"]
        else:
            text = self._rendered(ask.whole or ask.messages, ask.tools)
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
        if ask.tools is None or self.chat is None or not ask.calls:
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


def _go_on_with(episode: Episode, tokens: list[int] | None) -> bool:
    """Whether tokens go on with an episode that has had a turn."""
    before = episode.prompt + episode.tokens
    return tokens is not None and bool(episode.turn_ends) and tokens[: len(before)] == before


def agents_of(tokenizer: Any, config: EnvironmentConfig, data: DataConfig) -> Agents:
    """Return how agents are served.

    Raises:
        UserError: there is a parser of tool calls and no chat template.
    """
    limits = data.max_prompt_tokens, config.max_turns, config.max_paths
    agents = Agents(tokenizer, data.chat_arguments, config.tool_parser, *limits)
    if config.tool_parser is not None and agents.chat is None:
        raise UserError("'environment.tool_parser' has no effect: the model has no chat template", "remove it")
    return agents
