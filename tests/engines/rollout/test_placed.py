"""Where a request belongs: behind its episode's tokens, or beside them with all that it brought."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.data.tokenizer import load_tokenizer
from penstock.engines.rollout.agents import Agents
from penstock.engines.rollout.episode import Episode
from penstock.environments.gateway.asks import Ask, SaidCall
from penstock.environments.gateway.history import History, Refused
from penstock.environments.gateway.requests import ChatRequest
from tests.chat.model import TEMPLATE, make_chat_tokenizer

LIMIT, LONGEST = 60, 60
QUESTION, MORE = {"role": "user", "content": "guess"}, {"role": "user", "content": "more"}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Agents:
    folder = tmp_path_factory.mktemp("chat")
    make_chat_tokenizer(folder, [TEMPLATE, "guess", "more", "0123456789"] * 20)
    return Agents(load_tokenizer(str(folder)), {}, None, max_prompt_tokens=LONGEST, max_turns=8)


def begun(agents: Agents, ask: Ask, turn: str) -> Episode:
    """Return an episode whose agent has asked once and got a turn."""
    episode = Episode(0, 0, 0, [], 0, 0)
    (first,) = agents.placed(episode, [ask], LIMIT, 0)
    assert first.aside is first.refused is None
    episode.tokens = agents.tokenizer(turn, add_special_tokens=False)["input_ids"]
    episode.mask = [1] * len(episode.tokens)
    episode.turn_ends = [len(episode.tokens)]
    return episode


def second_chat(content: str = "7") -> Ask:
    """Return what goes on with a chat whose first turn was this."""
    history, answer = History(), {"role": "assistant", "content": content}
    history.chat_went_on([QUESTION], None, answer)
    return history.chat([QUESTION, answer, MORE], None, None)


def rendered(agents: Agents, *messages: dict[str, Any]) -> str:
    text: str = agents.tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
    return text


def test_a_chat_after_a_turn_that_was_cut_is_asked_whole(agents: Agents) -> None:
    """Since nothing can be put behind that turn. Control: behind one that ended as the template ends them it is."""
    whole = rendered(agents, QUESTION, {"role": "assistant", "content": "7"}, MORE)
    cut, ended = (begun(agents, Ask([QUESTION]), turn) for turn in ("7", "7<|im_end|>"))
    (beside,) = agents.placed(cut, [second_chat()], LIMIT, 0)
    assert beside.aside is not None and agents.tokenizer.decode(beside.aside) == whole
    assert len(cut.tokens) == cut.turn_ends[-1]
    (behind,) = agents.placed(ended, [second_chat()], LIMIT, 0)
    assert behind.aside is None and agents.tokenizer.decode(ended.prompt + ended.tokens) == whole


def test_calls_stay_text_where_none_are_wanted(agents: Agents) -> None:
    """As agents ask that compact a history with tools: they want a summary, and read the text. Controls: a request that
    leaves it open has the call apart from its text, and one that asks for a call is refused.
    """
    said = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    tokens = agents.tokenizer(f"{said}<|im_end|>", add_special_tokens=False)["input_ids"]
    asked = {"messages": [QUESTION], "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    turns = {}
    for choice in ("none", "auto", "required"):
        request = ChatRequest.model_validate({**asked, "tool_choice": choice})
        if choice == "required":
            with pytest.raises(Refused, match="'tool_choice' is not served"):
                request.refuse()
            continue
        request.refuse()
        ask = request.ask(History())
        assert ask.tools == asked["tools"], "the template tells of them all the same"
        turns[choice] = agents.turn(ask, [1], tokens, said)
    assert (turns["none"].text, turns["none"].tool_calls) == (said, [])
    assert (turns["auto"].text, turns["auto"].tool_calls) == ("", [SaidCall("add", "{}")])


def test_the_whole_chat_is_held_against_the_room(agents: Agents) -> None:
    """Before it becomes tokens, though what is new of it is short. Control: the chat above is short as well."""
    episode = begun(agents, Ask([QUESTION]), "7")
    (placed,) = agents.placed(episode, [second_chat("7" * 100_000)], LIMIT, 0)
    assert "characters, beyond the maximum context length" in str(placed.refused) and episode.truncated


@pytest.mark.parametrize(("begins", "beside", "cut"), [(True, False, True), (False, False, False), (True, True, False)])
def test_tokens_that_outgrow_the_room_cut_the_episode_that_they_go_on_with(
    agents: Agents, begins: bool, beside: bool, cut: bool
) -> None:
    """Control: those of another story, and those beside a request that goes on, are refused, and the episode lives."""
    episode = begun(agents, Ask(tokens=[4, 5, 6]), "7")
    before = episode.prompt + episode.tokens
    long = [*(before if begins else [9] * 4), *[8] * (LIMIT + LONGEST)]
    others = [Ask(tokens=[*before, 8])] * beside
    *goes_on, placed = agents.placed(episode, [*others, Ask(tokens=long)], LIMIT, 0)
    assert [other.aside for other in goes_on] == [None] * beside
    assert "tokens, beyond the maximum context length" in str(placed.refused)
    assert episode.truncated is cut


def test_a_first_request_beyond_all_room_fails_and_cuts_nothing(agents: Agents) -> None:
    """Its agent has to read that it never had a turn. Control: the test above."""
    episode = Episode(0, 0, 0, [], 0, 0)
    (placed,) = agents.placed(episode, [Ask(tokens=[4] * (LIMIT + LONGEST + 1))], LIMIT, 0)
    assert placed.refused is not None and not episode.truncated
