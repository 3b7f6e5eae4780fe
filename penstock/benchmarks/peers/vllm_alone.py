"""vLLM by itself on a recipe's rollout: `LLM.generate` in a process of its own, with nothing of Penstock's around it.

It is what a rollout is compared with: the same model, prompts, sampling, number of sequences and KV cache (a prompt's
samples from one request), no log-probs, no text. Run as a program that reads a `Work` as JSON; prints a JSON list of
tokens per second.

Left out: several engines or GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from penstock.base.errors import UserError
from penstock.benchmarks.reporting.result import steady
from penstock.benchmarks.rollout import Prompts
from penstock.benchmarks.session import settings_of
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.groups.environment import FORCED_VARIABLES


class Work(BaseModel):
    """The rollouts of some iterations."""

    folder: Path
    rollout: RolloutConfig
    temperature: float
    prompt_tokens: int
    prompts: list[Prompts]


def model_folder(config: TrainConfig) -> Path:
    """Return the recipe's model folder.

    Raises:
        UserError: its model is not a folder.
    """
    if config.model.path is None:
        raise UserError("vLLM by itself needs a model folder", "set model.path")
    return Path(config.model.path)


def measure(config: TrainConfig, prompts: list[Prompts], skip: int) -> dict[str, dict[str, float]]:
    """Return vLLM's tokens per second under its name and version; the median after the first `skip` rounds.

    Args:
        prompts: by round, those that the rollout answered.

    Raises:
        UserError: the recipe's model is not a folder, or vLLM stopped.
    """
    work = Work(
        folder=model_folder(config),
        rollout=config.rollout,
        temperature=settings_of(config, 1).temperature,
        prompt_tokens=config.data.max_prompt_tokens,
        prompts=prompts,
    )
    command = [sys.executable, "-m", "penstock.benchmarks.peers.vllm_alone"]
    environment = os.environ | FORCED_VARIABLES | {"VLLM_LOGGING_LEVEL": "ERROR"}
    asked = work.model_dump_json()
    ended = subprocess.run(command, env=environment, input=asked, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise UserError(f"vLLM by itself ended with exit code {ended.returncode}", "its messages are above")
    version, rates = json.loads(ended.stdout.splitlines()[-1])
    return {f"vLLM {version}": {"rollout_tokens_per_s": statistics.median(steady(rates, skip))}}


def _rates(work: Work) -> tuple[str, Sequence[float]]:
    """Generate all rounds; return vLLM's version and each round's tokens per second."""
    import torch
    import vllm

    from penstock.engines.families.shape import read_shape
    from penstock.engines.rollout.batch_sizes import max_sequences
    from penstock.engines.rollout.engine import kv_cache_bytes

    config, cuda = work.rollout, torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    sequences = max_sequences(config, engines=1)
    length = work.prompt_tokens + config.max_response_tokens
    llm = vllm.LLM(
        model=str(work.folder),
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=sequences,
        kv_cache_memory_bytes=kv_cache_bytes(config, sequences, read_shape(work.folder), length, dtype, cuda),
        enforce_eager=not cuda,
        disable_log_stats=True,
        seed=0,
    )
    parameters = vllm.SamplingParams(
        n=config.samples,
        temperature=work.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_response_tokens,
        ignore_eos=config.ignore_eos,
        detokenize=False,
    )
    rates = []
    for rows in work.prompts:
        prompts = [vllm.TokensPrompt(prompt_token_ids=row) for row in rows]
        began = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        rates.append(tokens / (time.perf_counter() - began))
    return vllm.__version__, rates


if __name__ == "__main__":
    print(json.dumps(_rates(Work.model_validate_json(sys.stdin.read()))))
