"""One rollout engine's decoding steps by the number of its sequences: a program for each way of stepping.

It reads a `Work` as JSON, starts the engine, says so, waits for a line and prints its rows as JSON. Several start side
by side and measure one after the other (measuring.py). Text that repeats is what a model says greedily, text that does
not what one with random weights says at temperature 1.

Only steps count in which every sequence decodes: no prompt is computed and none has ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

SMALL_VOCABULARY = 256  # prompts are of its tokens: every model has them


class Way(StrEnum):
    """How an engine is stepped."""

    ahead = "ahead"  # as rollouts are: on a GPU steps are scheduled ahead of the tokens of the one before
    in_turns = "in turns"  # each step once the tokens of the one before are there, which whoever drafts of them needs
    drafting = "drafting"  # in turns, vLLM's first model runner, with drafts


class Work(BaseModel):
    """What an engine is measured at: `rows` sequences at a time, `batch` of them a full batch, of which none drafts."""

    way: Way
    folder: Path
    rows: list[int]
    batch: int
    drafts: int
    drafts_up_to: int
    prompt: int
    response: int


@dataclass(frozen=True)
class Step:
    """One step of an engine, whose tokens came at `ended` (seconds)."""

    ended: float
    rows: int
    computed: int  # tokens whose keys were computed
    drafted: int
    sampled: int


def of_decoding(steps: list[Step], rows: int) -> list[tuple[float, Step]]:
    """Return the steps, and their seconds, in which `rows` sequences decoded and in the step before as well."""
    decodes = [step.rows == rows and step.computed == rows + step.drafted for step in steps]
    pairs = zip(steps, steps[1:], decodes, decodes[1:], strict=False)
    return [(step.ended - last.ended, step) for last, step, first, second in pairs if first and second]


def figures_of(steps: list[Step], rows: int) -> dict[str, float]:
    """Return the median seconds of a step, and tokens and accepted drafts per step and sequence on the mean."""
    found = of_decoding(steps, rows)
    median = float(np.median([seconds for seconds, _ in found]))
    sampled = sum(step.sampled for _, step in found) / len(found) / rows
    drafted = sum(step.drafted for _, step in found) / len(found) / rows
    return {
        "step_s": median,
        "tokens_per_s": rows * sampled / median,
        "drafted": drafted,
        "accepted": sampled - 1,
    }


def _start(work: Work) -> Any:
    import torch
    import vllm

    from penstock.configs.sections.rollout import RolloutConfig
    from penstock.engines.families.shape import read_shape
    from penstock.engines.rollout import vllm as versions
    from penstock.engines.rollout.engine import engine_arguments, kv_cache_bytes

    cuda = torch.cuda.is_available()
    described = json.loads((work.folder / "config.json").read_text(encoding="utf-8"))
    versions.prepare_vllm(cuda, described["architectures"])
    if not cuda:
        versions.sample_drafted_tokens_on_cpu()
    config, length = RolloutConfig(max_response_tokens=work.response), work.prompt + work.response
    dtype = torch.bfloat16 if cuda else torch.float32
    kv_cache = kv_cache_bytes(config, work.batch, read_shape(work.folder), length, dtype, cuda)
    gpu = torch.cuda.current_device() if cuda else None
    arguments = engine_arguments(config, work.batch, length, kv_cache, gpu=gpu, sleeps=False, logprobs=False)
    arguments |= {"load_format": "auto", "distributed_executor_backend": "uni"}
    arguments["additional_config"] |= {"way": work.way.value}  # each compiles code of its own, in a folder of its own
    if work.way is Way.in_turns:
        arguments["async_scheduling"] = False
    if work.way is Way.drafting:
        arguments["additional_config"] |= {"drafts_up_to": work.drafts_up_to}
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": "penstock.benchmarks.speculation.drafter.Drafter",
            "num_speculative_tokens": work.drafts,
        }
    start: Any = vllm.LLM
    return start(model=str(work.folder), dtype=str(dtype).removeprefix("torch."), **arguments)


@contextmanager
def _listening(llm: Any) -> Iterator[list[Step]]:
    """Give the steps that an engine makes within this call, as they come."""
    from penstock.engines.rollout import vllm as versions

    scheduler, steps = versions.scheduler(llm), list[Step]()
    update: Callable[..., Any] = scheduler.update_from_output

    def listened(scheduled: Any, output: Any) -> Any:
        counts, drafts = scheduled.num_scheduled_tokens.values(), scheduled.scheduled_spec_decode_tokens.values()
        sampled = sum(map(len, output.sampled_token_ids))
        steps.append(Step(time.perf_counter(), len(counts), sum(counts), sum(map(len, drafts)), sampled))
        return update(scheduled, output)

    scheduler.update_from_output = listened
    yield steps
    scheduler.update_from_output = update


def _generate(llm: Any, work: Work, rows: int, repeats: bool) -> list[list[int]]:
    """Return the responses to `rows` prompts, which are the same in every engine."""
    from vllm import SamplingParams

    from penstock.engines.rollout import vllm as versions

    prompts_BT = np.random.default_rng([rows, repeats]).integers(2, SMALL_VOCABULARY, (rows, work.prompt))
    parameters = SamplingParams(
        temperature=0.0 if repeats else 1.0, max_tokens=work.response, ignore_eos=True, detokenize=False
    )
    found: dict[str, list[int]] = {}
    for row, prompt_T in enumerate(prompts_BT.tolist()):
        name = f"{rows}-{repeats}-{row}"
        versions.submit(llm, [name], prompt_T, parameters, None)
        found[name] = []
    left = set(found)
    while left:
        for output in versions.step(llm):
            found[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                left.remove(output.request_id)
    return list(found.values())


def _rows(llm: Any, work: Work) -> list[dict[str, Any]]:
    from penstock.engines.rollout import vllm as versions
    from penstock.engines.rollout.scheduler import let_sequences_coast

    if work.way is Way.ahead:
        let_sequences_coast(versions.scheduler(llm))
    _generate(llm, work, work.drafts_up_to, repeats=True)  # kernels are compiled by the first to use them
    measured = [_row(llm, work, rows, repeats) for rows in work.rows for repeats in (True, False)]
    if work.way is Way.drafting:  # who coasts is scheduled a token a step: nothing is drafted from here on
        let_sequences_coast(versions.scheduler(llm))
    if work.way is not Way.in_turns:
        measured.append(_row(llm, work, work.batch, repeats=False))
    return measured


def _row(llm: Any, work: Work, rows: int, repeats: bool) -> dict[str, Any]:
    with _listening(llm) as steps:
        responses = _generate(llm, work, rows, repeats)
    row = {"way": work.way.value, "text": "repeats" if repeats else "random", "rows": rows, **figures_of(steps, rows)}
    return row | ({"responses": responses} if repeats else {})


def _described(llm: Any) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    runner = 2 if getattr(config, "use_v2_model_runner", False) else 1
    return {"model_runner": runner, "schedules_ahead": bool(config.scheduler_config.async_scheduling)}


if __name__ == "__main__":
    asked = Work.model_validate_json(sys.stdin.readline())
    engine = _start(asked)
    print(json.dumps(_described(engine)), flush=True)
    if sys.stdin.readline():  # whoever asked is there
        print(json.dumps(_rows(engine, asked)), flush=True)
