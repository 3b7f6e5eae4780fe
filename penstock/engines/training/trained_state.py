"""The trained state as DeepSpeed keeps it: flat tensors of a rank, and where in them which parts of parameters lie.

What has to survive a training's process is the float32 master of the weights and the states that the optimizer keeps by
it (penstock/engines/training/optimizers.py). Each ZeRO stage cuts them over the ranks in another way, which is all that
tells stages and numbers of ranks apart:

    0           each parameter by itself, whole on every rank
    1, 2        all parameters one after the other in one tensor, cut into a part per rank
    3           each parameter cut into a part per rank; a rank's parts one after the other

Of experts that lie on several ranks a rank has some alone, which are cut over the ranks that have the same
(penstock/engines/weights/experts.py).

Weights of lower precision follow from the master and are made of it again, where they are: vLLM reads them there.

Left out: where a state is kept (penstock/engines/training/state_images.py); parameters that are not trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.base.nameless_files import check_on_disk, map_nameless
from penstock.engines.training.optimizers import STATES, STEP, first_state
from penstock.engines.weights.experts import cut_of, whole_shape

MASTER = "master"


@dataclass(frozen=True)
class ParameterSlice:
    """A range of a flat tensor, from `offset` on: `count` elements of a parameter, from `start` on."""

    parameter: str
    start: int
    count: int
    offset: int


@dataclass(frozen=True)
class Share:
    """What a rank holds of some parameters: a flat master, by which the optimizer keeps its states.

    Attributes:
        slices: in the order of the tensor; what they leave out is padding.
        group: the optimizer's settings for it; under `STATES` what it keeps.
    """

    master: torch.Tensor
    slices: tuple[ParameterSlice, ...]
    group: dict[str, Any]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; tied ones once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def is_replicated(optimizer: Any) -> bool:
    """Whether every rank holds the whole state (ZeRO stage 0)."""
    return isinstance(optimizer, torch.optim.Optimizer)


def shares_of(module: nn.Module, optimizer: Any) -> list[Share]:
    """Return what this rank holds, of every class of optimizer that DeepSpeed wraps ours in."""
    names = {parameter: name for name, parameter in trained_parameters(module).items()}
    if is_replicated(optimizer):
        grouped = [(one, group) for group in optimizer.param_groups for one in group["params"]]
        return [Share(one, (ParameterSlice(names[one], 0, one.numel(), 0),), group) for one, group in grouped]
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        (settings,) = optimizer.param_groups  # as those have that step every number by itself
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [Share(master, tuple(_sharded_slices(group, names)), settings) for master, group in groups]
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        partitions, masters = optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
        offsets = optimizer.round_robin_bit16_offsets
        laid_out = list(zip(optimizer.round_robin_bit16_groups, offsets, strict=True))
    else:
        partitions, masters = optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
        laid_out = [(group, [0, *accumulate(one.numel() for one in group)]) for group in optimizer.bf16_groups]
    ranks = map(torch.distributed.get_rank, optimizer.real_dp_process_group)  # of experts others than of the rest
    held = zip(masters, partitions, laid_out, ranks, optimizer.param_groups, strict=True)
    return [
        Share(master, tuple(_cut_slices(zip(group, places, strict=False), names, *_bounds(parts, rank))), settings)
        for master, parts, (group, places), rank, settings in held
    ]


def _bounds(parts: list[torch.Tensor], rank: int) -> tuple[int, int]:
    """Return where a rank's part of the flat tensor begins and ends."""
    begin = sum(part.numel() for part in parts[:rank])
    return begin, begin + parts[rank].numel()


def _cut_slices(
    laid_out: Iterable[tuple[nn.Parameter, int]], names: dict[nn.Parameter, str], begin: int, end: int
) -> Iterator[ParameterSlice]:
    """Yield the parts of parameters (with their offsets in the flat tensor of all ranks) between `begin` and `end`."""
    for parameter, offset in laid_out:
        first, last = max(begin, offset), min(end, offset + parameter.numel())
        if first < last:
            cut = cut_of(parameter)
            start = first - offset + (0 if cut is None else cut.start)
            yield ParameterSlice(names[parameter], start, last - first, first - begin)


def _sharded_slices(group: list[Any], names: dict[nn.Parameter, str]) -> Iterator[ParameterSlice]:
    offset = 0
    for parameter in group:
        size = parameter.partition_numel()
        start = torch.distributed.get_rank() * size
        count = min(size, parameter.ds_numel - start)
        if count > 0:
            yield ParameterSlice(names[parameter], start, count, offset)
        offset += size


