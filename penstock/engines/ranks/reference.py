"""The reference beyond log-probs of single tokens: its distributions for a KL over the vocabulary, and its renewal.

A distribution over the vocabulary is too large to hand on, the hidden state that it comes from is not. So the
reference writes its final hidden states into a file beside the experience, and the actor's ranks, which keep the
reference's language head, make both distributions a chunk of tokens at a time (penstock/engines/kernels/lm_head.py).

The reference can become a copy of the actor: in place where both are in one group, through a file where they are not.
Both sides report a digest of their weights, by which the flow compares them
(penstock/tasks/iteration/refresh_reference.py). A checkpoint holds the reference once it is no longer the starting
model.

Suffixes: `_T` response tokens, `_TH` times hidden size, `_VH` vocabulary x hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from penstock.base.files import replacing
from penstock.base.ragged import Ragged
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import PackedBatch, Rows, pack, read_rows
from penstock.engines.commands.reference import (
    Digests,
    LogprobsAndKl,
    ReadReference,
    ReferenceStates,
    RefreshReference,
    TokenValuesAndKl,
    WriteActor,
)
from penstock.engines.kernels.lm_head import Head
from penstock.engines.models.models import language_head
from penstock.engines.ranks.forward import per_token
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.serving.handlers import carries_out
from penstock.engines.sizing.flops import forward_flops, fp8_flops
from penstock.engines.training.full_kl import reference_of, with_states
from penstock.engines.weights.buckets import one_ahead
from penstock.engines.weights.checksum import word_sum
from penstock.engines.weights.experts import all_experts, cut_of
from penstock.engines.weights.lora import without_adapters

STORED = {torch.bfloat16: torch.int16, torch.float32: torch.float32}  # numpy has no bfloat16: its bits are stored


# ---- the KL over the vocabulary ------------------------------------------------------------------------------------


@carries_out(ReferenceStates)
@torch.no_grad()
def reference_states(models: RankModels, command: ReferenceStates) -> None:
    """Write the hidden states that predict the response tokens, an array in the order of the experience.

    Each rank writes its share of rows; a copy to the host runs while the next micro-batch is computed.
    """
    rows, output = read_rows(command.path), command.output
    with _reference(models) as policy:
        stored = STORED[policy.head.weight.dtype]
        if models.rank == 0:
            shape = (len(rows.responses.values_T), policy.head.weight.shape[1])
            np.lib.format.open_memmap(output, "w+", torch.empty(0, dtype=stored).numpy().dtype, shape)
        torch.distributed.barrier()
        states_TH = np.load(output, mmap_mode="r+")
        places = Ragged(np.arange(len(states_TH)), rows.responses.offsets_B1)

        def copies() -> Iterator[tuple[list[int], torch.Tensor, Callable[[], None]]]:
            for index in plan_micro_batches(rows, models.world_size, command.budget)[models.rank]:
                if index:
                    yield index, *_to_host(policy.hidden(pack(rows, index, models.device)).view(stored))

        for index, hidden_TH, wait in one_ahead(copies()):
            wait()
            states_TH[places.take(np.asarray(index)).values_T] = hidden_TH.numpy()
    models.use(_pass_without_head(models, rows))


@contextmanager
def _reference(models: RankModels) -> Iterator[Any]:
    """Return the reference, ready for a pass; beside an actor with adapters it is that actor without them."""
    if "reference" in models.frozen:
        yield models.model("reference")
        return
    models.model("actor")
    with without_adapters(models.lm):
        yield models.trainers["actor"].module


def _to_host(values: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to copy to host memory; return the copy, and what waits for it."""
    if values.device.type == "cpu":
        return values, lambda: None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return host, done.synchronize


def _pass_without_head(models: RankModels, rows: Rows) -> dict[str, float]:
    rows, shape = rows.sequences, models.shapes["reference"]
    work = {"tokens": float(rows.lengths_B.sum())}
    if not shape.explained:
        return work
    lengths = rows.prompts.lengths_B, rows.responses.lengths_B
    work["flops"] = forward_flops(shape, *lengths, scalar_head=True, shared_B=rows.shared_B)
    if models.in_fp8("reference"):
        work["fp8_flops"] = fp8_flops(shape, *lengths, shared_B=rows.shared_B, passes=1)
    return work


@carries_out(LogprobsAndKl)
@torch.no_grad()
def logprobs_and_kl(models: RankModels, command: LogprobsAndKl) -> TokenValuesAndKl:
    """Compute log-probs and KL in one pass of the actor."""
    rows = with_states(read_rows(command.path, routes=models.config.actor.replays), command.states)
    policy, head = models.model("actor"), head_of_reference(models)

    def forward(batch: PackedBatch) -> torch.Tensor:
        logprobs_T, _, kl_T = policy(batch, command.temperature, reference_of(batch, head))
        return torch.stack([logprobs_T, kl_T], dim=1)

    both = per_token(models, rows, "actor", command.budget, forward)
    logprobs_T, kl_T = np.ascontiguousarray(both.values_T.reshape(-1, 2).T)
    return TokenValuesAndKl(both.rows, logprobs_T, kl_T)


