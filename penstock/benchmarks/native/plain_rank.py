"""A rank that trains in plain PyTorch FSDP or plain DeepSpeed: the library's model, padded rows.

    python -m penstock.benchmarks.native.plain_rank WORK.json      with RANK and WORLD_SIZE

It takes the optimizer steps of `penstock bench update` on the same rows: the clipped surrogate on-policy, a mean over
the tokens of the batch, AdamW, the gradient's norm bounded. Written as a person would without a trainer: micro-batches
of as many rows, padded to their longest, the loss from whole logits. Left out: whatever makes that faster.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import numpy as np
import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from penstock.benchmarks.native.work import Work
from penstock.configs.sections.optimizer import OptimizerConfig
from penstock.engines.training.start import prepare_deepspeed_for_cpu
from penstock.state.experience import read_columns

CLIP = 0.2


@dataclass(frozen=True)
class Step:
    """Figures of one optimizer step."""

    seconds: float
    loss: float
    grad_norm: float


class Trainer(Protocol):
    """A model that can be trained by one of the libraries."""

    model: Any

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's share of the loss."""

    def step(self) -> float:
        """Take the optimizer step; return the gradient's norm before it is bounded."""


class Fsdp:
    """PyTorch's `fully_shard` around each layer and around the whole; bfloat16 on a GPU, float32 weights."""

    def __init__(self, model: Any, work: Work, device: torch.device) -> None:
        cuda = device.type == "cuda"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        self.model, self._bound = model, work.optimizer["max_grad_norm"]
        self._optimizer = _adamw(model, work, cuda)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a share; FSDP takes the mean over ranks, and the loss is a sum."""
        (loss * distributed.get_world_size()).backward()

    def step(self) -> float:
        """Bound the gradient, step, forget the gradient."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._bound)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm.full_tensor())


