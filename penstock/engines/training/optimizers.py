"""The optimizers, of torch's classes, and the states that each keeps of a parameter.

Each group of an optimizer says under `STATES` what it keeps, by the names that torch's class gives: that is what a
checkpoint holds besides the weights. All but the codes of 8-bit states are float32, and but for the step count zero at
first.

AdamW and SGD step every number by itself, so they step the flat parts that ZeRO makes of parameters as well. Muon
(Jordan et al. 2024; steps as large as AdamW's by arXiv 2502.16982) and Adafactor (arXiv 1804.04235) need matrices.
DeepSpeed's own Muon for ZeRO 1 and 2 is left out: it writes the update into the gradients during the backward pass,
where they are clipped, reported and, of portions, weighed as if they were gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.configs.sections.optimizer import BLOCK_8BIT, LEAST_8BIT, OptimizerConfig
from penstock.engines.weights.experts import cut_of

STATES, STEP, BITS = "states", "step", "bits"
ADAMW_STATES = ("exp_avg", "exp_avg_sq", STEP)
CODES = ("state1", "state2")  # of 8-bit AdamW: the two moments
Named = Mapping[str, nn.Parameter]


def make_optimizer(named: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of trained parameters, with a learning rate of 0: each step gets its own.

    Args:
        named: by name, in the order in which they shall lie in the flat buffer.
    """
    if config.name == "sgd":
        return _sgd(named, config)
    if config.name == "muon":
        return _muon(named, config)
    if config.name == "adafactor":
        return _adafactor(named, config)
    if config.name == "adamw8bit":
        return _adamw_8bit(named, config)
    return _adamw(named, config)


def _adamw(named: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    parameters, groups = list(named.values()), _groups(named, ADAMW_STATES)
    given: Any = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=0.0, fused=fused, **given)


def _sgd(named: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    momentum = config.momentum or 0.0
    groups = _groups(named, ("momentum_buffer",) if momentum else ())
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum, weight_decay=config.weight_decay, fused=True)


def _groups(named: Named, states: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return one group, and another one of experts that lie on several ranks, marked as DeepSpeed wants it."""
    experts = [one for one in named.values() if cut_of(one) is not None]
    rest = [one for one in named.values() if cut_of(one) is None]
    groups: list[dict[str, Any]] = [{"params": rest, STATES: states}]
    if experts:
        groups.append({"params": experts, STATES: states, "moe": True, "name": vars(experts[0])["group_name"]})
    return groups


def _muon(named: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    matrices = {name: one for name, one in named.items() if is_matrix_of_block(name, one)}
    muon = torch.optim.Muon(
        [{"params": list(matrices.values()), STATES: ("momentum_buffer",)}],
        lr=0.0,
        weight_decay=config.weight_decay,
        momentum=config.momentum or 0.0,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate is for both
    )
    return SideBySide(muon, _adamw({name: one for name, one in named.items() if name not in matrices}, config))


def is_matrix_of_block(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a block: no embedding, head, norm, bias or stack of experts' matrices."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


def _adafactor(named: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    matrices = [one for one in named.values() if one.ndim > 1]
    vectors = [one for one in named.values() if one.ndim <= 1]
    groups = [
        {"params": matrices, STATES: ("row_var", "col_var", STEP)},
        {"params": vectors, STATES: ("variance", STEP)},
    ]
    return torch.optim.Adafactor(groups, lr=0.0, weight_decay=config.weight_decay)


def _adamw_8bit(named: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    from penstock.engines.training.adamw_8bit import AdamW8bit

    small = [one for one in named.values() if one.numel() < LEAST_8BIT]
    large = [one for one in named.values() if one.numel() >= LEAST_8BIT]
    groups = [
        {"params": large, BITS: 8, STATES: (*CODES, "absmax1", "absmax2", STEP)},
        {"params": small, BITS: 32, STATES: (*CODES, STEP)},
    ]
    given: Any = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    return AdamW8bit([group for group in groups if group["params"]], _first_states, lr=0.0, **given)


def _first_states(parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: first_state(name, parameter, group) for name in group[STATES]}


class SideBySide(torch.optim.Optimizer):
    """Two optimizers with parameters of their own, as the one that DeepSpeed takes; groups and states are theirs."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._parts = (first, second)
        first.state = second.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both."""
        for part in self._parts:
            part.step(closure)


def first_state(name: str, master: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return a state as it is before the first step."""
    if name == STEP:
        device = master.device if group.get("fused") else torch.device("cpu")
        return torch.zeros((), dtype=torch.float32, device=device)
    if name in CODES and group[BITS] == 8:
        return torch.zeros_like(master, dtype=torch.uint8, memory_format=torch.preserve_format, requires_grad=False)
    if name in ("absmax1", "absmax2"):
        return master.new_zeros(-(-master.numel() // BLOCK_8BIT))
    if name == "row_var":
        return master.new_zeros((*master.shape[:-1], 1))
    if name == "col_var":
        return master.new_zeros((*master.shape[:-2], 1, master.shape[-1]))
    return torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False)
