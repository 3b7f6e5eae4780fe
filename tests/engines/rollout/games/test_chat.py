"""With a chat model what an agent is shown is a user's message, and its row is the chat as the template renders it."""

from __future__ import annotations

from contextlib import closing
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.sections.data import DataConfig
from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.data.tokenizer import load_tokenizer
from penstock.engines.rollout.agents import Agents, NotServed
from penstock.engines.rollout.environments.host import EnvironmentHost, Players
from penstock.engines.rollout.episode import Episode
from penstock.engines.rollout.games.loop import NOT_FOLLOWED, GameLoop
from tests.chat.model import TEMPLATE, make_chat_tokenizer

LIMIT = 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chat")
    make_chat_tokenizer(folder, [TEMPLATE, "guess", "more", "0123456789"] * 20)
    return load_tokenizer(str(folder))


def loop_of(tokenizer: Any, chat: bool) -> GameLoop:
    players = Players(("a", "b"), Agents(tokenizer, {}, None, 200, 8), chat)
    share: Any = SimpleNamespace(sampling=SimpleNamespace(max_tokens=LIMIT))
    return GameLoop(share, SimpleNamespace(tokenizer=tokenizer, pool=None), players, in_step=True)  # type: ignore[arg-type]


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def taken(seat: Episode, tokens: list[int]) -> None:
    """Put a turn behind an agent's tokens."""
    seat.tokens += tokens
    seat.mask += [1] * len(tokens)
    seat.turn_ends.append(len(seat.tokens))


def test_a_row_is_the_rendered_chat(tokenizer: Any) -> None:
    """Control: as plain text it is what was shown and said, without any markup."""
    chat = [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "more"},
    ]
    for as_chat, ends, expected in (
        (True, "<|im_end|>", tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)),
        (False, "", "guess7more"),
    ):
        loop, seat = loop_of(tokenizer, as_chat), Episode(0, 0, 0, [], 0, 0)
        assert loop._shown(seat, "guess", 0)
        taken(seat, tokens_of(tokenizer, "7" + ends))
        assert loop._shown(seat, "more", 0)
        assert tokenizer.decode(seat.prompt + seat.tokens) == expected


def test_a_turn_that_did_not_end_as_the_template_ends_one_is_not_followed(tokenizer: Any) -> None:
    """The game fails with the reason; where there is no room for a turn it does not. Control: the test above."""
    loop, seat = loop_of(tokenizer, True), Episode(0, 0, 0, [], 0, 0)
    assert loop._shown(seat, "guess", 0)
    taken(seat, tokens_of(tokenizer, "7"))
    with pytest.raises(NotServed, match=NOT_FOLLOWED):
        loop._shown(seat, "more", 0)
    taken(seat, tokens_of(tokenizer, "<|im_end|>"))
    assert not loop._shown(seat, "9" * LIMIT, 0)


def test_a_game_of_texts_asks_nothing_of_the_template(tokenizer: Any) -> None:
    """Whose turns end with no token of their own here. Control: a game of chats is refused with it."""
    endless, table = copy(tokenizer), "run/prompts/train.parquet"
    endless.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    game = EnvironmentConfig(type="tests.engines.rollout.games.talking:Talking", agents=["host", "guest"], workers=1)
    with closing(EnvironmentHost(rows={table: {}})) as host:
        opened = host.open(game, endless, table, [], DataConfig())
    assert opened.players is not None and tokens_of(tokenizer, "7")[0] in opened.stop_tokens
    with closing(EnvironmentHost()) as host, pytest.raises(UserError, match="ends a turn with no control token"):
        host.open(game, endless, table, [], DataConfig(chat=True))
