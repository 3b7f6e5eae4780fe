"""vLLM's own scheduler, driven through a random generation step by step, and everything that it tells the model.

No model runs: what is computed when, and in which blocks, is decided without one, and each token is a function of its
sequence and place. Runs in a rank, where vLLM is loaded.
"""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np

from penstock.configs.sections.model import TinyModel
from penstock.engines.models.tiny import make_tiny_model
from penstock.engines.rollout.vllm import tokens_under_way

BLOCK, LENGTH, VOCABULARY, STOP = 16, 220, 64, 1
SEQUENCES, TOGETHER, PROMPTS = 48, 8, 12


@dataclass
class Seen:
    """What the model was told in each step, and what came back of each sequence."""

    steps: list[Any] = field(default_factory=list)
    answers: dict[str, tuple[list[int], list[float], str]] = field(default_factory=dict)
    looks: list[int] = field(default_factory=list)  # in each step, sequences that vLLM asked its block manager about
    preempted: int = 0
    taken: int = 0  # tokens that were asked for before they were sent
    late: list[tuple[int, int]] = field(default_factory=list)  # tokens of begun steps: as reckoned, and as they come
    misplaced: int = 0  # keys that a step would read and that are another prefix's, or nobody's


def generate(
    lag: int,
    blocks: int,
    change: Callable[[Any], object],
    requests: Callable[[], deque[Any]] | None = None,
    reset_at: Collection[int] = (),
    take_at: Collection[int] = (),
) -> Seen:
    """Answer all sequences with a scheduler to which `change` was done.

    Of the random ones prompts repeat, so prefixes are found; they come while others run and end by a stop token or at
    lengths of their own, so blocks are used again.

    Args:
        lag: steps whose tokens are not known yet when a step is scheduled; with any, vLLM's asynchronous scheduler.
        blocks: of the KV cache; with fewer than the sequences need, vLLM takes some away from the youngest.
        requests: makes them; None: random ones.
        reset_at: steps before which all that runs is to be computed again.
        take_at: steps before which tokens that were not sent are asked for, and how many those that have begun will
            bring; `change` has let sequences coast.
    """
    scheduler = _scheduler(lag, blocks)
    looks = Mock(wraps=scheduler.kv_cache_manager.allocate_slots)
    scheduler.kv_cache_manager.allocate_slots = looks
    change(scheduler)
    seen, model, waiting = Seen(), _Model(), (requests or random_requests)()
    in_flight: deque[tuple[Any, Any]] = deque()
    while waiting or in_flight or scheduler.has_requests():
        for request in [waiting.popleft() for _ in range(min(2, len(waiting)))]:
            scheduler.add_request(request)
        if len(seen.steps) in take_at:
            for name, (tokens, logprobs) in scheduler.schedule.__self__.take_unsent().items():
                seen.taken += len(tokens)
                earlier = seen.answers.get(name, ([], [], ""))
                seen.answers[name] = (earlier[0] + tokens, earlier[1] + logprobs, "")
            seen.late += [
                (tokens_under_way(_engine_of(scheduler), name), sum(_drawn_of(output, name) for _, output in in_flight))
                for name in scheduler.requests
            ]
        if len(seen.steps) in reset_at:
            scheduler.reset_prefix_cache(reset_running_requests=True)
            model.keys.clear()
        asked = looks.call_count
        scheduled = scheduler.schedule()
        seen.looks.append(looks.call_count - asked)
        seen.steps.append(model.told(scheduled))
        seen.preempted += len(scheduled.preempted_req_ids or ())
        if scheduled.num_scheduled_tokens:
            in_flight.append((scheduled, model.drawn(scheduled, scheduler)))
        if in_flight and (len(in_flight) > lag or not scheduled.num_scheduled_tokens):
            for output in _outputs(scheduler.update_from_output(*in_flight.popleft())):
                _add(seen.answers, output)
    seen.misplaced = model.misplaced
    return seen


def abort(change: Callable[[Any], object]) -> dict[str, Any]:
    """End all sequences from outside after 20 steps; return what is left of them."""
    from vllm.v1.request import RequestStatus

    scheduler, model = _scheduler(0, 100), _Model()
    change(scheduler)
    for request in random_requests():
        scheduler.add_request(request)
    for _ in range(20):
        scheduled = scheduler.schedule()
        model.told(scheduled)
        scheduler.update_from_output(scheduled, model.drawn(scheduled, scheduler))
    coasted = len(scheduler.schedule.__self__.sequences) > 0
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is vLLM's own
    return {"coasted": coasted, "left": scheduler.get_num_unfinished_requests(), "blocks_held": held}


