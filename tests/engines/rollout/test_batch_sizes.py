"""An engine's batch holds its share of an iteration, and every size that occurs is inside a CUDA graph."""

from __future__ import annotations

from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.rollout.batch_sizes import PROMPT_TOKENS, begin_together, capture_sizes, max_sequences


def test_an_engine_holds_its_share_at_once() -> None:
    """Rounded up to whole prompts, within limits, unless the user says otherwise."""
    rollout = RolloutConfig(prompts=100, samples=8)
    assert [max_sequences(rollout, engines) for engines in (1, 2, 3, 8)] == [800, 400, 272, 256]
    assert max_sequences(RolloutConfig(prompts=1000, samples=8), 2) == 1024
    assert max_sequences(RolloutConfig(prompts=1000, samples=8, max_sequences=16), 2) == 16


def test_graphs_reach_the_largest_batch() -> None:
    """Exactly, also off vLLM's grid and above its 512, with at most 32 between two; and with a prompt beside it."""
    assert [size for size in capture_sizes(1) if size < 32] == [1, 2]
    assert [size for size in capture_sizes(12) if size < 32] == [1, 2, 4, 8, 12, 16, 24]
    for sequences in (344, 512, 513, 800, 1024):
        sizes = capture_sizes(sequences)
        assert sizes == sorted(set(sizes))
        assert sequences in sizes
        assert sequences + PROMPT_TOKENS - 32 < sizes[-1] <= sequences + PROMPT_TOKENS
        assert max(after - before for before, after in zip(sizes, sizes[1:], strict=False)) <= 32


def test_a_small_part_of_an_engine_begins_at_a_time() -> None:
    assert [begin_together(sequences) for sequences in (1, 16, 512, 1024)] == [1, 1, 32, 64]