def head_of_reference(models: RankModels) -> Head:
    """Return the reference's language head: its own, the copy that is kept, or the one under the actor's adapters."""
    if models.reference_head is not None:
        return models.reference_head
    policy: Any = models.frozen.get("reference") or models.trainers["actor"].module
    head = policy.head
    return Head(head.weight.detach(), None if head.bias is None else head.bias.detach())


def keep_head(models: RankModels) -> None:
    """Keep a copy of the actor's language head while it equals the reference's, where that is in another group."""
    if models.config.algorithm.full_kl and models.config.actor.lora is None:
        models.reference_head = Head(*(_copied(values) for values in _values_of_head(models)))


def _values_of_head(models: RankModels) -> list[nn.Parameter]:
    """Weight of the actor's language head, and its bias if it has one."""
    head = language_head(models.lm)
    return [value for value in (head.weight, head.bias) if value is not None]


def _copied(parameter: nn.Parameter) -> torch.Tensor:
    with _whole(parameter) as values:
        return values.detach().clone()


# ---- its renewal ---------------------------------------------------------------------------------------------------


@carries_out(RefreshReference)
@torch.no_grad()
def refresh_reference(models: RankModels, command: RefreshReference) -> Digests:
    """Copy the actor into the reference, parameter by parameter; return both digests. Every rank gathers ZeRO-3's."""
    reference, sums = _parameters(models.frozen["reference"].lm), {}
    for name, parameter in _parameters(models.lm).items():
        with _whole(parameter) as values:
            sums[name] = word_sum(values)
            reference[name].copy_(values)
    models.reference_refreshed = True
    return Digests([_digest(sums), digest(reference)])


@carries_out(WriteActor)
@torch.no_grad()
def write_actor(models: RankModels, command: WriteActor) -> Digests:
    """Write the actor for a reference elsewhere: all ranks gather, rank 0 writes; return the weights' digest."""
    weights, sums = {}, {}
    for name, parameter in _parameters(models.lm).items():
        with _whole(parameter) as values:
            sums[name] = word_sum(values)
            if models.rank == 0:
                weights[name] = values.to("cpu", copy=True)
    if models.rank == 0:
        with replacing(Path(command.path)) as aside:
            save_file(weights, aside)
    torch.distributed.barrier()
    keep_head(models)
    return Digests([_digest(sums)])


@carries_out(ReadReference)
def read_reference(models: RankModels, command: ReadReference) -> Digests:
    """Read the reference from that file; return the digest of its weights as they are on the device."""
    parameters = _parameters(models.frozen["reference"].lm)
    with safe_open(command.path, framework="pt") as file:
        _copy(file.get_tensor, parameters)
    models.reference_refreshed = True
    return Digests([digest(parameters)])


def refreshed_reference(models: RankModels) -> dict[str, torch.Tensor]:
    """Return the reference's weights by name; none where it is elsewhere, or always the starting model.

    Where it is refreshed from time to time they are there from the beginning, so that one can go back to that, too.
    """
    kl = models.config.algorithm.kl
    refreshed = models.reference_refreshed or (kl is not None and kl.refresh_every is not None)
    if not refreshed or "reference" not in models.frozen:
        return {}
    return {name: value.data for name, value in _parameters(models.frozen["reference"].lm).items()}


def restore_reference(models: RankModels, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore what `refreshed_reference` returned, and what the actor's group keeps of it."""
    if not saved:
        return
    if "reference" in models.frozen:
        _copy(saved.__getitem__, _parameters(models.frozen["reference"].lm))
        models.reference_refreshed = True
    elif models.reference_head is not None:
        names = {id(parameter): name for name, parameter in _parameters(models.lm).items()}
        kept = zip(_values_of_head(models), models.reference_head, strict=False)
        _copy(saved.__getitem__, {names[id(parameter)]: value for parameter, value in kept if value is not None})


def digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names and bits, the same on every device."""
    return _digest({name: word_sum(values.data) for name, values in parameters.items()})


def _digest(sums: dict[str, torch.Tensor]) -> str:
    named = list(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


@torch.no_grad()
def _copy(saved: Callable[[str], torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(saved(name))


def _parameters(lm: Any) -> dict[str, nn.Parameter]:
    return dict(lm.named_parameters())


@contextmanager
def _whole(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """The parameter's values, gathered within this block where ranks hold parts of it; every rank enters it."""
    if cut_of(parameter) is not None:
        yield all_experts(parameter)
        return
    if not hasattr(parameter, "ds_id"):
        yield parameter.data
        return
    with deepspeed.zero.GatheredParameters(parameter):
        yield parameter.data
