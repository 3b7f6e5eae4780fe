"""The gateway in a worker process: what agents ask arrives, what they get is told, and nobody asks for another's.

The policy is scripted here: the tests answer what is asked. Tokens are in tests/engines/rollout/test_agents.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse
from vllm.outputs import WeightVersionSpan

from penstock.configs.sections.rollout import EnvironmentConfig
from penstock.environments.gateway.asks import Ask, SaidCall, Turn
from penstock.environments.gateway.history import History, Refused
from penstock.environments.gateway.requests import GenerateRequest
from penstock.environments.pool import EnvironmentPool
from penstock.environments.worker import Call, Reply

Policy = Callable[[Ask], Turn]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with closing(opened()) as found:
        assert found.is_agent and not found.has_tools
        yield found


def opened(name: str = "Scripted", timeout_s: float = 60.0, workers: int = 1) -> EnvironmentPool:
    section = {"type": f"tests.gateway.scripted:{name}", "workers": workers, "timeout_s": timeout_s}
    return EnvironmentPool(EnvironmentConfig.model_validate(section))


def play(pool: EnvironmentPool, policy: Policy, row: dict[str, Any], turns: int = 9) -> tuple[Reply, list[Ask]]:
    """Play an episode; return how it ended, and all that was asked."""
    reply, rounds = play_rounds(pool, policy, row, turns)
    return reply, [ask for asks in rounds for ask in asks]


def play_rounds(
    pool: EnvironmentPool, policy: Policy, row: dict[str, Any], turns: int = 9
) -> tuple[Reply, list[list[Ask]]]:
    """Play an episode; return how it ended, and what was asked at once each time."""
    pool.ask([Call("e", row=row, seed=3)])
    rounds: list[list[Ask]] = []
    while True:
        reply = pool.replies(wait_for=1)["e"]
        if not reply.asks:
            return reply, rounds
        rounds.append(reply.asks)
        given = [[policy(ask) for _ in range(ask.choices)] for ask in reply.asks]
        pool.ask([Call("e", turns=given, last=sum(map(len, rounds)) >= turns)])


def says(text: str, **others: Any) -> Policy:
    return lambda ask: Turn(text, prompt=[1, 2], tokens=[5, 6, 7], **others)


def test_a_chat_arrives_and_only_what_is_new_follows(pool: EnvironmentPool) -> None:
    """The turn's message comes back with the next request and is not asked again. Control: one that was rewritten."""
    reply, asked = play(pool, says("four"), {"plan": ["chat", "chat", "rewritten", "chat"]})
    first, second, third, fourth = asked
    assert first == Ask([{"role": "user", "content": "2+2?"}])
    new = {"role": "user", "content": "and now?"}
    said = {"role": "assistant", "content": "four"}
    assert second == Ask([new], follows=True, whole=[*(first.messages or []), said, new])
    assert not third.follows and [message["role"] for message in third.messages or []] == ["user"]
    assert not fourth.follows, "the rewritten one was learnt from, so what was before it does not go on"
    assert reply.reward == 4.0 and reply.done and not reply.cut


def test_a_turn_may_come_back_without_the_spaces_around_it(pool: EnvironmentPool) -> None:
    """As clients trim what they show: the tokens stay those that were sampled. Control: other words do not follow."""
    for plan, follows in ((["trimmed", "chat"], True), (["reworded", "chat"], False)):
        assert play(pool, says(" four\n"), {"plan": plan})[1][1].follows is follows


def test_what_is_taken_aside_changes_nothing_of_what_follows(pool: EnvironmentPool) -> None:
    """A turn that is not learnt from leaves the chat as it was: the next request goes on with it."""
    turns = iter([Turn("four"), Turn("aside", learnt=False), Turn("five")])
    _, asked = play(pool, lambda _: next(turns), {"plan": ["chat", "beside", "chat"]})
    assert [ask.follows for ask in asked] == [False, False, True]


def test_tool_calls_go_both_ways(pool: EnvironmentPool) -> None:
    """The agent's client sees calls as OpenAI's, and a result is told with the name of its tool."""
    turns = iter([Turn("", [SaidCall("add", '{"a": 1}')]), Turn("done")])
    reply, asked = play(pool, lambda _: next(turns), {"plan": ["tools"]})
    assert asked[0].tools and asked[0].tools[0]["function"]["name"] == "add"
    result = {"role": "tool", "content": "1", "name": "add"}
    (message,) = asked[1].messages or []
    assert {name: message[name] for name in result} == result and asked[1].follows
    assert reply.parts == {"called_add": 1.0, "said_done": 1.0}


