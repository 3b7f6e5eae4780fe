"""Sequences that coast through vLLM's scheduler: seen in no step, no block table, no prefix and no response."""

from __future__ import annotations

import pytest

from tests.engines.ranks import Ranks

ROOMY, SHORT = 100, 36  # KV blocks: enough for all sequences that run together, and not


@pytest.mark.parametrize("blocks", [ROOMY, SHORT])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_step_is_what_vllm_decides_alone(one_rank: Ranks, lag: int, blocks: int) -> None:
    """48 sequences, 8 at a time, `lag` steps scheduled ahead of the tokens that are known."""
    (reply,) = one_rank.ask("coasting", lag=lag, blocks=blocks)
    assert reply["steps_equal"] and reply["answers_equal"] and reply["prefixes_equal"]
    assert reply["looks"] < (0.4 if blocks == ROOMY else 0.9) * reply["looks_of_vllm"]  # else nothing coasted
    assert (reply["preempted"] > 3) == (blocks == SHORT)


def test_coasting_over_an_edge_would_be_seen(one_rank: Ranks) -> None:
    """The control: blocks that are believed to be longer than they are."""
    (reply,) = one_rank.ask("coasting", lag=1, blocks=ROOMY, block_tokens=32)
    assert not reply["steps_equal"]


def test_a_sequence_ends_from_outside_while_it_coasts(one_rank: Ranks) -> None:
    (reply,) = one_rank.ask("aborted_while_coasting")
    assert reply == {"coasted": True, "left": 0, "blocks_held": 0}


def test_schedulers_of_other_attention_are_left_alone(one_rank: Ranks) -> None:
    """A sliding window gives blocks back in steps between the edges."""
    (reply,) = one_rank.ask("coasting_with_a_window")
    assert reply == {"changed": False}
