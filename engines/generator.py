"""Rollout with vLLM inside the rank's process: token ids in, token ids out, weights shared with the trainer.

No detokenisation in the engine and no log-probs (they cost 40 to 50 % of its speed): what the algorithm needs of
log-probs, the trainer computes. On a GPU the engine sleeps between rollouts: its KV cache goes back to training,
shared weights stay where they are.

Randomness: every rollout seeds the generators from (seed, iteration, rank), so a repeated rollout gives the same
tokens and nothing of a generator's state needs saving.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from configs.schema import RolloutConfig
from engines import versions, weights
from state.experience import Ragged

GIB = 1 << 30
CPU_KV_CACHE_LIMIT = 1 * GIB


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    ignore_eos: bool
    seed: int  # of this rollout on this rank


@dataclass(frozen=True)
class Generated:
    """Responses, `samples` rows per prompt in prompt order."""

    responses: Ragged
    truncated_B: np.ndarray  # cut at max_tokens


class Generator:
    """A vLLM engine on this rank, bound to the trainer's model.

    Args:
        folder: Hugging Face folder with the architecture (its weights are not read).
        lm: the trainer's model, parameters at their final addresses.
        share: whether storage may be shared (ZeRO-3 has no whole parameters to share).
    """

    def __init__(
        self,
        folder: Path,
        lm: nn.Module,
        dtype: torch.dtype,
        config: RolloutConfig,
        max_prompt_tokens: int,
        share: bool,
    ) -> None:
        self.lm, self.cuda = lm, torch.cuda.is_available()
        self.stop_token_ids = stop_token_ids(lm)
        versions.prepare_vllm(self.cuda)
        with _global_randomness_kept():
            bound = weights.register_loader("penstock", lm, share)
            self.llm = _start(folder, dtype, config, max_prompt_tokens + config.max_response_tokens, lm, self.cuda)
        self.sharing = bound[-1]
        self.model = versions.vllm_model(self.llm)
        self.version = -1
        self.asleep: set[str] = set()
        self.sleep()

    def reshard(self, version: int) -> dict[str, Any]:
        """Make the trainer's weights this engine's and prove it; return bytes moved.

        Raises:
            RuntimeError: a parameter is not the trainer's afterwards.
        """
        if self.sharing.copied_count:
            self._wake("weights")
        moved = weights.copy(self.model, self.lm, self.sharing)
        if wrong := weights.verify(self.model, self.lm, self.sharing):
            raise RuntimeError(
                f"after the reshard {len(wrong)} rollout parameters are not the actor's: {', '.join(wrong[:5])}"
            )
        self.version = version
        return {
            "bytes": moved,
            "parameters_shared": len(self.sharing.shared),
            "parameters_copied": self.sharing.copied_count,
        }

    def generate(self, prompts: Ragged, sampling: Sampling) -> Generated:
        """Generate `sampling.samples` responses to each prompt; a stop token ends a response and belongs to it."""
        self.wake()
        _seed_everything(sampling.seed)
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompts.row(index).tolist()} for index in range(len(prompts))],
            self._parameters(sampling),
            use_tqdm=False,
        )
        completions = [completion for output in outputs for completion in output.outputs]
        responses = Ragged.of([np.asarray(completion.token_ids, np.int32) for completion in completions], np.int32)
        truncated = np.fromiter((completion.finish_reason == "length" for completion in completions), dtype=bool)
        self.sleep()
        return Generated(responses, truncated)

    def _parameters(self, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=sampling.samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else self.stop_token_ids,
            detokenize=False,
        )

    def wake(self) -> None:
        """Map the KV cache, empty: cached prefixes belong to older weights."""
        if self.asleep:
            torch.cuda.empty_cache()  # vLLM maps from the driver, not from torch's cache
        self._wake("weights", "kv_cache")  # "weights" also holds vLLM's own buffers, such as the rotary table
        self.llm.reset_prefix_cache()

    def _wake(self, *tags: str) -> None:
        for tag in tags:
            if tag in self.asleep:
                self.llm.wake_up(tags=[tag])
                self.asleep.remove(tag)

    def sleep(self) -> None:
        """Give the KV cache's memory to training. Shared weights are outside vLLM's pool and stay."""
        if self.cuda:
            self.llm.sleep(level=1)
            self.asleep = {"weights", "kv_cache"}

    def close(self) -> None:
        """End the engine. vLLM destroys torch.distributed with it, so nothing may follow that communicates."""
        self.llm.llm_engine.engine_core.shutdown()


def stop_token_ids(lm: Any) -> list[int]:
    """Return the token ids that end a response, from the model folder's generation settings."""
    declared = lm.generation_config.eos_token_id
    if declared is None:
        declared = lm.config.eos_token_id
    return [declared] if isinstance(declared, int) else list(declared or [])


def _start(folder: Path, dtype: torch.dtype, config: RolloutConfig, max_length: int, lm: nn.Module, cuda: bool) -> Any:
    import vllm

    start: Any = vllm.LLM
    return start(
        model=str(folder),
        load_format="penstock",
        dtype=str(dtype).removeprefix("torch."),
        distributed_executor_backend="external_launcher",
        max_model_len=max_length,
        max_num_seqs=config.max_sequences,
        kv_cache_memory_bytes=kv_cache_bytes(config, lm.config, max_length, dtype, cuda),
        gpu_memory_utilization=0.05,  # only a floor that vLLM checks at its start: the KV cache is sized above
        enforce_eager=not (cuda and config.cuda_graphs),
        enable_sleep_mode=cuda,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
    )


def kv_cache_bytes(config: RolloutConfig, model: Any, max_length: int, dtype: torch.dtype, cuda: bool) -> int:
    """Return the KV cache's size: what is asked for, else what all sequences need, within free memory."""
    if config.kv_cache_gib:
        return int(config.kv_cache_gib * GIB)
    heads = model.num_key_value_heads
    head_size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    per_token = 2 * model.num_hidden_layers * heads * head_size * dtype.itemsize
    block = 128  # vLLM hands out whole blocks; its CPU blocks are the largest
    needed = (config.max_sequences + 1) * (-(-max_length // block) * block) * per_token
    if cuda:
        return min(needed, int(0.8 * torch.cuda.mem_get_info()[0]))
    return min(needed, CPU_KV_CACHE_LIMIT, psutil.virtual_memory().available // 4)


class _global_randomness_kept:
    """vLLM seeds the process's generators when it starts; training must not notice."""

    def __enter__(self) -> None:
        self.states = (torch.get_rng_state(), np.random.get_state(), random.getstate())

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.states[0])
        np.random.set_state(self.states[1])
        random.setstate(self.states[2])


def _seed_everything(seed: int) -> None:
    """vLLM draws from these, depending on version and device."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