def test_a_text_goes_on_and_tokens_come_as_they_are(pool: EnvironmentPool) -> None:
    """Of a text what is new; of tokens all, with their log-probs and the policy's version back."""
    turn = Turn("b", prompt=[9, 9], tokens=[4, 5], logprobs=[-0.5, -1.0], versions=[(0, 6), (1, 7)])
    reply, asked = play(pool, lambda _: turn, {"plan": ["text", "text", "tokens"]})
    assert asked == [Ask(text="a"), Ask(text=";", follows=True), Ask(tokens=[1, 2, 3], max_tokens=2)]
    assert reply.parts == {"tokens": 9.0, "logprobs": -1.5, "policy_version": 7.0, "prompt": 18.0}


def test_tokens_are_told_in_vllms_own_shape() -> None:
    """Its model of an answer reads ours: choices, log-probs by token, which policy drew which. Control: with a negative
    token it does not.
    """
    request = GenerateRequest.model_validate({"token_ids": [1, 2], "sampling_params": {"n": 2}})
    turn = Turn(prompt=[1, 2], tokens=[4, 5, 6], logprobs=[-0.5, -1.0, -2.0], versions=[(0, 6), (2, 7)], truncated=True)
    known = GenerateTokensResponse.model_validate(request.answer([turn, replace(turn, truncated=False)], History()))
    assert known.prompt_token_ids == [1, 2] and [choice.finish_reason for choice in known.choices] == ["length", "stop"]
    first = known.choices[0]
    assert first.logprobs is not None and first.logprobs.content is not None
    assert [(item.token_id, item.logprob) for item in first.logprobs.content] == [(4, -0.5), (5, -1.0), (6, -2.0)]
    assert first.token_ids == [4, 5, 6] and first.sampling_mask is None
    named = request.answer([turn], History())["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in named] == ["token_id:4", "token_id:5", "token_id:6"], "as verifiers' client reads"
    assert first.weight_versions == [WeightVersionSpan("6", 0, 2), WeightVersionSpan("7", 2, 3)]
    with pytest.raises(ValidationError):
        GenerateTokensResponse.model_validate(request.answer([replace(turn, tokens=[-4, 5, 6])] * 2, History()))


def test_a_stream_brings_the_same(pool: EnvironmentPool) -> None:
    """OpenAI's client reads it; the next request follows what it has read."""
    reply, asked = play(pool, says("four"), {"plan": ["stream", "chat"]})
    assert reply.reward == 2.0 and asked[1].follows


def test_a_stream_tells_what_it_took(pool: EnvironmentPool) -> None:
    """To OpenAI's own reader of streams, by which agents know when to compact: it skips what is no piece of a chat."""
    reply, _ = play(pool, says("four"), {"plan": ["stream helper"]})
    assert reply.parts == {"reward": 1.0, "prompt": 2.0, "drawn": 3.0}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("ends at", "'stop' is not served"),
        ("image", "a message's content is not text"),
        ("nothing", "messages"),
        ("odd calls", "a message's tool calls are not as OpenAI has them"),
        ("odd limit", "sampling_params.max_tokens"),
        ("stranger", "there is no such episode"),
        ("gigantic", "larger than 16 MiB"),
        ("logprobs", "'logprobs' are not kept by this recipe"),
    ],
)
def test_what_is_not_served_is_refused_by_name(pool: EnvironmentPool, plan: str, said: str) -> None:
    """The agent reads why, and its episode fails with that, since it does not look; it is counted, but for an address
    that is no episode's. Control: the tests above.
    """
    reply, _ = play(pool, says("four"), {"plan": [plan]})
    assert reply.failure is not None and said in reply.failure
    assert reply.parts == ({} if plan == "stranger" else {"requests/refused": 1.0})
    reply, _ = play(pool, says("four"), {"plan": ["chat"]})
    assert (reply.failure, reply.parts) == (None, {"reward": 1.0})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "tool", "tool_call_id": {"a": 1}, "content": "4"}, "a message's 'tool_call_id' is not text"),
        ({"role": ["user"], "content": "4"}, "a message's 'role' is not text"),
        ({"role": "user", "tool_calls": [{"id": [1], "function": {}}]}, "tool calls are not as OpenAI has them"),
        ({"role": "user", "tool_calls": [{"function": {"name": {}}}]}, "tool calls are not as OpenAI has them"),
    ],
)
def test_names_that_are_not_text_are_refused(message: dict[str, Any], said: str) -> None:
    """Where they follow a turn, too, whose calls are looked up by them. Control: text, or nothing."""
    history, question = History(), {"role": "user", "content": "2+2?"}
    history.chat_went_on([question], None, {"role": "assistant", "content": "four"})
    before = [question, {"role": "assistant", "content": "four"}]
    with pytest.raises(Refused, match=said):
        history.chat([*before, message], None, None)
    assert history.chat([*before, {"role": "tool", "tool_call_id": "a", "content": "4"}], None, None).follows


