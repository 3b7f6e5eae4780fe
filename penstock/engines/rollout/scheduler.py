"""Lets sequences coast through vLLM's scheduler while their next tokens need no decision.

For every sequence and step vLLM's scheduler asks what to compute, which KV blocks that needs and whether it was the
last token: objects and dictionaries in Python, 7 of the 10 ms that the processor beside an H200 needed for a step of
512 sequences, while the GPU needed 7 for all of it. While a sequence is decoded the answers are known beforehand: one
token, no new block while those that it has suffice, no end before `max_tokens`. Until then it coasts. It is in every
step that vLLM's model runner gets, its tokens are collected here, and vLLM's scheduler is not asked about it. Before a
decision is due (a new block, a stop token, the last tokens, too few blocks) vLLM's own record of the sequence is
brought up to date, and vLLM decides.

Each sequence gets a block before it needs it, as vLLM does it for speculative decoding, and first coasts for a number
of steps of its own. Else all sequences of equal lengths would come to a block's edge in the same step, for which the
processor then needs longer than the GPU.

On a GPU sequences begin several at a time as well. A step that computes a prompt takes longer than one that decodes
alone (no CUDA graph holds its attention: 14 to 28 ms instead of 6 for 512 sequences), and where one begins as soon as
another ends, most steps do. So once no place is free, those that wait do so until a number of places are.

What is computed in each step and every response are those of vLLM's scheduler alone, as long as the KV cache has room
and no sequence is held back until others can begin with it, and every key is where the sequence's blocks say
(tests/engines/rollout/test_scheduler.py). Responses come with their last token instead of token by token, and a block
that is full is found as a prefix up to a block later.

Left out: layers that keep other than all keys (windows give blocks back between the edges), speculative decoding,
structured output. There everything stays with vLLM.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LAST_TOKENS = 3  # are vLLM's: its asynchronous scheduler runs up to two steps ahead of the tokens that are known
LAST_IN_TURNS = 1  # where it waits for each step's tokens, only what comes of the last one is
PLACES = ("max_num_running_reqs", "max_num_active_reqs")  # limits of the sequences that run; the second since 0.32
LIMITS = ("max_num_scheduled_tokens", *PLACES)  # of a step


def let_sequences_coast(scheduler: Any, begin_together: int = 1) -> Coasting | None:
    """Let the sequences of a vLLM `Scheduler` coast; None: they may not, and the scheduler is left as it is.

    Sequences that it holds already may be there.

    Args:
        begin_together: places that are free before sequences begin which had to wait for one, or as many as wait.
    """
    kinds = scheduler.kv_cache_manager.coordinator.single_type_managers
    if [type(kind).__name__ for kind in kinds] != ["FullAttentionManager"] or scheduler.num_lookahead_tokens:
        return None
    coasting = Coasting(scheduler, kinds[0], begin_together)
    scheduler.num_lookahead_tokens = coasting.block - 1
    scheduler.schedule = coasting.schedule
    scheduler.update_from_output = coasting.update_from_output
    scheduler.finish_requests = coasting.finish_requests
    scheduler.reset_prefix_cache = coasting.reset_prefix_cache
    return coasting


@dataclass(slots=True)
class _Sequence:
    """A sequence that coasts.

    `computed` and `sampled` grow by one with each step. They are kept without that growth, so that adding the number of
    a step gives their values there and no step has to count them up.
    """

    request: Any  # vLLM's record of it
    began: int  # the step at which it began to coast
    ends: int  # steps that will have been scheduled when the last token is sampled; where vLLM schedules ahead: never
    prompt: int  # tokens that the step before computed besides the last
    computed: int  # tokens whose keys are computed, minus the step's number
    sampled: int  # tokens of the response, minus the step's number
    tokens: list[int] = field(default_factory=list)  # since then
    logprobs: list[float] = field(default_factory=list)  # of those, where they are asked for


@dataclass(slots=True)
class _Unsent:
    """What a sequence's next output begins with."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Coasting:
    """vLLM's scheduler with the sequences that coast kept apart. Its methods are those of vLLM's `Scheduler`."""

    def __init__(self, scheduler: Any, blocks: Any, begin_together: int) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        self.scheduler, self.blocks, self.block = scheduler, blocks.req_to_blocks, blocks.block_size
        self.asynchronous = isinstance(scheduler, AsyncScheduler)
        self.vllm_schedule = scheduler.schedule
        self.vllm_update, self.vllm_finish = scheduler.update_from_output, scheduler.finish_requests
        self.vllm_reset = scheduler.reset_prefix_cache
        self.limits = [name for name in LIMITS if hasattr(scheduler, name)]
        self.begin_together, self.full = begin_together, False  # whether no place was free, and too few have been since
        self.steps = 0  # scheduled so far
        self.sequences: dict[str, _Sequence] = {}
        self.due: dict[int, list[_Sequence]] = {}  # by the step at which vLLM decides again
        self.stops: set[int] = set()  # tokens that end some sequence
        self.unsent: dict[str, _Unsent] = {}

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Return vLLM's decisions for the sequences that need one, and one more token for those that coast."""
        for sequence in self.due.pop(self.steps, ()):
            if self.sequences.get(sequence.request.request_id) is sequence:
                self._settle(sequence)
        running = self.scheduler.running
        awake = self._awake()
        if self.sequences and self._lacks_blocks(awake):
            self._settle_all()  # vLLM may have to take a sequence's blocks away, and any sequence's
            awake = list(running)
        output = self._schedule_awake(awake, arguments, options)
        self.full = self.full or not self._free_places
        self._add_coasting(output)
        self.steps += 1
        for request in awake if self.asynchronous else self._awake():
            if scheduled := output.num_scheduled_tokens.get(request.request_id):
                self._let_coast(request, scheduled)
        return output

    def update_from_output(self, scheduled: Any, output: Any) -> Any:
        """Keep the tokens of the sequences that coast; return what vLLM makes of the others' tokens."""
        awake = self._learn(scheduled.num_scheduled_tokens, output)
        made = self.vllm_update(dataclasses.replace(scheduled, num_scheduled_tokens=awake), output)
        if self.unsent:
            for client in made.values():
                for one in client.outputs:
                    self._send(one)
        return made

    def finish_requests(self, *arguments: Any, **options: Any) -> Any:
        """End requests from outside, with vLLM's records up to date."""
        self._settle_all()
        ended = self.vllm_finish(*arguments, **options)
        self.unsent = {name: unsent for name, unsent in self.unsent.items() if name in self.scheduler.requests}
        return ended

    def reset_prefix_cache(self, *arguments: Any, **options: Any) -> Any:
        """Forget what was computed, with vLLM's records up to date: it may be computed again from them."""
        self._settle_all()
        return self.vllm_reset(*arguments, **options)

    def take_unsent(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return the tokens that are known and were not sent, with their log-probs, by request; they will not be sent.

        Where log-probs are not asked for there are none.
        """
        self._settle_all()
        unsent, self.unsent = self.unsent, {}
        return {name: (one.tokens, one.logprobs) for name, one in unsent.items()}

    # ---- a step --------------------------------------------------------------------------------------------------

    def _awake(self) -> list[Any]:
        """Return vLLM's records of the sequences that run and do not coast."""
        return [request for request in self.scheduler.running if request.request_id not in self.sequences]

    def _lacks_blocks(self, awake: list[Any]) -> bool:
        """Whether vLLM may have too few for those that run: at most one for the next token and one before its time."""
        prompts = (max(0, request.num_tokens - request.num_computed_tokens) for request in awake)
        needed = sum(2 + tokens // self.block for tokens in prompts)
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return needed > free

    def _schedule_awake(self, awake: list[Any], arguments: Any, options: Any) -> Any:
        """Let vLLM schedule as if the others were not there, within what they leave of a step's limits."""
        scheduler, running, count = self.scheduler, self.scheduler.running, len(self.sequences)
        none_begins = self._none_begins()
        if not count and not none_begins:
            return self.vllm_schedule(*arguments, **options)
        limits = {name: getattr(scheduler, name) for name in self.limits}
        for name, limit in limits.items():
            setattr(scheduler, name, len(awake) if none_begins and name in PLACES else limit - count)
        scheduler.running = list(awake)
        output = self.vllm_schedule(*arguments, **options)
        for name, limit in limits.items():
            setattr(scheduler, name, limit)
        gone, new = set(awake[len(scheduler.running) :]), scheduler.running[len(awake) :]  # never both
        scheduler.running = [request for request in running if request not in gone] + new if gone else running + new
        return output

    def _none_begins(self) -> bool:
        """Whether those that wait should go on waiting, until more of them can begin in one step."""
        if self.full and self._free_places >= min(self.begin_together, self.scheduler.get_request_counts()[1]):
            self.full = False
        return self.full

    @property
    def _free_places(self) -> int:
        free: int = self.scheduler.max_num_running_reqs - len(self.scheduler.running)
        return free

    def _add_coasting(self, output: Any) -> None:
        """Put the sequences that coast into what the model runner gets."""
        if not self.sequences:
            return
        names, step, cached = list(self.sequences), self.steps, output.scheduled_cached_reqs
        cached.req_ids += names
        cached.new_block_ids += [None] * len(names)
        cached.num_computed_tokens += [sequence.computed + step for sequence in self.sequences.values()]
        cached.num_output_tokens += [sequence.sampled + step for sequence in self.sequences.values()]
        output.num_scheduled_tokens.update(dict.fromkeys(names, 1))
        output.total_num_scheduled_tokens += len(names)
        if hasattr(self.scheduler, "prev_step_scheduled_req_ids"):  # of vLLM's first model runner
            self.scheduler.prev_step_scheduled_req_ids.update(names)

    def _learn(self, scheduled: dict[str, int], output: Any) -> dict[str, int]:
        """Keep the tokens of sequences that coast; return the others as vLLM scheduled them, with those that stop."""
        places, tokens = output.req_id_to_index, output.sampled_token_ids
        logprobs = None if output.logprobs is None else output.logprobs.logprobs[:, 0].tolist()
        awake = {}
        for name, count in scheduled.items():
            sequence = self.sequences.get(name)
            if sequence is None:
                awake[name] = count
                continue
            place = places[name]
            (token,) = tokens[place]
            if token in self.stops or self.steps == sequence.ends:
                self._settle(sequence)
                awake[name] = count
                continue
            sequence.tokens.append(token)
            if logprobs is not None:
                sequence.logprobs.append(logprobs[place])
        return awake

    def _send(self, output: Any) -> None:
        """Put the tokens that were sampled while a sequence coasted before its tokens of this step."""
        unsent = self.unsent.pop(output.request_id, None)
        if unsent is None:
            return
        output.new_token_ids = unsent.tokens + output.new_token_ids
        if output.new_logprobs is not None:
            output.new_logprobs = _after(unsent, output.new_logprobs)

    # ---- a sequence ----------------------------------------------------------------------------------------------

    def _let_coast(self, request: Any, scheduled: int) -> None:
        """Let a sequence coast that a step was just scheduled for, if its next steps can be told."""
        parameters, computed = request.sampling_params, request.num_computed_tokens
        if request.use_structured_output or parameters.prompt_logprobs is not None:
            return
        ahead = request.num_output_placeholders
        if computed + self.asynchronous != request.num_tokens + ahead:
            return  # it computes its prompt, or what was taken from it, and is not done with that
        if request.num_in_flight_tokens != (ahead if self.asynchronous else scheduled):
            return  # a step before this one did
        if self.asynchronous and (scheduled > 1 or not request.num_output_tokens):
            return  # nothing of its response is known yet
        end = min(request.num_prompt_tokens + request.max_tokens, self.scheduler.max_model_len)
        room = len(self.blocks[request.request_id]) * self.block
        left = end - (LAST_TOKENS if self.asynchronous else LAST_IN_TURNS) - computed
        steps = min(room - computed, left, self._longest(request.request_id))
        if steps <= 0:
            return
        self.stops |= parameters.all_stop_token_ids
        ends = -1 if self.asynchronous else self.steps + left
        sampled = request.num_output_tokens + ahead + (not self.asynchronous)
        sequence = _Sequence(request, self.steps, ends, scheduled - 1, computed - self.steps, sampled - self.steps)
        self.sequences[request.request_id] = sequence
        self.due.setdefault(self.steps + steps, []).append(sequence)

    def _longest(self, name: str) -> int:
        """Return the most steps to coast for: fewer at first, then a block's, so that the distances to edges stay."""
        longest = self.block - 1
        return longest if name in self.unsent else 1 + len(self.sequences) % longest

    def _settle(self, sequence: _Sequence) -> None:
        """Bring vLLM's record of a sequence up to date and let it coast no longer."""
        request, grown, known = sequence.request, self.steps - sequence.began, len(sequence.tokens)
        del self.sequences[request.request_id]
        request.num_computed_tokens += grown
        request.num_in_flight_tokens += grown - known - (sequence.prompt if known else 0)
        request.append_output_token_ids(sequence.tokens)
        if self.asynchronous:
            request.num_output_placeholders += grown - known
        full = request.num_computed_tokens - request.num_output_placeholders
        self.scheduler.kv_cache_manager.cache_blocks(request, full)
        if sequence.tokens:
            unsent = self.unsent.setdefault(request.request_id, _Unsent())
            unsent.tokens += sequence.tokens
            unsent.logprobs += sequence.logprobs

    def _settle_all(self) -> None:
        for sequence in list(self.sequences.values()):
            self._settle(sequence)


def _after(unsent: _Unsent, logprobs: Any) -> Any:
    """Return vLLM's `LogprobsLists` with those of the unsent tokens before it. Their ranks are not kept: 0."""
    token_ids, values, ranks, _ = logprobs
    return type(logprobs)(
        np.concatenate([np.asarray(unsent.tokens, token_ids.dtype)[:, None], token_ids[:, :1]]),
        np.concatenate([np.asarray(unsent.logprobs, values.dtype)[:, None], values[:, :1]]),
        np.concatenate([np.zeros(len(unsent.tokens), ranks.dtype), ranks]),
    )
