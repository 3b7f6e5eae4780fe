"""Which path a chat's request goes on with or begins, by what it has in common with those before it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.data.tokenizer import load_tokenizer
from penstock.engines.rollout.agents import Agents
from penstock.engines.rollout.decode_loop import Request
from penstock.engines.rollout.episode import Episode, Placed
from penstock.engines.rollout.paths.places import paths_of
from penstock.environments.gateway.asks import Ask
from penstock.environments.gateway.history import History
from tests.chat.model import TEMPLATE, make_chat_tokenizer

LIMIT, LONGEST, MOST = 400, 100, 3
OWNER: Any = SimpleNamespace()
Chat = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Played:
    """An episode whose agent asks, and whose policy says what the test wants."""

    def __init__(self, agents: Agents, limit: int = LIMIT) -> None:
        self.agents, self.limit = agents, limit
        self.history = History(several=agents.max_paths > 1)
        self.episode = Episode(0, 0, 0, [], 0, 0)

    def asks(self, *chats: Chat, choices: int = 1) -> list[Placed]:
        """Place what is asked at once."""
        asks = [self.history.chat(chat, None, None) for chat in chats]
        wanted = [Ask(**{**vars(ask), "choices": choices}) for ask in asks]
        self.episode.round = self.agents.placed(self.episode, wanted, self.limit, 0)
        return self.episode.round

    def said(self, chat: Chat, text: str, end: str = "<|im_end|>") -> Chat:
        """Let the policy answer a chat; return the chat with the answer."""
        (placed,) = self.asks(chat)
        return self.says(placed, chat, text, end=end)

    def says(self, placed: Placed, chat: Chat, text: str, choice: int = 0, end: str = "<|im_end|>") -> Chat:
        tokens = self.agents.tokenizer(text + end, add_special_tokens=False)["input_ids"]
        drawn = Request(OWNER, 0, 0.0, array("i", tokens), [-1.0] * len(tokens), 0, [(0, 0)])
        self.episode.drawing += 1
        self.episode.taken(placed, choice, drawn)
        answered = [*chat, {"role": "assistant", "content": text}]
        if choice in placed.paths:
            self.history.chat_went_on(chat, None, answered[-1], placed.names.get(choice, 0))
        return answered

    def texts(self) -> list[tuple[str, str]]:
        """Prompt and response of each path."""
        decode = self.agents.tokenizer.decode
        return [(decode(path.prompt), decode(path.tokens)) for path in self.episode.paths]

    def rendered(self, chat: Chat) -> str:
        whole: str = self.agents.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return whole


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chat")
    make_chat_tokenizer(folder, [TEMPLATE, "guess", "more", "left", "right", "in short", "0123456789"] * 20)
    return load_tokenizer(str(folder))


@pytest.fixture
def played(tokenizer: Any) -> Played:
    return Played(Agents(tokenizer, {}, None, LONGEST, max_turns=9, max_paths=MOST))


def test_a_chat_that_branches_begins_a_path_at_the_turn_before(played: Played) -> None:
    """Its prompt is the tokens that were drawn and what is new, and each path goes on where it was.

    Control: a chat that has nothing in common has the prompt that the template renders.
    """
    first = played.said([user("guess")], "7")
    left = played.said([*first, user("left")], "1")
    right = played.said([*first, user("right")], "2")
    played.said([*left, user("more")], "3")
    played.said([*right, user("more")], "4")
    played.said([user("in short")], "5")
    (prompt, main), (branch, told), (alone, said) = played.texts()
    assert prompt == played.rendered([user("guess")]) and alone == played.rendered([user("in short")])
    assert branch == played.rendered([*first, user("right")])
    behind = [text.replace("\n", "") for text in (main, told, said)]
    asked = "<|im_start|>user{}<|im_end|><|im_start|>assistant"
    assert behind[0] == f"7<|im_end|>{asked.format('left')}1<|im_end|>{asked.format('more')}3<|im_end|>"
    assert behind[1] == f"2<|im_end|>{asked.format('more')}4<|im_end|>" and behind[2] == "5<|im_end|>"
    assert played.episode.unbridged == 0 and played.episode.drawn == 6


def test_a_chat_that_was_rewritten_begins_anew(played: Played) -> None:
    """What the policy had said is text there, and not learnt from a second time. Control: the first turn is, once."""
    played.said([user("guess")], "7")
    shortened = [user("guess"), {"role": "assistant", "content": "8"}, user("more")]
    played.said(shortened, "9")
    assert [prompt for prompt, _ in played.texts()] == [played.rendered([user("guess")]), played.rendered(shortened)]
    assert [sum(path.mask) for path in played.episode.paths] == [2, 2]


def test_behind_a_turn_that_was_cut_a_path_begins(played: Played) -> None:
    """Since nothing can be put behind it. Control: behind one that ended as the template ends them the path goes on."""
    first = played.said([user("guess")], "7", end="")
    second = played.said([*first, user("more")], "8")
    played.said([*second, user("more")], "9")
    assert [len(path.turn_ends) for path in played.episode.paths] == [1, 2]
    assert played.texts()[1][0] == played.rendered([*first, user("more")])


def test_every_choice_is_a_path_and_whichever_is_chosen_goes_on(played: Played) -> None:
    """They have the prompt in common. Control: the first choice goes on with the path that there was."""
    (placed,) = played.asks([user("guess")], choices=2)
    assert [placed.paths[choice] is played.episode for choice in (0, 1)] == [True, False]
    _, second = (played.says(placed, [user("guess")], text, choice) for choice, text in ((0, "1"), (1, "2")))
    played.said([*second, user("more")], "3")
    main, other = played.episode.paths
    assert main.prompt == other.prompt and other.own == 0
    assert [len(path.turn_ends) for path in (main, other)] == [1, 2]


def test_of_two_that_go_on_from_one_turn_at_once_the_other_branches(played: Played) -> None:
    """And both are learnt from. Control: one after the other it is the same."""
    first = played.said([user("guess")], "7")
    left, right = played.asks([*first, user("left")], [*first, user("right")])
    assert left.paths[0] is played.episode and right.paths[0] is not played.episode
    assert played.agents.tokenizer.decode(right.prompt) == played.rendered([*first, user("right")])
    assert left.names == {0: 2} and right.names == {0: 3}


def test_no_more_paths_begin_than_are_learnt_from(tokenizer: Any) -> None:
    """With max_paths 1 turns beside the only path are answered, and counted; with more, only those beyond."""
    for max_paths, unbridged in ((1, 3), (2, 2), (4, 0)):
        played = Played(Agents(tokenizer, {}, None, LONGEST, max_turns=9, max_paths=max_paths))
        for text in ("guess", "more", "left", "right"):
            played.said([user(text)], "7")
        assert (played.episode.unbridged, len(played.episode.paths)) == (unbridged, max_paths)
        assert played.episode.drawn == 4


def test_a_path_that_has_no_room_does_not_begin(tokenizer: Any) -> None:
    """What is new in its prompt counts with all tokens of the episode; what it has in common does not.

    Its turn is answered alone, and so is one that would leave none for another at the same time. Control: with room
    for one token more it begins.
    """
    played = Played(Agents(tokenizer, {}, None, LONGEST, max_turns=9, max_paths=MOST))
    first = played.said([user("guess")], "7")
    size = played.episode.size
    (placed,) = played.asks([user("guess")])
    assert placed.paths[0].own == 0 and played.episode.size == size
    (branch,) = played.asks([*first, user("left")], choices=3)
    assert len(branch.paths) == 2, "there are three paths now"
    for spare, begins in ((0, False), (1, True)):
        small = Played(Agents(tokenizer, {}, None, LONGEST, max_turns=9, max_paths=MOST))
        small.said([user("guess")], "7")
        shared = _common(
            small.episode.prompt + small.episode.tokens, tokenizer(small.rendered([user("more")]))["input_ids"]
        )
        own = len(tokenizer(small.rendered([user("more")]), add_special_tokens=False)["input_ids"]) - shared
        small.limit = small.episode.size + own + spare
        (placed,) = small.asks([user("more")])
        assert (0 in placed.paths) is begins and (placed.aside is None) is begins


def test_turns_at_once_share_what_is_left(played: Played) -> None:
    """Equally. Control: one alone has all of it."""
    first = played.said([user("guess")], "7")
    size = played.episode.size
    left, right = played.asks([*first, user("left")], [user("more")])
    rooms = [played.agents.room(played.episode, placed, LIMIT) for placed in (left, right)]
    assert rooms == [(LIMIT - played.episode.size) // 2] * 2
    played.says(left, [*first, user("left")], "1")
    played.says(right, [user("more")], "2")
    (alone,) = played.asks([user("guess")])
    assert played.agents.room(played.episode, alone, LIMIT) == LIMIT - played.episode.size < LIMIT - size


def test_paths_are_told_by_where_they_end(played: Played) -> None:
    """One that has had no turn is none. Control: one that has is there with its prompt."""
    first = played.said([user("guess")], "7")
    played.asks([*first, user("left")], [user("more")])
    assert paths_of([played.episode]).ends.row(0).tolist() == [len(played.episode.tokens)]
    assert paths_of([played.episode]).prompts.row(0).tolist() == []
    (placed,) = played.asks([user("right")])
    played.says(placed, [user("right")], "8")
    found = paths_of([played.episode])
    ends, prompt = found.ends.row(0).tolist(), found.prompts.row(0).tolist()
    assert ends == [len(played.episode.tokens), len(played.episode.tokens) + 2]
    assert played.agents.tokenizer.decode(prompt) == played.rendered([user("right")])


def _common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