@pytest.mark.parametrize(
    "written",
    ["[" * 100_000, "1" * 5_000, '{"a": "\\ud83d"}', "{a"],
    ids=["endlessly nested", "5,000 digits", "half a pair", "no JSON"],
)
def test_arguments_that_nobody_can_read_stay_as_they_are(written: str) -> None:
    """Of a policy's call, which its agent sends back: no template could write them. Control: others are an object."""
    calls = [{"id": "1", "function": {"name": "add", "arguments": arguments}} for arguments in (written, '{"a": 1}')]
    ask = History().chat([{"role": "assistant", "content": "", "tool_calls": calls}], None, None)
    assert ask.messages is not None
    read = [call["function"]["arguments"] for call in ask.messages[0]["tool_calls"]]
    assert read == [written, {"a": 1}]


def test_refusals_before_an_agents_deadline_are_counted() -> None:
    """Control: one that was refused nothing, below, fails by its deadline alone."""
    with closing(opened(timeout_s=3.0)) as pool:
        reply, _ = play(pool, says("x"), {"plan": ["unheard", "sleeps"]})
        assert (reply.failure, reply.parts) == ("timed out after 3 s", {"requests/refused": 1.0})


def test_temperature_is_the_recipes(pool: EnvironmentPool) -> None:
    """A client may name one, as most do; nothing of it is asked of the engine."""
    assert play(pool, says("four"), {"plan": ["warm"]})[1] == [Ask([{"role": "user", "content": "2+2?"}])]


def test_an_episode_that_is_cut_gets_no_more_turns(pool: EnvironmentPool) -> None:
    """The agent is told, ends by itself and has its reward. Control: one that wanted no more was not cut."""
    reply, asked = play(pool, says("four"), {"plan": ["chat"] * 5, "ends": True}, turns=2)
    assert len(asked) == 2 and reply.cut and reply.reward == 2.0
    assert reply.parts == {"reward": 2.0}, "that it was refused more is its end, and nothing to count"
    reply, _ = play(pool, says("four"), {"plan": ["chat"] * 2, "ends": True}, turns=2)
    assert not reply.cut and reply.reward == 2.0


def test_what_is_asked_at_once_is_drawn_at_once(pool: EnvironmentPool) -> None:
    """Three requests are a round, and each has its own answer. Control: one after the other they are three rounds."""
    turns = iter([Turn(text) for text in "abc"])
    reply, rounds = play_rounds(pool, lambda _: next(turns), {"plan": ["at once"]})
    assert rounds == [[Ask(text="q")] * 3] and reply.parts == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert [len(asks) for asks in play_rounds(pool, says("b"), {"plan": ["text"] * 3})[1]] == [1, 1, 1]


@pytest.mark.parametrize("order", [1, -1])
def test_a_request_that_is_still_being_read_is_waited_for(pool: EnvironmentPool, order: int) -> None:
    """The long one comes in many pieces. Control: one of which nothing more comes holds nothing up, below."""
    _, rounds = play_rounds(pool, says("x"), {"plan": ["long and short"], "order": order})
    assert [sorted(len(ask.text or "") for ask in asks) for asks in rounds] == [[1, 6 << 20]]


def test_a_request_that_stalls_holds_nothing_up(pool: EnvironmentPool) -> None:
    """Half of it is there when another is asked, which is answered though the rest never comes."""
    reply, rounds = play_rounds(pool, says("x"), {"plan": ["stalled", "text"]})
    assert [[ask.text for ask in asks] for asks in rounds] == [["a"]] and reply.reward == 2.0


def test_the_order_of_arrival_changes_nothing(pool: EnvironmentPool) -> None:
    """Two stories at once, and two ways to go on from a turn: the same one follows, the other is asked whole."""
    rounds, others = (
        play_rounds(pool, says("four"), {"plan": ["chat", "two stories", "two ways"], "order": order})[1]
        for order in (1, -1)
    )
    assert rounds == others
    _, stories, ways = rounds
    assert [ask.text for ask in stories] == ["once", "twice"] and not any(ask.follows for ask in stories)
    assert [ask.follows for ask in ways] == [True, False]
    assert [len(ask.messages or []) for ask in ways] == [1, 3]


