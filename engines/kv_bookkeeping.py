"""Spares vLLM's scheduler its bookkeeping of KV blocks in the steps where no block changes.

For each sequence and step the scheduler asks which blocks one more token needs, and whether a block is full and can be
found as a prefix. With a GPU's blocks of 16 tokens the answer is "none" and "no" in 12 of 16 steps, and it can be read
off the sequence's length. With a CPU's of 32, where it is so in 28 of 32, the questions are a third of what the
processor needs for a step of 512 sequences (`penstock bench scheduler`), and on H200s rollouts waited for it.

What vLLM does at a block's edge is left to vLLM, and so is everything of a model whose layers keep other than all
keys (sliding windows free blocks between the edges). No token, no block table and no prefix differs for it
(tests/engines/test_kv_bookkeeping.py).
"""

from __future__ import annotations

from typing import Any

# Steps around a block's edge that vLLM does itself. With its asynchronous scheduler a sequence's length runs up to two
# tokens ahead of the tokens that are known.
BEFORE_EDGE, BEHIND_EDGE = 1, 2


def spare_unchanged_blocks(manager: Any) -> bool:
    """Change a vLLM `KVCacheManager`; return whether it is one that this is right for."""
    kinds = manager.coordinator.single_type_managers
    if [type(kind).__name__ for kind in kinds] != ["FullAttentionManager"]:
        return False
    block, nothing = kinds[0].block_size, manager.empty_kv_cache_blocks
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *more: Any, **options: Any) -> Any:
        """`allocate_slots` for one more token within a block that the sequence has: no block is new, none is full."""
        one_more = num_new_tokens == 1 and not more and not any(options.values())
        if one_more and BEHIND_EDGE < request.num_computed_tokens % block < block - BEFORE_EDGE:
            return nothing
        return allocate(request, num_new_tokens, *more, **options)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        """`cache_blocks` of a sequence that grows by a token at a time: a block becomes full at its edge alone."""
        if num_computed_tokens % block <= BEHIND_EDGE:
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
    return True
