"""Sparing vLLM's bookkeeping where no block changes is never seen: not in a block table, a prefix or a token."""

from __future__ import annotations

import pytest

from tests.engines.ranks import Ranks


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_block_and_prefix_is_what_vllm_decides(one_rank: Ranks, lag: int) -> None:
    """At every step of 40 sequences that share prompts; `lag` tokens are computed and not known yet."""
    (reply,) = one_rank.ask("kv_decisions", lag=lag)
    assert reply["equal"]
    assert reply["looks"] < 0.4 * reply["looks_of_vllm"]  # else nothing was spared
    assert reply["preempted"] > 3  # blocks were short at times


def test_sparing_an_edge_would_be_seen(one_rank: Ranks) -> None:
    """The control: one step too many around a block's edge, and blocks are missing."""
    (reply,) = one_rank.ask("kv_decisions", lag=0, behind_edge=-1)
    assert not reply["equal"]


def test_managers_of_other_attention_are_left_alone(one_rank: Ranks) -> None:
    """A sliding window gives blocks back in steps between the edges."""
    (reply,) = one_rank.ask("kv_decisions_with_a_window")
    assert reply == {"changed": False}