def test_what_is_asked_while_a_turn_is_drawn_does_not_follow_that_turn(pool: EnvironmentPool) -> None:
    """Its sender has not read it. Control: asked with the turn in it, it follows."""

    def slow(_: Ask) -> Turn:
        time.sleep(0.5)
        return Turn("four")

    _, rounds = play_rounds(pool, slow, {"plan": ["chat", "chat meanwhile", "chat"]})
    assert [[ask.follows for ask in asks] for asks in rounds] == [[False], [True], [False], [True]]


def test_several_choices_are_one_request(pool: EnvironmentPool) -> None:
    """Each is in the answer. The first goes on, whatever the agent makes of it; control: another does not."""
    for choice, follows in ((0, True), (1, False)):
        yes = Turn("yes", prompt=[1, 2], tokens=[5, 6])
        turns = iter([yes, replace(yes, text="no", tokens=[7, 8, 9, 9], learnt=False), yes])
        reply, asked = play(pool, lambda _, given=turns: next(given), {"plan": ["choices", "chat"], "choice": choice})
        assert [ask.choices for ask in asked] == [2, 1] and asked[1].follows is follows
        assert reply.parts == {"yes": 1.0, "no": 1.0, "prompt": 2.0, "completion": 6.0, "reward": 1.0}


@pytest.mark.parametrize(("kind", "answered"), [("flood", 64), ("flood of choices", 2)])
def test_a_flood_is_bounded_and_counted(pool: EnvironmentPool, kind: str, answered: int) -> None:
    """Of a hundred requests at once, or of those for thirty choices each, as many wait as make 64 turns; the others are
    told at once. Control: an episode that asks less is refused nothing.
    """
    reply, rounds = play_rounds(pool, says("x"), {"plan": [kind]}, turns=100)
    assert reply.parts == {"answered": answered, "refused": 100 - answered, "requests/refused": 100 - answered}
    assert [len(asks) for asks in rounds] == [answered]
    reply, _ = play(pool, says("x"), {"plan": ["at once"]})
    assert reply.parts == {"x": 1.0}


def test_one_that_never_reads_its_answer_fails_alone() -> None:
    """Others of its worker are answered meanwhile; its own deadline ends it."""
    with closing(opened(timeout_s=2.0)) as pool:
        pool.ask([Call("deaf", row={"plan": ["never reads"]}, seed=1), Call("e", row={"plan": ["chat"]}, seed=1)])
        first = pool.replies(wait_for=2)
        assert all(first[name].asks for name in ("deaf", "e"))
        long = Turn("x" * (8 << 20))
        pool.ask([Call("deaf", turns=[[long]]), Call("e", turns=[[long]])])
        ended: dict[str, Reply] = {}
        while len(ended) < 2:
            ended |= pool.replies(wait_for=1)
        assert ended["e"].reward == 1.0
        assert ended["deaf"].failure == "timed out after 2 s"


def test_an_agent_that_fails_or_never_ends_fails_its_episode_alone() -> None:
    """Its exception is the reason, or the deadline; others of the worker go on. A thread's agent ends when it asks."""
    with closing(opened(timeout_s=1.0)) as pool:
        assert "LookupError: no such thing" in str(play(pool, says("x"), {"plan": ["broken"]})[0].failure)
        reply, _ = play(pool, says("x"), {"plan": ["chat", "sleeps"]})
        assert (reply.failure, reply.parts) == ("timed out after 1 s", {})
        assert play(pool, says("four"), {"plan": ["chat"]})[0].reward == 1.0


def test_one_that_is_abandoned_is_ended(pool: EnvironmentPool) -> None:
    """Its coroutine is cancelled, and its address is nobody's any more."""
    pool.ask([Call("left", row={"plan": ["chat"]}, seed=1)])
    assert pool.replies(wait_for=1)["left"].asks
    pool.abandon(["left"])
    reply, _ = play(pool, says("four"), {"plan": ["left?"]})
    assert reply.parts == {"cancelled": 1.0, "answers": 404.0}


def test_agents_that_are_not_async_run_beside_each_other() -> None:
    """Fifty wait in threads until the last has asked. Control: of each its own turn."""
    with closing(opened("InThreads")) as pool:
        names = [f"t{number}" for number in range(50)]
        pool.ask([Call(name, row={"question": name}) for name in names])
        asked = pool.replies(wait_for=50)
        assert {name: [ask.text for ask in reply.asks] for name, reply in asked.items()} == {n: [n] for n in names}
        pool.ask([Call(name, turns=[[Turn(f"{name}!")]]) for name in names])
        replies = pool.replies(wait_for=50)
        assert {name: reply.parts for name, reply in replies.items()} == {name: {f"{name}!": 1.0} for name in names}
