"""What a command used on its rank: seconds, tokens and FLOPs, and on a GPU the peak of its memory.

Torch counts vLLM's memory pool as allocated even while the engine sleeps and no memory is behind it; that part is
subtracted here. Left out: what other processes use of the GPU (penstock/engines/groups/machine.py sees all of it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch

from penstock.engines.batches.packing import Rows
from penstock.engines.ranks.models import CountedModel, RankModels
from penstock.engines.sizing.flops import forward_flops, fp8_flops, training_flops

GIB = 1 << 30


def begin_usage(device: torch.device) -> Callable[[Collection[str]], dict[str, float]]:
    """Begin to measure; the function that is returned ends it.

    Its argument: tags of vLLM's pool that were asleep all the time. Its result: `seconds`, and on a GPU
    `allocated_gib` and `reserved_gib`, the peaks of torch's allocator.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()

    def end(asleep: Collection[str]) -> dict[str, float]:
        usage = {"seconds": time.perf_counter() - begin}
        if device.type != "cuda":
            return usage
        unmapped = _pool_bytes(asleep) if asleep else 0
        usage["allocated_gib"] = (torch.cuda.max_memory_allocated() - unmapped) / GIB
        usage["reserved_gib"] = (torch.cuda.max_memory_reserved() - unmapped) / GIB
        return usage

    return end


def _pool_bytes(tags: Collection[str]) -> int:
    from vllm.device_allocator.cumem import CuMemAllocator

    held = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(int(data.handle[1]) for data in held if data.tag in tags)


def work_on(models: RankModels, rows: Rows, role: CountedModel, epochs: int) -> dict[str, float]:
    """Return `tokens` and `flops` of all ranks: of `epochs` passes of training, or of one forward pass for 0.

    FLOPs are known of dense decoders. Of a model that computes in FP8 `fp8_flops` are those of them that do.
    """
    rows, shape = rows.sequences, models.shapes[role]
    prompt_B, response_B = rows.prompts.lengths_B, rows.responses.lengths_B
    work = {"tokens": float(rows.lengths_B.sum() * max(1, epochs))}
    if not shape.explained:
        return work
    trainer = {"actor": models.config.actor, "critic": models.config.critic}.get(role)
    adapters = shape.adapter_parameters_per_token(trainer.lora) if trainer is not None else 0
    count, times = (training_flops, epochs) if epochs else (forward_flops, 1)
    shared_B, scalar = rows.shared_B, role == "critic"
    work["flops"] = times * count(shape, prompt_B, response_B, scalar_head=scalar, shared_B=shared_B, adapters=adapters)
    if models.in_fp8(role):
        passes = 2 if epochs else 1
        work["fp8_flops"] = times * fp8_flops(shape, prompt_B, response_B, shared_B=shared_B, passes=passes)
    return work
