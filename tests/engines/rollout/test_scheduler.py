"""Sequences that coast past vLLM's scheduler: no step is another, no key is lost, and hardly anything is asked."""

from __future__ import annotations

import pytest

from tests.engines.scheduling import SEQUENCES, TOGETHER
from tests.engines.shared_ranks import Ranks

ROOMY, SHORT = 1000, 36  # KV blocks: enough to keep all that was ever computed, and fewer than 8 sequences need


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_step_is_what_vllm_schedules_alone(one_rank: Ranks, lag: int) -> None:
    """48 sequences, 8 at a time, `lag` steps scheduled ahead of the tokens that are known."""
    (reply,) = one_rank.ask("coasting", lag=lag, blocks=ROOMY)
    assert reply["steps_equal"] and reply["answers_equal"]
    assert reply["misplaced"] == reply["preempted"] == 0
    assert reply["looks"] < 0.2 * reply["looks_of_vllm"]  # else nothing coasted


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_sequences_begin_together_once_all_places_were_taken(one_rank: Ranks, lag: int) -> None:
    """Not before four of eight places are free, and no response is another. Control: one after the other."""
    (reply,) = one_rank.ask("beginning_together", lag=lag, together=4)
    assert reply["answers_equal"] and reply["misplaced"] == 0
    assert max(reply["run"]) == TOGETHER and sum(reply["begin"]) == SEQUENCES
    assert _early(reply, 4) == 0
    (control,) = one_rank.ask("beginning_together", lag=lag, together=1)
    assert _early(control, 4) > 10


def _early(reply: dict[str, list[int]], together: int) -> int:
    """Return the steps in which a sequence began too soon, once all had come (two in each step) and while many wait."""
    full, early, left = False, 0, SEQUENCES
    for step, (run, begin) in enumerate(zip(reply["run"], reply["begin"], strict=True)):
        many_wait = step > SEQUENCES // 2 and left >= together
        early += full and begin > 0 and many_wait and run - begin > TOGETHER - together
        full, left = run == TOGETHER or (full and not begin), left - begin
    return early


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_short_of_blocks_every_response_and_every_key_is_right(one_rank: Ranks, lag: int) -> None:
    """vLLM takes blocks away, from sequences that coast too; they are computed again."""
    (reply,) = one_rank.ask("coasting", lag=lag, blocks=SHORT)
    assert reply["answers_equal"]
    assert reply["misplaced"] == 0
    assert reply["preempted"] > 3 and reply["looks"] < 0.5 * reply["looks_of_vllm"]


def test_coasting_beyond_its_blocks_would_be_seen(one_rank: Ranks) -> None:
    """The control: blocks that are believed to be longer than they are."""
    (reply,) = one_rank.ask("coasting", lag=1, blocks=ROOMY, block_tokens=32)
    assert reply["misplaced"] > 100


def test_sequences_of_equal_lengths_do_not_need_a_block_in_the_same_step(one_rank: Ranks) -> None:
    """Eight that begin together; vLLM alone looks at all in every step, and gives each a block in every 16th."""
    (reply,) = one_rank.ask("coasting_in_step")
    assert reply == {"most_looks_of_vllm": 8, "most_looks": 1}


def test_a_sequence_ends_from_outside_while_it_coasts(one_rank: Ranks) -> None:
    (reply,) = one_rank.ask("aborted_while_coasting")
    assert reply == {"coasted": True, "left": 0, "blocks_held": 0}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_sequences_that_coast_are_computed_again_with_new_weights(one_rank: Ranks, lag: int) -> None:
    """Three times in a generation: nothing is lost, and no key of before is read. Control: not told of the reset."""
    (reply,) = one_rank.ask("coasting_and_reset", lag=lag, settles=True)
    assert reply == {"answers_equal": True, "misplaced": 0}
    (untold,) = one_rank.ask("coasting_and_reset", lag=lag, settles=False)
    assert not untold["answers_equal"]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_tokens_that_were_not_sent_are_there_for_the_asking_and_come_once(one_rank: Ranks, lag: int) -> None:
    """Ten times in a generation, with their log-probs: before weights change, or responses are left for later.

    Steps that have begun bring more, which are the older weights' as well: it is known how many of each sequence.
    """
    (reply,) = one_rank.ask("coasting_and_asked", lag=lag)
    assert reply["answers_equal"] and reply["misplaced"] == 0
    assert reply["taken"] > 100
    assert reply["late_as_reckoned"] and (reply["late"] > 50) == (lag > 0)


def test_schedulers_of_other_attention_are_left_alone(one_rank: Ranks) -> None:
    """A sliding window gives blocks back in steps between the edges."""
    (reply,) = one_rank.ask("coasting_with_a_window")
    assert reply == {"changed": False}