class DeepSpeed:
    """`deepspeed.initialize` with ZeRO; bfloat16 on a GPU, with gradients summed in float32."""

    def __init__(self, model: Any, work: Work, device: torch.device, micro_batches: int) -> None:
        cuda = device.type == "cuda"
        settings = {
            "train_micro_batch_size_per_gpu": work.rows,
            "gradient_accumulation_steps": micro_batches,
            "zero_optimization": {"stage": work.zero_stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": work.optimizer["max_grad_norm"],
            "bf16": {"enabled": cuda},
            "data_types": {"grad_accum_dtype": "fp32"},
            "steps_per_print": 10**9,
        }
        self._micro_batches = micro_batches
        self.model, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model, work, cuda), config=settings)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a share; DeepSpeed takes the mean over ranks and micro-batches, and the loss is a sum."""
        self.model.backward(loss * distributed.get_world_size() * self._micro_batches)
        if not self.model.is_gradient_accumulation_boundary():
            self.model.step()  # which counts the micro-batch

    def step(self) -> float:
        """Step; DeepSpeed bounds and forgets the gradient itself."""
        self.model.step()
        return float(self.model.get_global_grad_norm())


def _adamw(model: Any, work: Work, cuda: bool) -> torch.optim.Optimizer:
    given: Any = OptimizerConfig.model_validate(work.optimizer)  # others, and rates with schedules, are refused before
    return torch.optim.AdamW(
        model.parameters(),
        given.learning_rate,
        given.betas,
        given.eps,
        given.weight_decay,
        fused=True if cuda else None,
    )


@dataclass(frozen=True)
class MicroBatch:
    """Padded rows.

    Attributes:
        tokens_BL: prompts with their responses, then padding.
        present_BL: which of them are no padding.
        advantages_BL: of each token that is predicted, at the place of the one before it; 0 elsewhere.
        learnt_BL: 1 where a response's token is predicted.
    """

    tokens_BL: torch.Tensor
    present_BL: torch.Tensor
    advantages_BL: torch.Tensor
    learnt_BL: torch.Tensor


def main(path: str) -> None:
    """Train, and write what it took."""
    work = Work(**json.loads(Path(path).read_text(encoding="utf-8")))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        prepare_deepspeed_for_cpu()
    meet = f"file://{Path(work.results) / 'meet'}"
    distributed.init_process_group("nccl" if cuda else "gloo", init_method=meet, rank=rank, world_size=world)
    batches, tokens = micro_batches(work, rank, world, device)
    model: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, trust_remote_code=False)
    model = model.to(device).train()
    if work.recompute:
        model.gradient_checkpointing_enable()
    trainer: Trainer = (
        Fsdp(model, work, device) if work.library == "fsdp" else DeepSpeed(model, work, device, len(batches))
    )
    steps = [_step(trainer, batches, tokens, device) for _ in range(work.steps)]
    written = {"steps": [asdict(step) for step in steps], "memory": _memory(cuda)}
    (Path(work.results) / f"{rank}.json").write_text(json.dumps(written), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def _step(trainer: Trainer, batches: list[MicroBatch], tokens: int, device: torch.device) -> Step:
    distributed.barrier()
    began, total = time.perf_counter(), torch.zeros((), device=device)
    for batch in batches:
        loss = loss_of(trainer.model, batch, tokens)
        trainer.backward(loss)
        total += loss.detach()
    norm = trainer.step()
    distributed.all_reduce(total)
    loss_value = float(total)  # waits for the device
    return Step(time.perf_counter() - began, loss_value, norm)


def loss_of(model: Any, batch: MicroBatch, tokens: int) -> torch.Tensor:
    """Return a micro-batch's share of the loss: the clipped surrogate, by the tokens of the whole batch."""
    logits_BLV = model(input_ids=batch.tokens_BL, attention_mask=batch.present_BL, use_cache=False).logits[:, :-1]
    picked_BL = -cross_entropy(logits_BLV.float().transpose(1, 2), batch.tokens_BL[:, 1:], reduction="none")
    ratio_BL = torch.exp(picked_BL - picked_BL.detach())
    clipped_BL = ratio_BL.clamp(1 - CLIP, 1 + CLIP)
    gain_BL = torch.minimum(ratio_BL * batch.advantages_BL, clipped_BL * batch.advantages_BL)
    return -(gain_BL * batch.learnt_BL).sum() / tokens


def micro_batches(work: Work, rank: int, world: int, device: torch.device) -> tuple[list[MicroBatch], int]:
    """Return a rank's rows, every `world`-th, and how many response tokens all ranks have together."""
    columns = read_columns(work.experience, ("prompt_tokens", "response_tokens", "advantages"))
    prompts, responses, advantages = (columns[name] for name in ("prompt_tokens", "response_tokens", "advantages"))
    own = list(range(rank, len(responses), world))
    found = [
        _padded([(prompts.row(row), responses.row(row), advantages.row(row)) for row in part], device)
        for part in _parts(own, work.rows)
    ]
    return found, int(responses.lengths_B.sum())


def _parts(rows: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _padded(rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]], device: torch.device) -> MicroBatch:
    longest = max(len(prompt) + len(response) for prompt, response, _ in rows)
    tokens_BL, present_BL = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    advantages_BL = np.zeros((len(rows), longest - 1), np.float32)
    learnt_BL = np.zeros((len(rows), longest - 1), np.float32)
    for number, (prompt, response, advantage) in enumerate(rows):
        whole, first = np.concatenate([prompt, response]), len(prompt) - 1
        tokens_BL[number, : len(whole)], present_BL[number, : len(whole)] = whole, 1
        advantages_BL[number, first : first + len(response)] = advantage
        learnt_BL[number, first : first + len(response)] = 1.0
    return MicroBatch(
        *(torch.from_numpy(part).to(device) for part in (tokens_BL, present_BL, advantages_BL, learnt_BL))
    )


def _memory(cuda: bool) -> float:
    """Return the most memory that was held, GiB: the GPU's, or on a CPU this process's."""
    if cuda:
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main(sys.argv[1])