def with_a_window() -> Any:
    """A scheduler of a model whose layers see a window of keys."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return _scheduler(0, 40, SlidingWindowSpec, sliding_window=2 * BLOCK)


class _Model:
    """What vLLM's model runner and a GPU keep: the blocks of each sequence as it is told of them, and what is in them.

    In the place of a key is the hash of all tokens up to its own, which is what a key depends on.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.hashes: dict[str, list[int]] = {}
        self.keys: dict[tuple[int, int], int] = {}
        self.misplaced = 0

    def told(self, scheduled: Any) -> Any:
        """Write the step's keys, read all, and return the step: each sequence's computed, drawn and new tokens."""
        before = {}
        for new in scheduled.scheduled_new_reqs:
            self.prompts[new.req_id], self.hashes[new.req_id] = new.prompt_token_ids, []
            self.blocks[new.req_id] = list(new.block_ids[0])
            before[new.req_id] = (new.num_computed_tokens, None)
        cached = scheduled.scheduled_cached_reqs
        rows = zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        )
        for name, blocks, computed, drawn in rows:
            kept = [] if name in cached.resumed_req_ids else self.blocks[name]
            self.blocks[name] = kept + list(blocks[0] if blocks else ())
            before[name] = (computed, drawn)
        assert before.keys() == scheduled.num_scheduled_tokens.keys()
        assert scheduled.total_num_scheduled_tokens == sum(scheduled.num_scheduled_tokens.values())
        for name, count in scheduled.num_scheduled_tokens.items():
            self._attend(name, before[name][0], count)
        step = [(name, *before[name], count) for name, count in sorted(scheduled.num_scheduled_tokens.items())]
        return step, sorted(scheduled.finished_req_ids)

    def _attend(self, name: str, computed: int, count: int) -> None:
        """Write the keys of `count` tokens behind `computed` ones, and count those that are not the sequence's own."""
        hashes, prompt, blocks = self.hashes[name], self.prompts[name], self.blocks[name]
        for place in range(len(hashes), computed + count):
            token = prompt[place] if place < len(prompt) else _token(name, place)
            hashes.append(hash((hashes[-1] if hashes else 0, token)))
        for place, own in enumerate(hashes[: computed + count]):
            slot = (blocks[place // BLOCK] if place // BLOCK < len(blocks) else -1, place % BLOCK)
            if place >= computed and slot[0] >= 0:
                self.keys[slot] = own
            self.misplaced += self.keys.get(slot) != own

    def drawn(self, scheduled: Any, scheduler: Any) -> Any:
        """Return a token for each sequence whose known tokens are all computed, with a log-prob."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = list(scheduled.num_scheduled_tokens)
        random.Random(len(names)).shuffle(names)  # a model runner has its own order
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        tokens, logprobs = [], []
        for name in names:
            place = computed[name] + scheduled.num_scheduled_tokens[name]
            unfinished = scheduler.requests[name].is_prefill_chunk
            tokens.append([] if unfinished else [_token(name, place)])
            logprobs.append([-random.Random(place).random()])
        places = {name: number for number, name in enumerate(names)}
        array = np.asarray(logprobs, np.float32).reshape(-1, 1)
        drawn = np.asarray([[row[0] if row else 0] for row in tokens], np.int64).reshape(-1, 1)
        lists = LogprobsLists(drawn, array, np.arange(len(names)))
        return ModelRunnerOutput(names, places, tokens, logprobs=lists, prompt_logprobs_dict={})


def _token(name: str, place: int) -> int:
    """Return the token that the model draws for a place of a sequence."""
    return random.Random(f"{name} {place}").choice((STOP, *range(2, VOCABULARY)))


def _engine_of(scheduler: Any) -> Any:
    """Return a vLLM engine of which there is the scheduler alone."""
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))


def _drawn_of(output: Any, name: str) -> int:
    """Return how many tokens of a sequence are in a step's output."""
    place = output.req_id_to_index.get(name)
    return 0 if place is None else len(output.sampled_token_ids[place])


def _outputs(made: dict[int, Any]) -> list[Any]:
    return [output for client in made.values() for output in client.outputs]


def _add(answers: dict[str, tuple[list[int], list[float], str]], output: Any) -> None:
    tokens, logprobs, _ = answers.get(output.request_id, ([], [], ""))
    drawn = output.new_logprobs.logprobs
    assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
    assert len(drawn) == len(output.new_logprobs.sampled_token_ranks) == len(output.new_token_ids)
    answers[output.request_id] = (
        tokens + output.new_token_ids,
        logprobs + drawn[:, 0].tolist(),
        str(output.finish_reason or ""),
    )


def random_requests() -> deque[Any]:
    """Return sequences of random lengths, four to a prompt."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, VOCABULARY, draw.integers(1, 70)).tolist() for _ in range(PROMPTS)]
    requests: deque[Any] = deque()
    for number in range(SEQUENCES):
        ends = {"ignore_eos": True} if number % 3 else {"stop_token_ids": [STOP]}
        requests.append(_request(number, prompts[number % PROMPTS], int(draw.integers(1, 140)), ends))
    return requests


def equal_requests() -> deque[Any]:
    """Return as many sequences as run together, each with 4 tokens and 130 to draw."""
    return deque(_request(number, [2, 3, 4, 5 + number], 130, {"ignore_eos": True}) for number in range(TOGETHER))


def _request(number: int, prompt: list[int], tokens: int, ends: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    parameters = SamplingParams(max_tokens=tokens, logprobs=0, detokenize=False, **ends)
    return Request(f"r{number:02}", prompt, parameters, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def _scheduler(lag: int, blocks: int, kind: Any = None, **settings: Any) -> Any:
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = (kind or FullAttentionSpec)(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, **settings)
    config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    vllm_config = _settings(lag, blocks)
    return (AsyncScheduler if lag else Scheduler)(vllm_config, config, StructuredOutputManager(vllm_config), BLOCK)


@cache
def _settings(lag: int, blocks: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)  # what every prefix begins with; some versions draw it
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        tiny = TinyModel(hidden_size=32, layers=1, heads=1, kv_heads=1, intermediate_size=32, max_positions=LENGTH)
        make_tiny_model(Path(folder), tiny, VOCABULARY, eos=STOP, pad=0, seed=0)
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=LENGTH,
            max_num_seqs=TOGETHER,
            max_num_batched_tokens=64,
        )
        settings = arguments.create_engine_config()
    settings.scheduler_config.async_scheduling = lag > 0
    settings.cache_config.block_size, settings.cache_config.num_gpu_blocks = BLOCK, blocks
    return settings
