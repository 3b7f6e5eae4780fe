"""vLLM's own KV cache manager, driven through random generations step by step, and everything it decides.

No model runs: which block holds which tokens is decided without one. Runs in a rank, where vLLM is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import Mock

import numpy as np

BLOCK, BLOCKS, LENGTH = 16, 40, 160
SEQUENCES, TOGETHER, PROMPTS = 40, 8, 12


def decisions(lag: int, change: Callable[[Any], object]) -> tuple[list[Any], dict[str, int]]:
    """Generate with a manager to which `change` was done; return all that it answers and holds, in order.

    Prompts repeat, so prefixes are found; sequences end at different times, so blocks are used again; and there are
    fewer blocks than sequences want, so some are refused and the youngest sequence gives its own back, to begin again.
    Counted are the sequences that did (`preempted`), and how often the manager looked whether a block is full.

    Args:
        lag: tokens that are computed and not known yet, as with vLLM's asynchronous scheduler.
    """
    manager = _manager()
    looks = Mock(wraps=manager.coordinator.cache_blocks)
    manager.coordinator.cache_blocks = looks
    change(manager)
    random = np.random.default_rng(lag)
    prompts = [random.integers(0, 9, random.integers(1, 60)).tolist() for _ in range(PROMPTS)]
    waiting = [_request(f"r{number}", prompts[number % PROMPTS]) for number in range(SEQUENCES)]
    ends = {request.request_id: int(random.integers(5, LENGTH - 60)) for request in waiting}
    running: list[Any] = []
    seen: list[Any] = []
    preempted = 0
    while waiting or running:
        manager.new_step_starts()
        for request in list(running):
            while request in running and (grown := _grow(manager, request)) is None:
                waiting.insert(0, _preempted(manager, running.pop()))
                preempted += 1
            seen.append(grown)
        if waiting and len(running) < TOGETHER and (admitted := _admit(manager, waiting[0])) is not None:
            running.append(waiting.pop(0))
            seen.append(admitted)
        for request in list(running):
            while request.num_output_placeholders > lag:
                _learn(manager, request, int(random.integers(0, 9)), lag > 0)
            if request.num_output_tokens >= ends[request.request_id]:
                manager.free(request)
                running.remove(request)
        seen.append({request.request_id: manager.get_block_ids(request.request_id) for request in running})
        seen.append((manager.block_pool.get_num_free_blocks(), sorted(map(repr, _prefixes(manager)))))
    return seen, {"preempted": preempted, "looks": looks.call_count}


def with_a_window() -> Any:
    """A manager of layers that see a window of keys."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return _manager(SlidingWindowSpec, sliding_window=2 * BLOCK)


def _manager(kind: Any = None, **settings: Any) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    _begin_hashes()
    spec = (kind or FullAttentionSpec)(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, **settings)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 4 * LENGTH, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


@cache
def _begin_hashes() -> None:
    """What every prefix begins with; some versions draw it, so it is one for all managers that are compared."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


def _request(name: str, prompt: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        name, prompt, SamplingParams(max_tokens=LENGTH), None, block_hasher=get_request_block_hasher(BLOCK, sha256)
    )


def _admit(manager: Any, request: Any) -> Any:
    """What is known of a sequence is computed in one step, apart from what is found of it; None without room."""
    found, computed, _ = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(
        request, request.num_tokens - computed, num_new_computed_tokens=computed, new_computed_blocks=found
    )
    if blocks is None:
        return None
    _advance(request, request.num_tokens)
    return computed, blocks.get_block_ids()


def _grow(manager: Any, request: Any) -> Any:
    """One more token, as the scheduler asks for it while a sequence is decoded; None without room."""
    blocks = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
    if blocks is None:
        return None
    _advance(request, request.num_computed_tokens + 1)
    return blocks.get_block_ids(allow_none=True) or "nothing"


def _preempted(manager: Any, request: Any) -> Any:
    """A sequence without blocks: all of it has to be computed again, and what was not known yet is lost."""
    manager.free(request)
    request.num_computed_tokens = request.num_output_placeholders = 0
    return request


def _advance(request: Any, computed: int) -> None:
    """After a step that computes the last token there is one more, which is not known yet."""
    request.num_computed_tokens = computed
    request.num_output_placeholders += 1


def _learn(manager: Any, request: Any, token: int, asynchronous: bool) -> None:
    request.append_output_token_ids(token)
    request.num_output_placeholders -= 1
    if asynchronous:
        manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)


def _prefixes(manager: Any) -> Any:
    return manager.block_pool.cached_block_hash_to_block._cache
