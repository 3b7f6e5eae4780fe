"""What the processor needs for a decoding step of the rollout engine: vLLM's scheduler and the decode loop, no model.

While a GPU computes one step the processor prepares the next; whichever takes longer sets the pace. Here every model
step is answered at once with made-up tokens, by vLLM's own engine core around a tiny model, so what is left is the
processor's part: `sequences` over that time is the most tokens per second that this machine can ask of any GPU, if no
step takes much longer than the others (`slow_step_s` is what one decoding step in a hundred exceeds). The same with
vLLM's scheduler alone (no sequence coasts, penstock/engines/rollout/scheduler.py) is measured beside it.

Left out: the model runner's own work on the processor (inputs, kernel launches), which needs the GPU to be measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.benchmarks.reporting.result import BenchResult, medians, new_result
from penstock.configs.sections.model import TinyModel
from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.groups.environment import FORCED_VARIABLES

KV_CACHE_BYTES = 1 << 30  # of a model this small: room for millions of tokens
BLOCKS = {"cuda": 16, "cpu": 32}  # tokens of a KV block: a GPU's, and the shortest that vLLM has on a CPU
VOCABULARY, TOKEN = 64, 5


@dataclass(frozen=True)
class Work:
    """`sequences` at a time, `samples` to a prompt of `prompt` tokens, `response` tokens; with log-probs or not."""

    sequences: int
    samples: int
    prompt: int
    response: int
    logprobs: bool = False


@dataclass
class _Clock:
    """Seconds by part, and steps."""

    seconds: dict[str, float] = field(default_factory=dict)
    began: list[float] = field(default_factory=list)  # when each step was handed to the model

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed


def measure(work: Work, command: str, rounds: int) -> BenchResult:
    """Generate `rounds` times with vLLM's scheduler alone, then as rollouts do; return medians per step."""
    import torch

    from penstock.engines.rollout.scheduler import let_sequences_coast

    os.environ.update(FORCED_VARIABLES | {"VLLM_LOGGING_LEVEL": "ERROR"})  # vLLM reads them when it is imported
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        llm = _engine(work, Path(scratch), device)
        clock = _Clock()
        core = _answer_at_once(llm, clock, work.logprobs)
        with _clocked(core.scheduler, clock):
            plain = [_round(llm, work, clock, number) for number in range(rounds)]
        let_sequences_coast(core.scheduler)
        with _clocked(core.scheduler, clock):
            coasted = [_round(llm, work, clock, rounds + number) for number in range(rounds)]
        core.shutdown()
    figures = medians(coasted, {"step_s": "step_s", "slow_step_s": "slow_step_s"})
    figures |= medians(plain, {"plain_step_s": "step_s"})
    figures["tokens_per_s_at_most"] = work.sequences / figures["step_s"]
    rows = [{"scheduler": kind, **row} for kind, found in (("vLLM's", plain), ("coasting", coasted)) for row in found]
    settings = {"work": asdict(work), "rounds": rounds, "block_tokens": BLOCKS[device]}
    return new_result("scheduler", command, figures, settings=settings, details=rows)


def _engine(work: Work, folder: Path, device: str) -> Any:
    from penstock.engines.models.tiny import make_tiny_model
    from penstock.engines.rollout import vllm as versions
    from penstock.engines.rollout.engine import engine_arguments

    length, cuda = work.prompt + work.response, device == "cuda"
    tiny = TinyModel(hidden_size=32, layers=1, heads=1, kv_heads=1, intermediate_size=32, max_positions=length)
    make_tiny_model(folder, tiny, VOCABULARY, eos=1, pad=0, seed=0)
    versions.prepare_vllm(cuda, [])
    import vllm

    arguments = engine_arguments(
        RolloutConfig(cuda_graphs=False),
        work.sequences,
        length,
        KV_CACHE_BYTES,
        gpu=0 if cuda else None,
        sleeps=False,
        logprobs=work.logprobs,
    )
    arguments |= {"load_format": "dummy", "distributed_executor_backend": "uni", "block_size": BLOCKS[device]}
    return vllm.LLM(model=str(folder), dtype="bfloat16" if cuda else "float32", **arguments)


def _answer_at_once(llm: Any, clock: _Clock, logprobs: bool) -> Any:
    """Put made-up tokens in the place of the model's; return vLLM's engine core."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    from penstock.engines.rollout.vllm import engine_core

    core = engine_core(llm)
    scheduled: list[Any] = []

    def execute_model(output: Any, non_block: bool = False) -> Any:
        scheduled.append(output)
        clock.began.append(time.perf_counter())
        return _given(None, non_block)

    def sample_tokens(_: Any, non_block: bool = False) -> Any:
        names = list(scheduled.pop().num_scheduled_tokens)
        tokens = [[] if core.scheduler.requests[name].is_prefill_chunk else [TOKEN] for name in names]
        places = {name: place for place, name in enumerate(names)}
        column = (len(names), 1)
        made_up = LogprobsLists(np.full(column, TOKEN), np.full(column, -1.0, np.float32), np.ones(len(names)))
        lists = made_up if logprobs else None
        return _given(ModelRunnerOutput(names, places, tokens, logprobs=lists, prompt_logprobs_dict={}), non_block)

    core.model_executor.execute_model, core.model_executor.sample_tokens = execute_model, sample_tokens
    return core


@contextmanager
def _clocked(scheduler: Any, clock: _Clock) -> Iterator[None]:
    """Take the time of the scheduler's two calls."""
    methods = {name: getattr(scheduler, name) for name in ("schedule", "update_from_output")}
    for name, method in methods.items():
        setattr(scheduler, name, clock.of(f"{name}_s", method))
    yield
    for name, method in methods.items():
        setattr(scheduler, name, method)


def _given(value: Any, as_future: bool) -> Any:
    if not as_future:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _round(llm: Any, work: Work, clock: _Clock, number: int) -> dict[str, float]:
    """One generation: seconds per step, whole and of the scheduler's two calls."""
    from vllm import SamplingParams

    from penstock.base.ragged import Ragged, offsets_of
    from penstock.engines.commands.rollout import Sampling
    from penstock.engines.rollout.decode_loop import DecodeLoop, Share
    from penstock.engines.rollout.prompt_queue import FixedShare
    from penstock.engines.rollout.responses import SingleResponses

    count = work.sequences // work.samples
    prompts = np.random.default_rng(number).integers(2, VOCABULARY, count * work.prompt).astype(np.int32)
    sampling = Sampling(work.samples, 1.0, 1.0, 0, work.response, True, [0, number, 0], work.logprobs)
    kept = 0 if work.logprobs else None
    parameters = SamplingParams(max_tokens=work.response, ignore_eos=True, detokenize=False, logprobs=kept)
    clock.seconds.clear()
    clock.began.clear()
    began = time.perf_counter()
    asked = Ragged(prompts, offsets_of(np.full(count, work.prompt)))
    share = Share(number, asked, FixedShare(np.arange(count)), sampling, parameters, work.sequences)
    generation = SingleResponses(share)
    DecodeLoop(llm).run(generation)
    generation.generated()
    parts = {"step_s": time.perf_counter() - began, **clock.seconds}
    decoding = np.diff(clock.began[-work.response :])  # the last steps: by then every prompt is computed
    mean = {name: seconds / len(clock.began) for name, seconds in parts.items()}
    return mean | {"slow_step_s": float(np.quantile(decoding, 0.99))}