def optimizer_state(optimizer: Any, share: Share) -> dict[str, torch.Tensor]:
    """Return the states of a share by name; before the first step they are made, as that step would make them.

    Their tensors stay the same as long as the optimizer does.
    """
    state: dict[str, torch.Tensor] = optimizer.state[share.master]
    for name in share.group[STATES]:
        if state.get(name) is None:
            state[name] = first_state(name, share.master, share.group)
    return state


def has_optimizer_state(optimizer: Any, shares: list[Share]) -> bool:
    """Whether the states of all shares are there."""
    held = ((optimizer.state.get(share.master, {}), share.group[STATES]) for share in shares)
    return all(state.get(name) is not None for state, names in held for name in names)


@torch.no_grad()
def live_in_files(module: nn.Module, optimizer: Any, folder: Path) -> None:
    """Move what ZeRO 3 keeps in host memory to files in a folder: masters, states and, if they are there, weights.

    All of them stay tensors, so that whoever steps, saves or restores them needs to know nothing of it; which pages are
    in memory the kernel decides (penstock/base/nameless_files.py). Sums of gradients stay, since every micro-batch adds
    to them, and are stepped on where they are, instead of a copy.

    Raises:
        UserError: the folder does not take them, or is in memory itself.
    """
    check_on_disk(folder)
    begin, sums, weights = 0, optimizer.grad_partitions_flat_buffer, optimizer.fp16_partitioned_groups_flat
    for number, share in enumerate(shares_of(module, optimizer)):
        master, state = share.master, optimizer.state[share.master]
        master.data = _in_file(master.data, folder)
        state |= {name: _zeros_in_file(master, folder) for name in share.group[STATES] if name != STEP}
        optimizer_state(optimizer, share)
        master.grad = sums.narrow(0, begin, master.numel())
        begin += master.numel()
        if optimizer.offload_param:
            weights[number] = _in_file(weights[number], folder)
            optimizer._unflatten_partitioned_parameters(number)
    optimizer.param_groups_fp16_flat_cpu_memory = []


def _in_file(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    return _zeros_in_file(tensor, folder).copy_(tensor)


def _zeros_in_file(like: torch.Tensor, folder: Path) -> torch.Tensor:
    """Return zeros in a file, of the flat shape and the dtype of another tensor."""
    return torch.frombuffer(map_nameless(folder, like.nbytes), dtype=like.dtype)


@torch.no_grad()
def before_restore(optimizer: Any) -> None:
    """Take back what was gathered of the old weights; every rank calls it."""
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()


@torch.no_grad()
def rebuild_weights(optimizer: Any) -> None:
    """Make the weights of their restored master, in place; every rank calls it."""
    if is_replicated(optimizer):  # the weights are their own master
        return
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.update_lp_params()
        return
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()


@dataclass(frozen=True)
class TrainedState:
    """A trained model's state on this rank: the living tensors, and what has to be known of them.

    Attributes:
        tensors: by name, e.g. "0/master" and "0/exp_avg" of the first share.
        values: for JSON; what the attributes of `penstock.engines.training.state_images.SavedState` are made of.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def trained_state(module: nn.Module, optimizer: Any, part: int = 0, parts: int = 1) -> TrainedState:
    """Return this rank's state; the optimizer's must be there (`optimizer_state`).

    Args:
        part: of a state that every rank holds whole, which of `parts` to return: its neighbours return the others.
    """
    shares = list(enumerate(shares_of(module, optimizer)))
    if is_replicated(optimizer):
        shares = shares[part::parts]
    tensors = {}
    for number, share in shares:
        state = optimizer_state(optimizer, share)
        tensors[f"{number}/{MASTER}"] = share.master.data
        tensors |= {f"{number}/{name}": state[name].data for name in share.group[STATES]}
    parameters = trained_parameters(module)
    names = {parameter: name for name, parameter in parameters.items()}
    everywhere = module.named_parameters(remove_duplicate=False)
    values = {
        "shares": {str(number): [list(astuple(one)) for one in share.slices] for number, share in shares},
        "parameters": {name: whole_shape(parameter) for name, parameter in parameters.items()},
        "tied": {name: names[one] for name, one in everywhere if names.get(one, name) != name},
        "dtype": str(next(iter(parameters.values())).dtype).removeprefix("torch."),
    }
    return TrainedState(tensors, values)
